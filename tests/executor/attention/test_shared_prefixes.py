"""Which decodes read a prefix together."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_executor.attention.shared_prefixes import shared_prefixes

BLOCK_SIZE = 16


def found(tables: list[list[int]], lengths: list[int]) -> list[tuple[set[int], int]]:
    """The members and the tokens of each prefix."""
    width = max(map(len, tables))
    padded = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
    rows = np.arange(len(tables), dtype=np.int64)
    prefixes, members = shared_prefixes(padded, rows, np.array(lengths, np.int64), BLOCK_SIZE)
    return [(set(members[begin : begin + count].tolist()), tokens) for begin, count, tokens in prefixes.tolist()]


def test_a_system_prompt_is_read_once() -> None:
    tables = [[1, 2, 3, 4, 5, 10 + i] for i in range(6)] + [[20, 21, 22, 23, 24, 25]]
    assert found(tables, [90] * 7) == [({0, 1, 2, 3, 4, 5}, 80)]


def test_branches_that_share_more_are_read_apart() -> None:
    """All share 4 blocks; two halves share 20 more each, which saves more than the common ones."""
    halves = [[1, 2, 3, 4, *range(10 * half, 10 * half + 20), 900 + i] for half in (10, 20) for i in range(4)]
    expected = [({0, 1, 2, 3}, 24 * BLOCK_SIZE), ({4, 5, 6, 7}, 24 * BLOCK_SIZE)]
    assert found(halves, [24 * BLOCK_SIZE + 3] * 8) == expected


def test_the_newest_token_belongs_to_its_sequence() -> None:
    tables = [[1, 2, 3, 4, 5]] * 4
    assert found(tables, [80] * 4) == [({0, 1, 2, 3}, 64)]
    assert found(tables, [64] * 4) == [], "48 tokens are not worth it"
    assert found(tables, [80, 80, 80, 1]) == [], "nor are three sequences"


class CountedTables(np.ndarray[Any, np.dtype[np.int32]]):
    """Block tables that count how often they are looked at, and the blocks that are copied out of them."""

    looks = copied = 0

    def __getitem__(self, key: Any) -> Any:
        taken = super().__getitem__(key)
        CountedTables.looks += 1
        if not np.shares_memory(taken, self):
            CountedTables.copied += taken.size
        return taken


def nested(number: int, first: int, width: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Tables and lengths of contexts in one document: ``first`` blocks of it, each context one more than the last."""
    tables = np.zeros((number, width), np.int32)
    for i in range(number):
        tables[i, : first + i] = np.arange(1, first + i + 1)
        tables[i, first + i] = 1_000_000 + i
    return tables, (np.arange(number) + first) * BLOCK_SIZE + 1


@pytest.mark.parametrize(("number", "width"), [(32, 8192), (256, 512), (1100, 1300)])
def test_nested_contexts_take_few_operations(number: int, width: int) -> None:
    tables, lengths = nested(number, 8, width)
    CountedTables.looks = CountedTables.copied = 0
    prefixes, members = shared_prefixes(
        tables.view(CountedTables), np.arange(number, dtype=np.int64), lengths, BLOCK_SIZE
    )
    ((begin, count, tokens),) = prefixes.tolist()
    best = max((number - i - 1) * (8 + i) for i in range(number - 3))
    assert (begin, (count - 1) * tokens) == (0, best * BLOCK_SIZE)
    assert set(members.tolist()) == set(range(number - count, number)), "those with the longest contexts"
    assert CountedTables.looks < 100
    in_contexts = int((lengths // BLOCK_SIZE).sum())
    assert CountedTables.copied < 4 * in_contexts + 100 * number, "no block behind the contexts, and few ones twice"


def test_what_branches_at_every_block_takes_few_operations() -> None:
    """Each decode leaves the others one block later than the last, and decodes that leave early are long."""
    tables = np.broadcast_to(np.arange(1, 513, dtype=np.int32), (256, 512)).copy()
    for i in range(256):
        tables[i, 5 + i :] = 1_000_000 + i
    CountedTables.looks = CountedTables.copied = 0
    prefixes, _ = shared_prefixes(
        tables.view(CountedTables), np.arange(256), (512 - np.arange(256)) * BLOCK_SIZE, BLOCK_SIZE
    )
    assert saved(prefixes) == max((256 - i - 1) * (5 + i) for i in range(253))
    assert CountedTables.looks < 300


def saved(prefixes: npt.NDArray[np.int64]) -> int:
    """The blocks that need not be read."""
    return int(((prefixes[:, 1] - 1) * prefixes[:, 2]).sum()) // BLOCK_SIZE


def most(contexts: list[list[int]], depth: int = 0) -> int:
    """The most blocks that can be saved below one node of the trie of contexts, without any cleverness."""
    if len(contexts) < 4:
        return 0
    longer = [context for context in contexts if len(context) > depth]
    branches: dict[int, list[list[int]]] = {}
    for context in longer:
        branches.setdefault(context[depth], []).append(context)
    here = (len(contexts) - 1) * depth if depth * BLOCK_SIZE >= 64 else 0
    return max(here, sum(most(branch, depth + 1) for branch in branches.values()))


@st.composite
def branching(draw: st.DrawFn) -> list[list[int]]:
    """Contexts each of which begins like one before it."""
    contexts: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 18))):
        start = draw(st.sampled_from(contexts))
        rest = draw(st.lists(st.integers(1, 3), max_size=12))
        contexts.append([*start[: draw(st.integers(0, len(start)))], *rest] if draw(st.booleans()) else [*start, *rest])
    return contexts


@given(contexts=branching())
def test_no_other_prefixes_save_more(contexts: list[list[int]]) -> None:
    tables = np.zeros((len(contexts), max(map(len, contexts)) + 1), np.int32)
    for row, context in enumerate(contexts):
        tables[row, : len(context)] = context
    lengths = np.array([len(context) * BLOCK_SIZE + 1 for context in contexts])
    prefixes, _ = shared_prefixes(tables, np.arange(len(contexts)), lengths, BLOCK_SIZE)
    assert saved(prefixes) == most(contexts)


@given(data=st.data())
def test_prefixes_are_shared_and_nobody_is_in_two(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    chain = st.lists(st.integers(0, 2), min_size=12, max_size=12)
    tables = np.array(data.draw(st.lists(chain, min_size=count, max_size=count)), np.int32)
    tables[:, : data.draw(st.integers(0, 10))] = 1
    lengths = np.array(data.draw(st.lists(st.integers(1, 12 * BLOCK_SIZE), min_size=count, max_size=count)), np.int64)
    rows = np.array(data.draw(st.permutations(range(count))), np.int64)
    prefixes, members = shared_prefixes(tables, rows, lengths, BLOCK_SIZE)
    assert len(set(members.tolist())) == len(members) == prefixes[:, 1].sum()
    for begin, number, tokens in prefixes.tolist():
        own = members[begin : begin + number]
        shared = tables[rows[own], : tokens // BLOCK_SIZE]
        assert tokens > 0
        assert (shared == shared[0]).all()
        assert (lengths[own] > tokens).all()

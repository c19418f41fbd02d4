"""Which decodes read a prefix together."""

import numpy as np
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

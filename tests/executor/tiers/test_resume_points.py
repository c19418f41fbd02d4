"""How much of a prefix a tier without ids holds, of a model with several groups of layers."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_executor.grouped_batch import page_name
from pagewise_executor.tiers.disk import DiskTier
from pagewise_executor.tiers.resume_points import resume_point
from pagewise_shared.block_hash import BlockName
from pagewise_shared.protocol import LayerGroup

from tests.executor.tiers.look_ups import check_look_ups
from tests.executor.tiers.names import prefix

FULL = LayerGroup(2, 2)
SLIDING = LayerGroup(6, 3, window=9)
LONG = LayerGroup(2, 1, window=33)
CHUNKED = LayerGroup(2, 2, window=16, chunked=True)
SIZE = 4


class Store:
    """Blocks and pages of a prefix, and the questions that were asked."""

    def __init__(self, names: Sequence[BlockName]) -> None:
        self.names, self.pages, self.asked = names, set[BlockName](), list[int]()

    def put(self, number: int, group: LayerGroup, blocks: Sequence[int]) -> None:
        self.pages |= {
            page_name(self.names[block], number, index) for block in blocks for index in range(group.pages_per_block)
        }

    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        assert names
        self.asked.append(len(names))
        return [name in self.pages for name in names]


def begins(groups: Sequence[LayerGroup], held: Sequence[set[int]], num_blocks: int) -> int:
    """The greatest number of blocks behind which a sequence can begin, token by token."""
    for end in range(num_blocks, 0, -1):
        query = end * SIZE
        seen = [
            {
                token // SIZE
                for token in range(query)
                if not group.window
                or (token // group.window == query // group.window if group.chunked else query - token < group.window)
            }
            for group in groups
        ]
        if all(needed <= blocks for needed, blocks in zip(seen, held, strict=True)):
            return end
    return 0


@pytest.mark.parametrize(
    ("group", "window", "there"),
    [
        (SLIDING, [5, 6], 7),  # token 28 sees the tokens from 20 on
        (SLIDING, [6], 0),
        (SLIDING, [4, 5, 7, 8], 9),
        (SLIDING, [4, 5, 7], 6),
        (SLIDING, [0, 9], 1),
        (CHUNKED, [], 8),  # a chunk ends behind block 7, and another one behind block 3
        (CHUNKED, [8], 9),
        (CHUNKED, [9], 8),
        (CHUNKED, [8, 9], 10),
        (LayerGroup(1, 1, window=1), [], 10),
        (LayerGroup(1, 1, window=2), [9], 10),
    ],
)
def test_a_sequence_begins_where_its_window_is(group: LayerGroup, window: list[int], there: int) -> None:
    store = Store(prefix("a", 12))
    store.put(0, FULL, range(10))
    store.put(1, group, window)
    assert resume_point(store.names, (FULL, group), SIZE, store.contains) == there


def test_a_block_is_there_with_all_its_pages() -> None:
    store = Store(prefix("a", 9))
    groups = (FULL, SLIDING)
    store.put(0, FULL, range(9))
    store.put(1, SLIDING, [3, 4, 7, 8])
    assert resume_point(store.names, groups, SIZE, store.contains) == 9
    store.pages.remove(page_name(store.names[7], 1, 2))
    assert resume_point(store.names, groups, SIZE, store.contains) == 5
    store.pages.remove(page_name(store.names[4], 0, 1))
    assert resume_point(store.names, groups, SIZE, store.contains) == 0
    assert resume_point([], groups, SIZE, store.contains) == 0


@settings(max_examples=200)
@given(st.data())
def test_every_group_has_what_the_next_token_sees(data: st.DataObject) -> None:
    groups = (FULL, *data.draw(st.lists(st.sampled_from([SLIDING, LONG, CHUNKED]), min_size=1, max_size=3)))
    store, num_blocks = Store(prefix("a", 40)), data.draw(st.integers(0, 40))
    held = [set(range(num_blocks))]
    # Windows lie in stretches, as snapshots leave them.
    for _ in groups[1:]:
        stretches = data.draw(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 15)), max_size=5))
        held.append({block for first, count in stretches for block in range(first, min(40, first + count))})
    for number, (group, blocks) in enumerate(zip(groups, held, strict=True)):
        store.put(number, group, sorted(blocks))
    assert resume_point(store.names, groups, SIZE, store.contains) == begins(groups, held, num_blocks)


@pytest.mark.parametrize("last", [0, 5, 7_990, 8_000])
def test_windows_far_before_the_end_are_found_in_few_questions(last: int) -> None:
    names = prefix("a", 8_000)
    store, groups = Store(names), (FULL, SLIDING, LONG)
    store.put(0, FULL, range(8_000))
    for number, group in enumerate(groups[1:], 1):
        store.put(number, group, range(max(0, last - 10), last))
    assert resume_point(names, groups, SIZE, store.contains) == last
    assert len(store.asked) < 20
    assert sum(store.asked) < 17_000


def test_a_look_up_on_disk_finds_where_a_sequence_can_begin(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, "x", 512, 2**30)
    check_look_ups(disk)
    disk.close()

"""The memory in consoles: maps that add up, prefixes and their savings, and the next evictions."""

import re
from base64 import b64decode
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.core.console.block_details import block_details
from pagewise_scheduler.core.console.block_map import (
    COPYING,
    LENT,
    MarkedBlocks,
    StateCells,
    cell_size,
    coloured_cells,
    packed,
)
from pagewise_scheduler.core.console.prefixes import executor_prefixes
from pagewise_scheduler.core.tiers.pool import CACHED, FREE, IN_USE
from pagewise_shared.protocol import HOST, StepPlan

from tests.scheduler.core.builders import create_request, create_scheduler, evict
from tests.scheduler.core.driving import executor_for, run

PREFIX = list(range(1, 17))


class Served:
    """A scheduler of 32 blocks of 4 tokens that has served prompts, one after the other, and its executor."""

    def __init__(self, *prompts: list[int], num_host_blocks: int = 0) -> None:
        self.scheduler = create_scheduler(num_blocks=32, block_size=4, num_host_blocks=num_host_blocks)
        self.executor = executor_for(self.scheduler)
        self.pool = self.scheduler.kv.pool
        for prompt in prompts:
            self.scheduler.add(create_request(prompt, 2))
            run(self.scheduler, self.executor)

    def begin(self, prompt: list[int], now: float = 0.0) -> tuple[str, StepPlan]:
        """A request whose first step is planned: its id, and the plan."""
        request = create_request(prompt, 8)
        self.scheduler.add(request)
        plan = self.scheduler.schedule(now)
        assert plan is not None
        return request.request_id, plan

    def finish(self, plan: StepPlan) -> None:
        """The step has come back."""
        self.scheduler.update(self.executor.execute(plan))


@given(
    st.lists(st.sampled_from([FREE, CACHED, IN_USE]), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 59), st.sampled_from([FREE, CACHED, IN_USE])), max_size=20),
    st.integers(1, 9),
    st.sets(st.integers(0, 59), max_size=4),
    st.sets(st.integers(0, 59), max_size=4),
)
def test_cells_are_those_of_the_states_after_any_changes(
    states: list[int], changes: list[tuple[int, int]], size: int, lent: set[int], copying: set[int]
) -> None:
    scheduler = create_scheduler(num_blocks=60, block_size=4)
    tier = scheduler.kv.pool
    tier.states[:] = bytes(states * 60)[:60]
    marked, nothing = MarkedBlocks(scheduler, tier, 0.0), MarkedBlocks(scheduler, tier, 0.0)
    marked.copying, marked.lent = copying, lent - copying
    kept = StateCells()
    kept.update(tier, 0, 60, size, nothing)
    for block, state in changes:
        tier.states[block] = state
    cells = kept.update(tier, 0, 60, size, marked)
    assert cells == StateCells().update(tier, 0, 60, size, marked), "as if all were counted anew"
    for cell, start in enumerate(range(0, 60, size)):
        shown = Counter(tier.states[start : start + size])
        colour, share = cells[2 * cell], cells[2 * cell + 1]
        marks = [marked.copying & {*range(start, start + size)}, marked.lent & {*range(start, start + size)}]
        if marks[0]:
            assert colour == COPYING
        elif marks[1]:
            assert colour == LENT
        else:
            assert shown[colour] == max(shown.values())
            assert share == 255 * shown[colour] // shown.total()


def test_a_map_follows_the_blocks_and_its_counts_add_up() -> None:
    served = Served(num_host_blocks=16)
    pool, cells = served.pool, StateCells()

    def counted() -> list[int]:
        marked = MarkedBlocks(served.scheduler, pool, float("inf"))
        counts = marked.counts(pool)
        map_ = cells.update(pool, 0, 32, 1, marked)
        shown = [map_[::2].count(state) for state in range(5)]
        assert shown == [counts.free, counts.cached, counts.in_use, counts.lent, counts.copying]
        assert sum(shown) == 32
        return shown

    assert counted() == [32, 0, 0, 0, 0]
    _, plan = served.begin(PREFIX)
    assert counted() == [28, 0, 4, 0, 0]
    served.finish(plan)
    run(served.scheduler, served.executor)
    free, cached, *rest = counted()
    assert (free + cached, rest) == (32, [0, 0, 0])
    assert cached >= 5
    (first,) = pool.tree.roots[0].children.values()
    pool.pin_remote([first.block])
    pool.pin_remote([first.block])
    assert counted()[3] == 1
    pool.unpin_remote([first.block])
    assert counted()[3] == 1, "another executor still reads it"
    pool.unpin_remote([first.block])
    assert counted()[3] == 0
    assert not pool.remote_pins
    evict(served.scheduler, 32)
    assert counted()[:3] == [32, 0, 0]
    assert served.scheduler.kv.tiers[HOST].states.count(CACHED) == cached
    _, plan = served.begin([99] * 4)
    assert counted()[4] == cached, "sources of demotions under way"
    served.finish(plan)
    run(served.scheduler, served.executor)
    assert counted()[4] == 0


def test_copies_are_seen_for_a_moment() -> None:
    served = Served([*PREFIX, 17])
    _, plan = served.begin(PREFIX[:15], now=10.0)
    assert plan.copies, "the last block of the prefix is shared in part"
    seen = MarkedBlocks(served.scheduler, served.pool, 9.5)
    assert len(seen.copying) == 2, "the source and the target"
    assert seen.counts(served.pool).copying == 2
    assert MarkedBlocks(served.scheduler, served.pool, 10.5).copying == set(), "it is over with the step"


def test_prefixes_tell_what_sharing_saves_and_what_goes_next() -> None:
    served = Served([*PREFIX, *[50] * 4], [*PREFIX, *[60] * 4])
    tree = executor_prefixes("e", served.scheduler, 1024, 1000, tokens=False)
    trunk, *ends = tree.runs
    assert (trunk.parent, trunk.depth, trunk.num_blocks, trunk.forks) == (-1, 1, 4, 2)
    assert [(run.parent, run.depth, run.forks) for run in ends] == [(0, 5, 0)] * 2
    assert {run.next_evicted for run in ends} == {1, 2}, "ends of prefixes go first"
    assert all(run.price is not None for run in ends)
    assert (trunk.price, trunk.token_ids, tree.saved_blocks) == (None, None, 0)
    first = served.pool.next_evicted()
    assert first is not None
    assert tree.next_evictions[0].block == first.block
    assert tree.next_evictions[0].probability is None, "this policy looks at the last use alone"
    for number in range(3):
        _, plan = served.begin([*PREFIX, 70 + number])
        served.finish(plan)
    tree = executor_prefixes("e", served.scheduler, 1024, 1000, tokens=True)
    assert (tree.runs[0].references, tree.runs[0].saved_blocks) == (3, 8)
    assert (tree.saved_blocks, tree.saved_bytes) == (8, 8192)
    assert tree.runs[0].token_ids == PREFIX[:4]


def test_looking_at_a_tree_is_bounded() -> None:
    scheduler = Served(*([n] * 8 for n in range(1, 9))).scheduler
    tree = executor_prefixes("e", scheduler, 0, 5, tokens=False)
    assert tree.truncated
    assert sum(run.num_blocks for run in tree.runs) <= 6


@pytest.mark.parametrize("colour", ["request", "prefix", "age", "tier"])
@pytest.mark.parametrize("cells", [1, 7, 32])
def test_colours_tell_every_cell(colour: str, cells: int) -> None:
    served = Served(PREFIX, [*PREFIX, *[60] * 4], [9] * 8, num_host_blocks=8)
    name, _ = served.begin([*PREFIX, 70])
    size = cell_size(32, cells)
    found, legend = coloured_cells(served.scheduler, served.pool, colour, 0, 32, size)
    assert len(b64decode(packed(found))) == 2 * -(-32 // size)
    assert {*found[::2]} == {index for index, _ in legend}
    names = {name for _, name in legend}
    if cells == 32:
        assert "free" in names
        expected = {"request": name, "prefix": r"\d+", "age": r"\d+", "tier": "device"}[colour]
        assert any(re.fullmatch(expected, name) for name in names), names


class _Unsearched(list[int]):
    """Blocks of a table that is never searched as a whole."""

    def __contains__(self, _: object) -> bool:
        raise AssertionError("all blocks of a table are searched")

    __iter__ = None  # type: ignore[assignment]


def test_a_block_s_details() -> None:
    served, other = Served(PREFIX), Served([*PREFIX, 17])
    (node,) = served.pool.tree.roots[0].children.values()
    seen = block_details("a", served.scheduler, served.pool, node.block, [("b", other.scheduler)], tokens=True)
    assert (seen.state, seen.depth, seen.tokens, seen.token_ids) == ("cached", 1, 4, PREFIX[:4])
    assert len(seen.hash) == 64
    assert [(one.executor_id, one.tier) for one in seen.elsewhere] == [("b", "device")]
    assert seen.unused_for is not None
    assert seen.copies == {"device": node.block}
    name, _ = served.begin([*PREFIX, 5])
    held = block_details("a", served.scheduler, served.pool, node.block, [], tokens=False)
    assert (held.state, held.requests, held.references, held.token_ids) == ("in use", [name], 1, None)
    served.begin([*PREFIX, 5])
    tables = {one.request.request_id: list(one.table.blocks) for one in served.scheduler.running}
    for one in served.scheduler.running:
        one.table.blocks = _Unsearched(one.table.blocks)
    for block in range(32):
        shown = block_details("a", served.scheduler, served.pool, block, [], tokens=False)
        assert set(shown.requests) == {name for name, blocks in tables.items() if block in blocks}
    free = next(block for block in range(32) if served.pool.states[block] == FREE)
    assert block_details("a", served.scheduler, served.pool, free, [], tokens=True).hash == ""

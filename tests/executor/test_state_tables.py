"""The blocks of states of rows, and the batches in which recurrent layers compute a step."""

import numpy as np
import pytest
from pagewise_executor.page_map import PageMap
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.state_tables import SequenceBatch, StateTables
from pagewise_executor.step_work import Draft, Int32s

Batch = tuple[list[list[int]], list[int] | None, list[int] | None]
"""Tokens, and the blocks that are read and written."""


class Tables:
    """Tables of four rows, whose blocks have two pages."""

    def __init__(self) -> None:
        self.pages = PageMap(40, (1, 2))
        self.states = StateTables(1, 4, self.pages)

    def join(self, row: int, num_tokens: int, *blocks: int) -> None:
        self.states.join(row, num_tokens, np.array(blocks, np.int32))

    def step(self, *ranges: tuple[int, int, int], drafts: tuple[int, ...] = ()) -> list[Batch]:
        """Compute row, start and stop; returns the batches."""
        self.states.map()
        rows, starts, stops = np.array(ranges, np.int64).reshape(-1, 3).T
        return self.shown(self.states.cut(rows, starts, stops, drafts))

    def settle(self, row: int, start: int, size: int, num_accepted: int) -> list[Batch]:
        """Keep some tokens of a draft of ``size`` tokens."""
        draft = Draft(row, start, np.zeros(size, np.int32), num_accepted=num_accepted)
        return self.shown(self.states.settle([draft]))

    def shown(self, batches: list[SequenceBatch]) -> list[Batch]:
        pages = [(one.read, one.written) for one in batches]
        held = [tuple(None if one is None else self.blocks(one) for one in pair) for pair in pages]
        return [(one.tokens.tolist(), *pair) for one, pair in zip(batches, held, strict=True)]

    def switch(self, switches: list[tuple[int, int]], start: int, stop: int) -> None:
        """Switch row 0 in a step that computes it."""
        self.states.begin_plan()
        for num_tokens, block in switches:
            self.states.switch(0, num_tokens, block)
        self.step((0, start, stop))

    def blocks(self, pages: Int32s) -> list[int]:
        every = self.pages.pages(1, np.arange(self.pages.num_blocks(1), dtype=np.int32))
        return [int(np.flatnonzero((every == one).all(axis=1))[0]) for one in pages]


def test_sequences_begin_go_on_and_share() -> None:
    tables = Tables()
    tables.join(0, 0, 5)
    tables.join(1, 0, 6)
    assert tables.step((0, 0, 3), (1, 0, 3)) == [([[0, 1, 2], [3, 4, 5]], None, [5, 6])]
    tables.states.begin_plan()
    tables.states.switch(0, 3, 7)
    tables.join(2, 3, 5, 8)
    assert tables.step((0, 3, 4), (1, 3, 4), (2, 3, 5)) == [
        ([[0], [1]], [5, 6], [7, 6]), ([[2, 3]], [5], [8])
    ]  # fmt: skip
    assert [(one.row, one.num_tokens, one.block) for one in tables.states.snapshots] == [(0, 3, 5), (2, 3, 5)]


def test_switches_cut_chunks_into_rounds() -> None:
    tables = Tables()
    tables.join(0, 0, 1)
    tables.join(1, 0, 2)
    for num_tokens, block in ((2, 3), (6, 4)):
        tables.states.switch(0, num_tokens, block)
    assert tables.step((0, 0, 8), (1, 0, 2)) == [
        ([[0, 1], [8, 9]], None, [1, 2]),
        ([[2, 3, 4, 5]], [1], [3]),
        ([[6, 7]], [3], [4]),
    ]
    assert [one.num_tokens for one in tables.states.leave(0, 8)] == [8]


def test_a_row_may_join_before_its_states_are_there() -> None:
    tables = Tables()
    tables.join(0, 8, 1, 2)
    tables.pages.map(1, np.array([1], np.int32))
    assert tables.step() == []
    assert tables.step((0, 8, 9)) == [([[0]], [1], [2])]


def test_states_are_written_behind_the_tokens_of_a_draft_that_are_kept() -> None:
    tables = Tables()
    tables.join(0, 0, 1)
    tables.join(1, 0, 2)
    tables.step((0, 0, 6), (1, 0, 6))
    tables.states.begin_plan()
    tables.states.switch(1, 8, 3)
    assert tables.step((0, 6, 7), (1, 6, 11), drafts=(1,)) == [
        ([[0]], [1], [1]), ([[1, 2, 3, 4, 5]], [2], None)
    ]  # fmt: skip
    assert tables.settle(1, 6, 4, 0) == [([[0]], [2], [2])], "the switch is still to come"
    assert tables.states.snapshots == []
    tables.states.begin_plan()
    assert tables.step((1, 7, 11), drafts=(1,)) == [([[0, 1, 2, 3]], [2], None)]
    assert tables.settle(1, 7, 3, 2) == [([[0]], [2], [2]), ([[1, 2]], [2], [3])]
    assert [(one.row, one.num_tokens, one.block) for one in tables.states.snapshots] == [(1, 8, 2)]
    assert tables.step((1, 10, 11)) == [([[0]], [3], [3])]


def test_a_draft_reaches_the_switches_of_its_row() -> None:
    tables = Tables()
    tables.join(0, 0, 1)
    tables.step((0, 0, 6))
    tables.states.begin_plan()
    tables.states.switch(0, 9, 2)
    with pytest.raises(InvalidPlanError, match="row 0 switches at 9 tokens, which it does not reach"):
        tables.step((0, 6, 9), drafts=(0,))


@pytest.mark.parametrize(
    ("switches", "why"),
    [
        ([(3, 2)], "switches at 3 tokens, which it has passed"),
        ([(5, 2), (5, 3)], "switches at 5 tokens, which it has passed"),
        ([(6, 2)], "switches at 6 tokens, which it does not reach"),
        ([(4, 99)], "gets a block outside the 20 of group 1"),
    ],
)
def test_switches_that_contradict_the_step_are_refused(switches: list[tuple[int, int]], why: str) -> None:
    tables = Tables()
    tables.join(0, 0, 1)
    tables.step((0, 0, 4))
    with pytest.raises(InvalidPlanError, match=why):
        tables.switch(switches, 4, 6)


def test_blocks_without_pages_are_not_read() -> None:
    tables = Tables()
    tables.join(0, 4, 1, 2)
    with pytest.raises(InvalidPlanError, match="a block of group 1 has no pages"):
        tables.step((0, 4, 6))
    with pytest.raises(InvalidPlanError, match="joins with 3 blocks of states"):
        tables.join(1, 4, 1, 2, 3)

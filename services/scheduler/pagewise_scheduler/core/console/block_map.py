"""The map of a tier's blocks: cells of so many blocks each, with the state that most of them are in.

A map of 100,000 blocks is made a few times a second, so no code here iterates over all blocks in Python.
``Pool.states`` is kept where states change. What is done here takes time for each cell that has changed, and for each
lent or copied block.
"""

from base64 import b64encode
from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from pagewise_scheduler.core.console.reports import BlockCounts
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.pool import CACHED, FREE, IN_USE, Pool

STATES = ("free", "cached", "in use", "lent", "copying")
"""What the colours of a map mean, by index; the first three are as in ``Pool.states``."""
LENT, COPYING = 3, 4

MOST_MARKED = 4096
"""Blocks that are shown as lent or copying in one map."""
_ALL = 255


class MapFrame(Struct):
    """The map of one tier of one executor.

    Fields:
        first, count: the blocks that it shows, of ``num_blocks``; ``blocks_per_cell`` in each cell, fewer in the last.
        legend: index and meaning of each colour.
        cells: base64 of two bytes for each cell: the colour that most of its blocks have, and their share of it (255 is
            all). Lent and copied blocks are few and soon something else, so a cell with one of them has its colour.
        counts: of the whole tier by state.
    """

    executor_id: str
    tier: str
    first: int
    count: int
    num_blocks: int
    blocks_per_cell: int
    colour: str
    legend: list[tuple[int, str]]
    cells: str
    counts: BlockCounts


class MarkedBlocks:
    """The blocks of a tier that are lent, or that copies read or write now or have lately: these count as copying."""

    __slots__ = ("copying", "lent")

    def __init__(self, scheduler: Scheduler, tier: Pool, since: float) -> None:
        """``since``: when copies have to have been asked for that may be over, in seconds of the caller's clock."""
        pool = scheduler.kv.pool
        self.copying = scheduler.recoveries.transfers.blocks(tier.number, since, MOST_MARKED)
        lent = pool.remote_pins if tier is pool else ()
        self.lent = {block for block in list(lent)[:MOST_MARKED] if block not in self.copying}

    def counts(self, tier: Pool) -> BlockCounts:
        """All blocks of the tier by state; they add up to it."""
        of_marked = Counter(tier.states[block] for block in (*self.copying, *self.lent))
        return BlockCounts(
            tier.num_free - of_marked[FREE],
            tier.num_cached - of_marked[CACHED],
            tier.num_in_use - of_marked[IN_USE],
            len(self.lent),
            len(self.copying),
        )


class StateCells:
    """The cells of one map, kept between updates: only those are counted again whose blocks have changed."""

    def __init__(self) -> None:
        self._first = self._size = 0
        self._states = b""
        self._cells = bytearray()

    def update(self, tier: Pool, first: int, count: int, size: int, marked: MarkedBlocks) -> bytearray:
        """Two bytes for each cell of ``size`` blocks, of ``count`` blocks from ``first`` on."""
        states = bytes(memoryview(tier.states)[first : first + count])
        marks = {LENT: _within(marked.lent, first, count), COPYING: _within(marked.copying, first, count)}
        if size == 1:
            return _single(states, marks)
        known = self._states if (self._first, self._size, len(self._states)) == (first, size, count) else b""
        if states != known:
            if not known:
                self._cells = bytearray(2 * -(-count // size))
            for cell, start in enumerate(range(0, count, size)):
                blocks = states[start : start + size]
                if blocks != known[start : start + size]:
                    self._cells[2 * cell : 2 * cell + 2] = _cell(blocks)
            self._first, self._size, self._states = first, size, states
        cells = self._cells[:]
        for state, blocks_of_state in marks.items():
            for cell, number in Counter(block // size for block in blocks_of_state).items():
                cells[2 * cell], cells[2 * cell + 1] = state, max(1, _ALL * number // min(size, count - cell * size))
        return cells


def _within(blocks: Iterable[int], first: int, count: int) -> list[int]:
    return [block - first for block in blocks if first <= block < first + count]


def _single(states: bytes, marks: dict[int, list[int]]) -> bytearray:
    cells = bytearray(2 * len(states))
    cells[::2], cells[1::2] = states, bytes((_ALL,)) * len(states)
    for state, blocks in marks.items():
        for block in blocks:
            cells[2 * block] = state
    return cells


def _cell(states: bytes) -> tuple[int, int]:
    """The state that most blocks of a cell are in, and their share. Of equal ones, that of more use."""
    cached, in_use = states.count(CACHED), states.count(IN_USE)
    free = len(states) - cached - in_use
    number, state = max((in_use, IN_USE), (cached, CACHED), (free, FREE))
    return state, _ALL * number // len(states)


def cell_size(count: int, cells: int) -> int:
    """Blocks of each cell, so that ``count`` blocks make at most so many cells."""
    return max(1, -(-count // max(1, cells)))


def packed(cells: bytes | bytearray) -> str:
    """Cells as they travel in JSON."""
    return b64encode(cells).decode()

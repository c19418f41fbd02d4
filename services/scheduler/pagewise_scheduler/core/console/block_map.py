"""The map of a tier's blocks: cells of so many blocks each, with the state or another property that most of them have.

A map of 100,000 blocks is made a few times a second, so a map of states does not iterate over all blocks in Python:
``Pool.states`` is kept where states change, and time is taken for each cell that has changed and each lent or copied
block. The request, prefix, age or tier of a block has to be looked up block by block. So at most ``MOST_SAMPLES``
blocks, evenly spread, are looked at for such a map: with more blocks, a cell shows the value of most of its samples.
"""

from base64 import b64encode
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate

from pagewise_shared.protocol import tier_name
from pagewise_shared.reports import BlockCounts

from pagewise_scheduler.core.group_report import group_pages, num_pages
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.pool import CACHED, FREE, IN_USE, Pool

STATES = ("free", "cached", "in use", "lent", "copying")
"""The states of blocks in a map, by index; the first three are as in ``Pool.states``."""
LENT, COPYING = 3, 4

MOST_MARKED = 4096
"""Blocks that are shown as lent or copying in one map."""
_ALL = 255

MOST_SAMPLES = 2048
_MOST_STEPS = 16_384
"""Blocks that are looked at to find to which prefixes or requests samples belong."""
_MOST_COLOURS = 64
_OTHERS = "others"

Label = Callable[[int], str]
"""Returns the label of a block. Clients make words of it: a prefix is the number of its first block, an age how many
blocks at most have come in since the block was used last, and tiers are names with a comma between them."""


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

    def device_counts(self, kv: KVCacheManager) -> BlockCounts:
        """All blocks of the device by state, or its pages if groups of layers share them."""
        if not kv.windows:
            return self.counts(kv.pool)
        each, states = kv.pages_per_block, kv.pool.states
        held = Counter(states[block] for block in (*self.copying, *self.lent))
        return BlockCounts(
            kv.num_free,
            kv.num_available - kv.num_free - each * held[CACHED],
            kv.num_in_use - each * held[IN_USE],
            each * len(self.lent),
            each * sum(states[block] != FREE for block in self.copying),
        )


class StateCells:
    """The cells of one map, kept between updates: only cells whose blocks have changed are counted again."""

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
    """The state of most blocks of a cell, and their share. Of equally frequent states, the busier one."""
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


def coloured_cells(
    scheduler: Scheduler, tier: Pool, colour: str, first: int, count: int, size: int
) -> tuple[bytearray, list[tuple[int, str]]]:
    """Return two bytes for each cell of ``size`` blocks, as ``MapFrame`` has them, and the legend."""
    label = _LABELS[colour](scheduler, tier)
    num_cells = -(-count // size)
    samples = max(1, min(size, MOST_SAMPLES // max(1, num_cells)))
    legend: dict[str, int] = {}
    cells = bytearray()
    for start in range(first, first + count, size):
        stop = min(start + size, first + count)
        step = max(1, (stop - start) // samples)
        seen = [label(block) for block in range(start, stop, step)]
        name, number = seen[0], 1
        if len(seen) > 1:
            number, name = max((number, name) for name, number in Counter(seen).items())
        if name not in legend and len(legend) >= _MOST_COLOURS:
            name = _OTHERS
        cells.append(legend.setdefault(name, len(legend)))
        cells.append(_ALL * number // len(seen))
    return cells, [(index, name) for name, index in legend.items()]


def group_cells(
    kv: KVCacheManager, tier: Pool, first: int, count: int, size: int
) -> tuple[bytearray, list[tuple[int, str]]]:
    """Return two bytes for each cell of ``size`` pages, as ``MapFrame`` has them, and the legend.

    The scheduler counts pages and does not know where they are: they lie in the order of the legend.
    """
    parts: list[tuple[str, int]] = []
    for kind, window, _, in_use, cached in group_pages(kv, tier):
        name = f"{kind} {window}" if kind in ("window", "chunk") else kind
        parts += [(f"{name} in use", in_use), (f"{name} cached", cached)]
    parts.append(("free", num_pages(tier) - sum(pages for _, pages in parts)))
    ends = [*accumulate(pages for _, pages in parts)]
    cells = bytearray()
    for start in range(first, first + count, size):
        stop = min(start + size, first + count)
        at = range(bisect_right(ends, start), bisect_left(ends, stop) + 1)
        pages, index = max((min(stop, ends[one]) - max(start, ends[one] - parts[one][1]), -one) for one in at)
        cells += bytes((-index, _ALL * pages // (stop - start)))
    return cells, [(index, name) for index, (name, _) in enumerate(parts)]


def _state(tier: Pool, block: int) -> str:
    return STATES[tier.states[block]]


def _by_request(scheduler: Scheduler, tier: Pool) -> Label:
    owners: dict[int, str] = {}
    left = _MOST_STEPS
    if tier is scheduler.kv.pool:
        for sequence in scheduler.running:
            if left <= 0:
                break
            left -= len(sequence.table.blocks)
            name = sequence.request.request_id
            for block in sequence.table.blocks:
                owners[block] = name if owners.get(block, name) == name else "shared"
    unknown = "in use" if left > 0 else _OTHERS

    def label(block: int) -> str:
        known = owners.get(block)
        if known is not None:
            return known
        state = _state(tier, block)
        return unknown if state == "in use" else state

    return label


def _by_prefix(scheduler: Scheduler, tier: Pool) -> Label:
    names: dict[CachedBlock, str] = {}
    left = _MOST_STEPS

    def label(block: int) -> str:
        nonlocal left
        node = tier.node(block)
        if node is None:
            return _state(tier, block)
        path: list[CachedBlock] = []
        while node not in names and node.depth > 1 and left:
            path.append(node)
            left -= 1
            assert node.parent is not None
            node = node.parent
        name = names.get(node)
        if name is None:
            name = names[node] = str(node.block_id(node.nearest_tier)) if node.depth <= 1 else _OTHERS
        names.update(dict.fromkeys(path, name))
        return name

    return label


def _by_age(scheduler: Scheduler, tier: Pool) -> Label:
    nodes = [tier.node(block) for block in range(0, tier.num_blocks, max(1, tier.num_blocks // 1024))]
    newest = max((node.last_used for node in nodes if node is not None), default=0)

    def label(block: int) -> str:
        node = tier.node(block)
        if node is None or tier.states[block] != CACHED:
            return _state(tier, block)
        age = max(0, newest - node.last_used)
        return str(1 << age.bit_length() if age else 0)

    return label


def _by_tier(scheduler: Scheduler, tier: Pool) -> Label:
    numbers = list(scheduler.kv.tiers)

    def label(block: int) -> str:
        node = tier.node(block)
        if node is None:
            return _state(tier, block)
        return ",".join(tier_name(number) for number in numbers if node.block_id(number) >= 0)

    return label


_LABELS: dict[str, Callable[[Scheduler, Pool], Label]] = {
    "request": _by_request,
    "prefix": _by_prefix,
    "age": _by_age,
    "tier": _by_tier,
}

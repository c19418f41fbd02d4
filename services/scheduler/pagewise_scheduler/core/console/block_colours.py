"""Maps of one executor that are coloured by request, prefix, age or tier instead of by state.

These properties have to be looked up block by block. So at most ``MOST_SAMPLES`` blocks are looked at for a map, evenly
spread: with more blocks than that, a cell's colour is that of most of its samples.
"""

from collections import Counter
from collections.abc import Callable

from pagewise_shared.protocol import tier_name

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.pool import CACHED, FREE, Pool

MOST_SAMPLES = 2048
_MOST_STEPS = 16_384
"""Blocks that are looked at to find to which prefixes or requests samples belong."""
_MOST_COLOURS = 64
_OTHERS = "others"
_ALL = 255

Label = Callable[[int], str]
"""What a block is called in the legend."""


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


def _state(tier: Pool, block: int) -> str:
    state = tier.states[block]
    return "free" if state == FREE else "cached" if state == CACHED else "in use"


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
            name = names[node] = f"prefix of block {node.block_id(node.nearest_tier)}" if node.depth <= 1 else _OTHERS
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
        return f"unused for {1 << age.bit_length()} or less" if age else "used last"

    return label


def _by_tier(scheduler: Scheduler, tier: Pool) -> Label:
    numbers = list(scheduler.kv.tiers)

    def label(block: int) -> str:
        node = tier.node(block)
        if node is None:
            return _state(tier, block)
        return " and ".join(tier_name(number) for number in numbers if node.block_id(number) >= 0)

    return label


_LABELS: dict[str, Callable[[Scheduler, Pool], Label]] = {
    "request": _by_request,
    "prefix": _by_prefix,
    "age": _by_age,
    "tier": _by_tier,
}

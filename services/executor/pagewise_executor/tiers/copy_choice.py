"""Chooses by measured times whether the copies in a tier are exact or smaller, with ``--tier-dtype auto:int8``.

Smaller copies pay where a load saves more time than the conversion takes: a request waits for the load, in which the
numbers become wide again, and the cores that compute steps made the numbers smaller before. The rest of a store runs
beside the steps, and does not count. The times are measured when the executor starts, with random numbers: loads from a
disk or a store there, and copies from host memory, before it is allocated, in other memory.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import numpy as np
import torch
from pagewise_shared.block_hash import BlockName
from pagewise_shared.protocol import HOST, tier_name

from pagewise_executor.collectives import Ranks
from pagewise_executor.tiers.hashed import HashedTier
from pagewise_executor.tiers.small_copies import SmallCopies

log = logging.getLogger(__name__)

_ROUNDS, _LOADS = 5, 25
"""How often each copy in memory, and each load from a disk or a store, is timed: the fastest counts."""
_MEMORY_BYTES = 2**24
"""About the bytes that are copied in memory: more than a core's cache."""
_PIECE_BYTES = 2**18
"""About the bytes whose copies are timed together. Such a short time is rarely disturbed by other work."""
_STORED_BYTES = 2**23
"""About the most bytes that are written to a disk or a store each time."""


def for_memory(small: SmallCopies, device: torch.device, bandwidth: float | None, ranks: Ranks) -> SmallCopies | None:
    """Return ``small`` if host memory is to hold smaller copies; None: exact ones.

    ``bandwidth``: bytes per second that each direction is limited to. All ranks call this, and rank 0 decides.
    """
    if not small.chooses:
        return small
    pays = False
    if ranks.first and device.type != "cuda":  # on a GPU, host memory holds exact copies only
        pays = _pays(tier_name(HOST), small, *_memory_seconds(small, bandwidth))
    return small if ranks.of_first(int(pays)) else None


def choose_for_storage(tier: HashedTier, ranks: Ranks) -> None:
    """Let a tier store exact copies if smaller ones are to be chosen by their times, and do not pay.

    All ranks call this, and rank 0 decides.
    """
    small = tier.small
    if small is None or not small.chooses:
        return
    pays = False
    if ranks.first:
        if (loads := _load_seconds(tier, small)) is not None:
            pays = _pays(tier.name, small, *loads)
        else:
            log.warning("the %s keeps no blocks: its copies are exact, because no times can be measured", tier.name)
    tier.write_as(small if ranks.of_first(int(pays)) else None)


def _pays(name: str, small: SmallCopies, exact: float, smaller: float) -> bool:
    """Whether smaller copies pay. ``exact``, ``smaller``: seconds in which a block of each is loaded."""
    rows, less = small.sample(_num_blocks(small)), np.empty((_num_blocks(small), small.num_bytes), np.uint8)
    shrinking = _seconds_of_block(small, lambda piece: small.unbounded().shrink(rows[piece], less[piece]))
    pays = smaller + shrinking < exact
    log.info(
        "%s: copies are %s: an exact block is loaded in %.0f µs, one in %s in %.0f µs, after it was made in %.0f µs",
        name, f"in {small.dtype}" if pays else "exact", 1e6 * exact, small.dtype, 1e6 * smaller, 1e6 * shrinking,
    )  # fmt: skip
    return pays


def _memory_seconds(small: SmallCopies, bandwidth: float | None) -> tuple[float, float]:
    """Return the seconds in which a block is copied from memory, exact and smaller."""
    rows = small.sample(_num_blocks(small))
    back, less = np.empty_like(rows), np.zeros((len(rows), small.num_bytes), np.uint8)
    exact = _seconds_of_block(small, lambda piece: np.copyto(back[piece], rows[piece]))
    smaller = _seconds_of_block(small, lambda piece: small.widen(less[piece], back[piece]))
    if not bandwidth:
        return exact, smaller
    return max(exact, small.exact_bytes / bandwidth), max(smaller, small.num_bytes / bandwidth)


def _load_seconds(tier: HashedTier, small: SmallCopies) -> tuple[float, float] | None:
    """Return the seconds in which a block is loaded from a tier, exact and smaller; None if it is lost."""
    count = max(1, _STORED_BYTES // (2 * small.exact_bytes))
    _, names = tier.scratch(2 * count)
    count = len(names) // 2
    rows, back, kept = small.sample(count), np.empty((count, small.exact_bytes), np.uint8), list[bool]()
    exact, smaller = names[:count], names[count : 2 * count]
    tier.write_as(None)
    kept += tier.store(exact, rows)
    tier.write_as(small.unbounded())
    kept += tier.store(smaller, rows)

    def seconds(some: Sequence[BlockName]) -> float:
        return _timed(lambda: kept.extend(tier.load(some, back))) / count

    # In turns, so that other work on the machine disturbs both alike.
    times = [(seconds(exact), seconds(smaller)) for _ in range(_LOADS)]
    return (min(time for time, _ in times), min(time for _, time in times)) if all(kept) else None


def _num_blocks(small: SmallCopies) -> int:
    return max(1, _MEMORY_BYTES // small.exact_bytes)


def _seconds_of_block(small: SmallCopies, copy: Callable[[slice], object]) -> float:
    """Return the least seconds of a block in which ``copy`` copies some of the blocks."""
    count = max(1, _PIECE_BYTES // small.exact_bytes)
    pieces = [slice(start, start + count) for start in range(0, _num_blocks(small) - count + 1, count)]
    return min(_timed(partial(copy, piece)) for _ in range(_ROUNDS) for piece in pieces) / count


def _timed(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began

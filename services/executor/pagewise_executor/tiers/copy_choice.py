"""Chooses by measured times whether the copies in a tier are exact or smaller, with ``--tier-dtype auto:int8``.

A block is written to a tier once and read at least once. So both directions count, with the time in which numbers
become smaller and wide again: smaller copies pay where the bytes that they save take longer than that. The times are
measured when the executor starts, in blocks of random numbers, on the tier itself or, before host memory is allocated,
in as much other memory.
"""

import logging
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from pagewise_shared.protocol import HOST, tier_name

from pagewise_executor.collectives import Ranks
from pagewise_executor.tiers.hashed import HashedTier
from pagewise_executor.tiers.small_copies import SmallCopies

log = logging.getLogger(__name__)

_ROUNDS = 4
_MEMORY_BYTES = 2**24
"""About the bytes that are copied in memory: more than a core's cache."""
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
        exact, smaller = _memory_seconds(small, bandwidth)
        pays = _pays(tier_name(HOST), small, exact, smaller)
    return small if ranks.of_first(int(pays)) else None


def choose_for_storage(tier: HashedTier, ranks: Ranks) -> None:
    """Let a tier store exact copies if smaller ones are to be chosen by their times, and take longer.

    All ranks call this, and rank 0 decides.
    """
    small = tier.small
    if small is None or not small.chooses:
        return
    pays = False
    if ranks.first:
        seconds = _storage_seconds(tier, small)
        if seconds is None:
            log.warning(
                "the %s does not keep blocks: which copies take less time is not known, so they are exact", tier.name
            )
        else:
            pays = _pays(tier.name, small, *seconds)
    tier.write_as(small if ranks.of_first(int(pays)) else None)


def _pays(name: str, small: SmallCopies, exact: float, smaller: float) -> bool:
    pays = smaller < exact
    log.info(
        "%s: copies are %s, because a block takes %.0f µs there and back, and %.0f µs in %s",
        name, f"in {small.dtype}" if pays else "exact", 1e6 * exact, 1e6 * smaller, small.dtype,
    )  # fmt: skip
    return pays


def _memory_seconds(small: SmallCopies, bandwidth: float | None) -> tuple[float, float]:
    """Return the seconds in which a block is copied to memory and back, exact and smaller."""
    rows = small.sample(max(1, _MEMORY_BYTES // small.exact_bytes))
    memory, back = np.empty_like(rows), np.empty_like(rows)
    less = np.empty((len(rows), small.num_bytes), np.uint8)

    def seconds(copy: Callable[[], object], bytes_of_block: int) -> float:
        fastest = min(_timed(copy) for _ in range(_ROUNDS)) / len(rows)
        return max(fastest, bytes_of_block / bandwidth) if bandwidth else fastest

    exact = small.exact_bytes
    return (
        seconds(lambda: np.copyto(memory, rows), exact) + seconds(lambda: np.copyto(back, memory), exact),
        seconds(lambda: small.unbounded().shrink(rows, less), small.num_bytes)
        + seconds(lambda: small.widen(less, back), small.num_bytes),
    )


def _storage_seconds(tier: HashedTier, small: SmallCopies) -> tuple[float, float] | None:
    """Return the seconds in which a block is stored and loaded, exact and smaller; None if it is lost."""
    _, names = tier.scratch(max(1, _STORED_BYTES // small.exact_bytes))
    rows = small.sample(len(names))
    back = np.empty_like(rows)
    kept = list[bool]()

    def there_and_back() -> None:
        kept.extend(tier.store(names, rows))
        kept.extend(tier.load(names, back))

    fastest = [float("inf"), float("inf")]
    for _ in range(_ROUNDS):  # in turns: other work on the machine disturbs both alike
        for index, written in enumerate((None, small.unbounded())):
            tier.write_as(written)
            fastest[index] = min(fastest[index], _timed(there_and_back))
    return (fastest[0] / len(names), fastest[1] / len(names)) if all(kept) else None


def _timed(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began

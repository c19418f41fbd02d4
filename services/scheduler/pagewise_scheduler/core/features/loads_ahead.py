"""Loads of cached blocks from host memory ahead of their next use, by a client's advice.

Advice and eviction go by one estimate. A free block of the device costs nothing. Otherwise a block is loaded if its
value on the device, by the prediction of its next use, exceeds the value of the block that is evicted for it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix
from pagewise_scheduler.core.memory.eviction import CostAware
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, cache_salt_of
from pagewise_scheduler.core.tiers.tier import Location
from pagewise_scheduler.core.tiers.transfers import Loads

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_PIECE_BLOCKS, _BETWEEN_LOOKS = 256, 0.25
"""The most blocks of one prefix that one step asks for, and the seconds after which it is asked again what pays."""


@dataclass(slots=True, eq=False)
class _LoadedPiece:
    """Consecutive blocks of a prefix that come to the device.

    ``table``: holds the ``start`` blocks before them, and their targets. ``path``: the nodes of both.
    """

    loads: "LoadsAhead"
    table: BlockTable
    path: list[CachedBlock]
    start: int
    request: None = None

    @property
    def waits(self) -> bool:
        return True

    def came(self, locations: Sequence[Location], bad: Sequence[Location], seconds: float) -> None:
        self.loads.came(self, len(list(takewhile(lambda one: one not in bad, locations))))


class LoadsAhead:
    """The prefixes of one executor that are to be loaded, and their blocks in flight.

    ``num_loaded``: the blocks that were loaded ahead so far.
    """

    def __init__(self, scheduler: "Scheduler", policy: CostAware) -> None:
        self._scheduler, self._kv, self._policy = scheduler, scheduler.kv, policy
        self._wanted: dict[CachedBlock, float] = {}
        self._coming: dict[CachedBlock, _LoadedPiece] = {}
        self.num_loaded = 0
        self._next = 0.0

    def want(self, last: CachedBlock, until: float) -> None:
        """Load the blocks up to ``last`` that lie in host memory as soon as that pays.

        ``until``: when to give up, in seconds.
        """
        self._wanted[last], self._next = until, 0.0

    def forget(self, nodes: Iterable[CachedBlock]) -> None:
        """Load none of the prefixes that end with one of ``nodes``."""
        for node in nodes:
            self._wanted.pop(node, None)

    def ask(self, step: int, loads: Loads, now: float) -> None:
        """Let the plan of ``step`` bring what pays now."""
        if now < self._next or not self._wanted:
            return
        self._next = now + _BETWEEN_LOOKS
        for last, until in list(self._wanted.items()):
            if last in self._coming:
                continue
            if until < now or not last.num_tiers or not self._load(last, step, loads):
                del self._wanted[last]

    def _load(self, last: CachedBlock, step: int, loads: Loads) -> bool:
        """Ask for the next blocks of a prefix; False: none is missing, or the next one is not in host memory."""
        path = list(ancestors(last))[::-1]
        here = list(takewhile(lambda node: node.block >= 0, path))
        missing = path[len(here) :]
        tier = self._kv.cache_tier(missing[0].nearest_tier) if missing else None
        if tier is None:
            return False
        missing = list(takewhile(tier.holds, missing[:_PIECE_BLOCKS]))
        room = self._scheduler.prefilling.num_spare(len(self._scheduler.decoding))
        missing = missing[: max(0, min(room, self._num_worth(missing)))]
        if missing:
            table = self._kv.new_table(cache_salt_of(last), last.cached_by)
            self._kv.take(table, CachedPrefix(here, -1, 0, len(here) * self._kv.block_size))
            locations = tier.hold(missing)  # before making room demotes blocks to the tier
            added, copies = self._kv.grow(table, (len(here) + len(missing)) * self._kv.block_size)
            self._scheduler.plan.copy(copies)
            piece = self._coming[last] = _LoadedPiece(self, table, here + missing, len(here))
            self._scheduler.recoveries.transfers.ask(step, loads, piece, locations, added)
        return True

    def _num_worth(self, nodes: Sequence[CachedBlock]) -> int:
        """How many of ``nodes``, from the first one on, are worth more on the device than the blocks that give way."""
        free, pool, policy = self._kv.num_free, self._kv.pool, self._policy
        victims = pool.next_evictions(len(nodes) - free) if len(nodes) > free else []
        pairs = zip(nodes[free:], victims, strict=False)
        worth = takewhile(lambda pair: policy.value_on_device(pair[0]) > policy.value(pair[1]), pairs)
        return min(len(nodes), free + sum(1 for _ in worth))

    def came(self, piece: _LoadedPiece, num_good: int) -> None:
        """The blocks of a piece have come, of which the first ``num_good`` have the right content: they are cached."""
        last = next((last for last, one in self._coming.items() if one is piece), None)
        if last is None:
            return
        del self._coming[last]
        self._next = 0.0
        size, table, stop = self._kv.block_size, piece.table, piece.start + num_good
        replaced = self._kv.cache_full_blocks(table, stop * size, lambda start, _: piece.path[start // size].tokens)
        self._kv.drop([own for _, own, _ in replaced], None)
        self._kv.free(table, None)
        self.num_loaded += num_good - len(replaced)
        if num_good < len(piece.path) - piece.start:
            self._wanted.pop(last, None)

    def clear(self) -> None:
        """Forget all prefixes: the executor was reset, or is gone."""
        for piece in self._coming.values():
            self._kv.free(piece.table, None)
        self._wanted.clear()
        self._coming.clear()

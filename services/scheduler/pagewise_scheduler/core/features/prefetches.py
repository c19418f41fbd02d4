"""Prefetches of blocks from peers, for a request whose prompt is being computed at another executor.

As soon as a step of the other executor has come back, the full blocks that it computed can be fetched, while later
blocks are still being computed. Fetched blocks are cached here like any others, and no sequence holds them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.features.prefix_load import PrefixLoad
from pagewise_scheduler.core.memory.block_table import BlockTable
from pagewise_scheduler.core.memory.prefix_tree import block_keys
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.tiers.peer import PeerTiers
from pagewise_scheduler.core.tiers.transfers import Loads

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_PIECE_BLOCKS, _MOST_LOADING = 128, 512
"""The most blocks in flight of one prefetch, and from one peer."""


@dataclass(slots=True, eq=False, kw_only=True)
class Prefetch(PrefixLoad):
    """The KV that is fetched for a request that runs at another executor.

    ``prefetches``: to which it belongs. ``peer``: the endpoint of the last fetch. ``asks``: peers may have more blocks.
    ``stopped``: no further blocks are fetched, and no request waits for the blocks in flight.
    """

    prefetches: "Prefetches"
    request: Request
    peer: str = ""
    asks: bool = True

    def arrived(self) -> None:
        self.prefetches.came(self)


class Prefetches(Feature):
    """All prefetches of one executor. ``active``: the prefetches that have blocks in flight or may fetch more."""

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        self._kv, self._costs = scheduler.kv, scheduler.costs
        self.active: dict[Request, Prefetch] = {}

    def want(self, sequence: RequestSequence, num_tokens: int) -> None:
        """Prefetch the first ``num_tokens`` tokens of a sequence, which other executors have computed.

        Not of a model with windowed layers: where a sequence can begin is known at the end of its prompt.
        """
        if self._kv.windows:
            return
        prefetch = self.active.get(sequence.request)
        if prefetch is None:
            table = self._kv.new_table(sequence.cache_salt, sequence.request.ref)
            prefetch = self.active[sequence.request] = Prefetch(table, request=sequence.request, prefetches=self)
        stop = num_tokens // self._kv.block_size * self._kv.block_size
        if 4 * stop > len(prefetch.tokens):  # it is less if the tokens are computed anew after a preemption there
            prefetch.tokens = sequence.tokens_between(0, stop)
        if not prefetch.stopped:
            prefetch.asks = True
            self._hold(prefetch)

    def joined(self, sequence: RequestSequence) -> None:
        # The sequence has begun, and computes the blocks that have not come.
        if (prefetch := self.active.get(sequence.request)) is not None:
            self._stop(prefetch)

    def _stop(self, prefetch: Prefetch) -> None:
        prefetch.stopped, prefetch.asks = True, False
        self._release_if_done(prefetch)

    def _hold(self, prefetch: Prefetch) -> None:
        """Hold the blocks of a prefetch that are cached here already."""
        table = prefetch.table
        if not table.blocks:
            tree = self._kv.pool.tree
            path = tree.walk(tree.root_of(table.cache_salt), block_keys(prefetch.tokens, self._kv.block_size))
            while path and path[-1].block < 0:
                path.pop()
            prefetch.hold(self.scheduler, path)

    def coming(self) -> Iterable[tuple[BlockTable, bytes]]:
        return ((one.table, one.tokens) for one in self.active.values() if one.pieces)

    def add_to_plan(self, step: int, budget: int, loads: Loads) -> int:
        if self.active:
            room = self.scheduler.prefilling.num_spare(len(self.scheduler.decoding))
            for prefetch in list(self.active.values()):
                if prefetch.asks and not prefetch.pieces and self._link_room(prefetch.peer):
                    room -= self._fetch(prefetch, step, loads, room)
        return 0

    def _fetch(self, prefetch: Prefetch, step: int, loads: Loads, room: int) -> int:
        """Fetch the next blocks of a prefetch, at most ``room``; returns their number."""
        recoveries, table = self.scheduler.recoveries, prefetch.table
        start, found = len(table.blocks), None
        if room > 0:
            found = recoveries.planner.find_at_peers(table.cache_salt, prefetch.tokens, start)
        if found is None:
            prefetch.asks = False
            self._release_if_done(prefetch)
            return 0
        prefetch.peer = found[0].endpoint
        nodes = found[1][start : start + min(room, _PIECE_BLOCKS, self._link_room(prefetch.peer))]
        source = PeerTiers(found[0], self._costs.link(prefetch.peer), self._kv.pool.counters)
        prefetch.ask(self.scheduler, step, loads, source.hold(nodes))
        return len(nodes)

    def _link_room(self, peer: str) -> int:
        """The number of further blocks that may be fetched from a peer now."""
        return max(0, _MOST_LOADING - self._costs.link(peer).num_loading) if peer else _MOST_LOADING

    def came(self, prefetch: Prefetch) -> None:
        """All blocks in flight have arrived."""
        if self.active.get(prefetch.request) is not prefetch:
            return
        if prefetch.cache(self.scheduler):
            prefetch.stopped, prefetch.asks = True, False
        self._release_if_done(prefetch)

    def _release_if_done(self, prefetch: Prefetch) -> None:
        if not prefetch.pieces and not prefetch.asks:
            self._kv.free(prefetch.table, None)
            del self.active[prefetch.request]

    def peer_lost(self, peer: str) -> None:
        for prefetch in [one for one in self.active.values() if one.peer == peer]:
            self._stop(prefetch)

    def clear(self) -> None:
        for prefetch in self.active.values():
            self._kv.free(prefetch.table, None)
        self.active.clear()

"""Prefetches of blocks from peers, for a request whose prompt is being computed at another executor.

As soon as a step of the other executor has come back, the full blocks that it computed can be fetched, while later
blocks are still being computed. Fetched blocks are cached here like any others, and no sequence holds them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix
from pagewise_scheduler.core.memory.prefix_tree import block_keys
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.tiers.peer import PeerTiers
from pagewise_scheduler.core.tiers.tier import Location
from pagewise_scheduler.core.tiers.transfers import Loads

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_PIECE_BLOCKS, _MOST_LOADING = 128, 512
"""The most blocks in flight of one prefetch, and from one peer."""


@dataclass(slots=True, eq=False)
class FetchedPiece:
    """Consecutive blocks of a prefetch.

    ``blocks``: the device blocks into which they are copied. ``good``: whether all have the right content; None: they
    are in flight.
    """

    prefetches: "Prefetches"
    prefetch: "Prefetch"
    blocks: list[int]
    good: bool | None = None

    @property
    def request(self) -> Request:
        return self.prefetch.request

    @property
    def waits(self) -> bool:
        return not self.prefetch.stopped

    def came(self, locations: Sequence[Location], bad: Sequence[Location], seconds: float) -> None:
        self.good = not bad
        self.prefetches.came(self.prefetch)


@dataclass(slots=True, eq=False)
class Prefetch:
    """The KV of ``tokens`` (int32 bytes) that is fetched for ``request``, which runs at another executor.

    ``table``: holds the blocks that are here and the blocks in flight. ``pieces``: the blocks in flight, in order.
    ``peer``: the endpoint of the last fetch. ``asks``: peers may have more blocks. ``stopped``: no further blocks are
    fetched, and no request waits for the blocks in flight.
    """

    request: Request
    table: BlockTable
    tokens: bytes = b""
    pieces: list[FetchedPiece] = field(default_factory=list)
    peer: str = ""
    asks: bool = True
    stopped: bool = False

    def tokens_between(self, start: int, stop: int) -> bytes:
        return self.tokens[4 * start : 4 * stop]


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
            prefetch = self.active[sequence.request] = Prefetch(sequence.request, table)
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
            self._kv.take(table, CachedPrefix(path, -1, 0, len(path) * self._kv.block_size))

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
        for _, group in groupby(nodes, key=attrgetter("nearest_tier")):
            source = PeerTiers(found[0], self._costs.link(prefetch.peer), self._kv.pool.counters)
            locations = source.hold(list(group))
            added, evicted = self._kv.grow(table, table.num_slots + len(locations) * self._kv.block_size)
            self.scheduler.plan.copy(evicted)
            prefetch.pieces.append(FetchedPiece(self, prefetch, added))
            recoveries.transfers.ask(step, loads, prefetch.pieces[-1], locations, added)
        return len(nodes)

    def _link_room(self, peer: str) -> int:
        """The number of further blocks that may be fetched from a peer now."""
        return max(0, _MOST_LOADING - self._costs.link(peer).num_loading) if peer else _MOST_LOADING

    def came(self, prefetch: Prefetch) -> None:
        """A piece has arrived. When all pieces have, the blocks before the first bad piece are cached."""
        if self.active.get(prefetch.request) is not prefetch or any(one.good is None for one in prefetch.pieces):
            return
        table, size = prefetch.table, self._kv.block_size
        num_good = len(table.blocks) - sum(len(one.blocks) for one in prefetch.pieces)
        num_good += sum(len(one.blocks) for one in takewhile(attrgetter("good"), prefetch.pieces))
        if num_good < len(table.blocks):
            prefetch.stopped, prefetch.asks = True, False
        replaced = self._kv.cache_full_blocks(table, num_good * size, prefetch.tokens_between)
        self._kv.drop([own for _, own, _ in replaced], None)
        prefetch.pieces.clear()
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

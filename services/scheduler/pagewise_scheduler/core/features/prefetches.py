"""Blocks that come from peers before the sequence that needs them: its prompt is being computed elsewhere.

As soon as a step of the other executor has come back, the full blocks that it computed can be fetched, while later ones
are still being computed. Blocks that have arrived are cached here like any others, and no sequence holds them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.memory.block_table import BlockTable
from pagewise_scheduler.core.memory.prefix_tree import block_keys
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.tiers.kv_cache_manager import CachedPrefix
from pagewise_scheduler.core.tiers.peer import PeerTiers
from pagewise_scheduler.core.tiers.tier import Location
from pagewise_scheduler.core.tiers.transfers import Loads

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_PIECE_BLOCKS, _MOST_LOADING = 128, 512
"""The most blocks of one prefetch that are on their way at a time, and of a peer beyond which no more are asked for."""


@dataclass(slots=True, eq=False)
class FetchedPiece:
    """Blocks that are fetched ahead, one after the other of a prefix.

    ``blocks``: the device blocks into which they are copied. ``good``: whether all have the right content; None: they
    are on their way.
    """

    prefetches: "Prefetches"
    prefetch: "Prefetch"
    blocks: list[int]
    good: bool | None = None

    @property
    def request(self) -> Request:
        """The request for which they are fetched."""
        return self.prefetch.request

    @property
    def waits(self) -> bool:
        """See ``Receiver``."""
        return not self.prefetch.stopped

    def came(self, locations: Sequence[Location], bad: Sequence[Location], seconds: float) -> None:
        """See ``Receiver``."""
        self.good = not bad
        self.prefetches.came(self.prefetch)


@dataclass(slots=True, eq=False)
class Prefetch:
    """The KV of ``tokens`` (int32 bytes) that is to come here for ``request``, which runs at another executor.

    ``table``: holds the blocks that are here, and those on their way. ``pieces``: those on their way, in order.
    ``peer``: the endpoint that was asked last. ``asks``: there may be more to ask for. ``stopped``: no
    further blocks are asked for, and no request waits for those on their way.
    """

    request: Request
    table: BlockTable
    tokens: bytes = b""
    pieces: list[FetchedPiece] = field(default_factory=list)
    peer: str = ""
    asks: bool = True
    stopped: bool = False

    def tokens_between(self, start: int, stop: int) -> bytes:
        """Of the tokens, those from ``start`` to ``stop`` as int32 bytes."""
        return self.tokens[4 * start : 4 * stop]


class Prefetches(Feature):
    """All prefetches of one executor. ``active``: those that something is on its way for, or may be asked for."""

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        self._kv, self._costs = scheduler.kv, scheduler.costs
        self.active: dict[Request, Prefetch] = {}

    def want(self, sequence: RequestSequence, num_tokens: int) -> None:
        """Other executors have, or will soon have, the first ``num_tokens`` tokens of a sequence computed."""
        prefetch = self.active.get(sequence.request)
        if prefetch is None:
            table = self._kv.new_table(sequence.cache_salt, sequence.request.ref)
            prefetch = self.active[sequence.request] = Prefetch(sequence.request, table)
        stop = num_tokens // self._kv.block_size * self._kv.block_size
        if 4 * stop > len(prefetch.tokens):  # it is less if they are being computed anew: what is on its way stays
            prefetch.tokens = sequence.tokens_between(0, stop)
        if not prefetch.stopped:
            prefetch.asks = True
            self._hold(prefetch)

    def starts(self, sequence: RequestSequence) -> None:
        """See ``Feature``. The sequence computes the blocks that have not come."""
        if (prefetch := self.active.get(sequence.request)) is not None:
            self._stop(prefetch)

    def _stop(self, prefetch: Prefetch) -> None:
        prefetch.stopped, prefetch.asks = True, False
        self._let_go(prefetch)

    def _hold(self, prefetch: Prefetch) -> None:
        """Hold the blocks of its tokens that are here already."""
        table = prefetch.table
        if not table.blocks:
            tree = self._kv.pool.tree
            path = tree.walk(tree.root_of(table.cache_salt), block_keys(prefetch.tokens, self._kv.block_size))
            while path and path[-1].block < 0:
                path.pop()
            self._kv.take(table, CachedPrefix(path, -1, 0, len(path) * self._kv.block_size))

    def coming(self) -> Iterable[tuple[BlockTable, bytes]]:
        """See ``Feature``."""
        return ((one.table, one.tokens) for one in self.active.values() if one.pieces)

    def request_loads(self, step: int, loads: Loads) -> None:
        """See ``Feature``. Asks for blocks that other executors have computed by now: a piece of each prefetch."""
        if not self.active:
            return
        room = self.scheduler.prefilling.num_spare(len(self.scheduler.decoding))
        for prefetch in list(self.active.values()):
            if prefetch.asks and not prefetch.pieces and self._link_room(prefetch.peer):
                room -= self._request(prefetch, step, loads, room)

    def _request(self, prefetch: Prefetch, step: int, loads: Loads, room: int) -> int:
        """Ask for a piece that takes at most ``room`` blocks; returns how many it takes."""
        recoveries, table = self.scheduler.recoveries, prefetch.table
        start, found = len(table.blocks), None
        if room > 0:
            found = recoveries.find_at_peers(table.cache_salt, prefetch.tokens, start)
        if found is None:
            prefetch.asks = False
            self._let_go(prefetch)
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
        """Blocks that may be asked of a peer beside those that are."""
        return max(0, _MOST_LOADING - self._costs.link(peer).num_loading) if peer else _MOST_LOADING

    def came(self, prefetch: Prefetch) -> None:
        """A piece has arrived. When all that were asked for have, the good ones are cached."""
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
        self._let_go(prefetch)

    def _let_go(self, prefetch: Prefetch) -> None:
        """Hold nothing when nothing is on its way and nothing is asked for."""
        if not prefetch.pieces and not prefetch.asks:
            self._kv.free(prefetch.table, None)
            del self.active[prefetch.request]

    def peer_lost(self, peer: str) -> None:
        """See ``Feature``. No request waits for the blocks that were to come from there."""
        for prefetch in [one for one in self.active.values() if one.peer == peer]:
            self._stop(prefetch)

    def clear(self) -> None:
        """See ``Feature``."""
        for prefetch in self.active.values():
            self._kv.free(prefetch.table, None)
        self.active.clear()

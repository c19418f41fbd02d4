"""Blocks that come from peers before the sequence that needs them: its prompt is being computed elsewhere.

As soon as a step of the other executor has come back, the full blocks that it computed can be fetched, while later ones
are still being computed. Blocks that have arrived are cached here like any others, and no sequence holds them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import attrgetter

from pagewise_scheduler.core.memory.block_table import BlockTable
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, block_keys
from pagewise_scheduler.core.requests.request import Request, Sequence
from pagewise_scheduler.core.tiers.cost_model import CostModel
from pagewise_scheduler.core.tiers.kv_cache_manager import CachedPrefix, KVCacheManager
from pagewise_scheduler.core.tiers.peer import Peer, PeerTiers
from pagewise_scheduler.core.tiers.tier import BlockCopy, Copies
from pagewise_scheduler.core.tiers.transfers import Load, TransferKey, Transfers

_PIECE_BLOCKS, _MOST_LOADING = 128, 512
"""The most blocks of one prefetch that are on their way at a time, and of a peer beyond which no more are asked for."""


AtPeers = Callable[[str | None, bytes, int], tuple[Peer, list[CachedBlock]] | None]
"""Of a cache salt, tokens (int32 bytes) and a number of blocks: who holds more blocks of them than that, and which."""


@dataclass(slots=True, eq=False)
class FetchedPiece:
    """Blocks that are fetched ahead, one after the other of a prefix.

    ``blocks``: the device blocks into which they are copied. ``came``: None: they are on their way; True: all have the
    right content; False: some do not.
    """

    prefetch: "Prefetch"
    blocks: list[int]
    came: bool | None = None

    @property
    def request(self) -> Request:
        """Whose they are."""
        return self.prefetch.request


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


class Prefetches:
    """All prefetches of one executor. ``active``: those that something is on its way for, or may be asked for."""

    def __init__(self, kv: KVCacheManager, costs: CostModel, transfers: Transfers) -> None:
        self._kv = kv
        self._costs = costs
        self._transfers = transfers
        self.active: dict[Request, Prefetch] = {}

    def want(self, sequence: Sequence, num_tokens: int) -> None:
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

    def stop(self, request: Request) -> None:
        """Ask for nothing more for a request."""
        if (prefetch := self.active.get(request)) is not None:
            prefetch.stopped, prefetch.asks = True, False
            self._let_go(prefetch)

    def _hold(self, prefetch: Prefetch) -> None:
        """Hold what is here already of its tokens."""
        table = prefetch.table
        if not table.blocks:
            tree = self._kv.pool.tree
            path = tree.walk(tree.root_of(table.cache_salt), block_keys(prefetch.tokens, self._kv.block_size))
            while path and path[-1].block < 0:
                path.pop()
            self._kv.take(table, CachedPrefix(path, -1, 0, len(path) * self._kv.block_size))

    def request(self, step: int, requested: dict[TransferKey, Load], room: int, at_peers: AtPeers) -> Copies:
        """Add to ``requested`` what ``step`` brings of what others have computed by now: a piece of each prefetch.

        ``room``: blocks that it may take. ``at_peers``: finds them. Returns the copies that make room for it.
        """
        copies: list[BlockCopy] = []
        for prefetch in list(self.active.values()):
            if not prefetch.asks or prefetch.pieces or not self._link_room(prefetch.peer):
                continue
            start, found = len(prefetch.table.blocks), None
            if room > 0:
                found = at_peers(prefetch.table.cache_salt, prefetch.tokens, start)
            if found is None:
                prefetch.asks = False
                self._let_go(prefetch)
                continue
            prefetch.peer = found[0].endpoint
            nodes = found[1][start : start + min(room, _PIECE_BLOCKS, self._link_room(prefetch.peer))]
            room -= len(nodes)
            for _, group in groupby(nodes, key=lambda node: node.nearest_tier):
                source = PeerTiers(found[0], self._costs.link(prefetch.peer), self._kv.pool.counters)
                places, table = source.hold(list(group)), prefetch.table
                added, evicted = self._kv.grow(table, table.num_slots + len(places) * self._kv.block_size)
                copies += evicted
                prefetch.pieces.append(FetchedPiece(prefetch, added))
                self._transfers.ask(step, requested, prefetch.pieces[-1], places, added)
        return copies

    def _link_room(self, peer: str) -> int:
        """Blocks that may be asked of a peer beside those that are."""
        return max(0, _MOST_LOADING - self._costs.link(peer).num_loading) if peer else _MOST_LOADING

    def came(self, piece: FetchedPiece, *, good: bool) -> None:
        """A piece has arrived. When all that were asked for have, they are cached, as far as they are what they should
        be."""
        piece.came = good
        prefetch = piece.prefetch
        if self.active.get(prefetch.request) is not prefetch or any(one.came is None for one in prefetch.pieces):
            return
        table, size = prefetch.table, self._kv.block_size
        num_good = len(table.blocks) - sum(len(one.blocks) for one in prefetch.pieces)
        num_good += sum(len(one.blocks) for one in takewhile(attrgetter("came"), prefetch.pieces))
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

    def lose(self, peer: str) -> None:
        """A peer is gone: nobody waits for what was to come from there."""
        for prefetch in list(self.active.values()):
            if prefetch.peer == peer:
                self.stop(prefetch.request)

    def clear(self) -> None:
        """The executor is gone or reset."""
        for prefetch in self.active.values():
            self._kv.free(prefetch.table, None)
        self.active.clear()

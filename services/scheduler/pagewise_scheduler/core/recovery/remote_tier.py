"""Where blocks come from that a sequence needs and the device does not hold: the executor's own host, or a peer.

Together the prefix trees of all executors are the directory: they say exactly which content lies where. A peer's blocks
are pinned in its own pool while they are being fetched, so that they neither move nor change.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, Protocol

from pagewise_shared.protocol import DEVICE, HOST

from pagewise_scheduler.core.memory.block_pool import BlockPool
from pagewise_scheduler.core.memory.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, block_keys
from pagewise_scheduler.core.recovery.cost_model import Link


class Place(NamedTuple):
    """Where a pinned block lies: the tier (DEVICE or HOST), and its id in that tier's pool."""

    node: CachedBlock
    tier: int
    block: int


@dataclass(slots=True, eq=False)
class BlockSource:
    """One way for blocks to come in.

    Fields:
        peer: the block endpoint of the executor that lends them; empty: they come from the own host.
        link: what it costs. pool: whose blocks they are, of the peer's ``epoch``. wake: called when they are back.
    """

    peer: str
    link: Link
    pool: BlockPool
    epoch: int = 0
    wake: Callable[[], None] = lambda: None
    _pinned: int = 0
    _lent: list[int] = field(default_factory=list)

    def pin(self, nodes: list[CachedBlock]) -> list[Place]:
        """Keep these blocks, one after the other of a prefix, where they are until they are unpinned.

        A peer's device is read before its host. What comes before them there is kept too: what is in use stands on it.
        """
        places = []
        self._pinned += len(nodes)
        if self.peer:
            before = takewhile(lambda node: node.block >= 0, ancestors(nodes[0].parent))
            self._lent += [node.block for node in before]
            self._lent.reverse()
        for node in nodes:
            if self.peer and node.block >= 0:
                self._lent.append(node.block)
                places.append(Place(node, DEVICE, node.block))
            else:
                self.pool.host.pin((node,))
                places.append(Place(node, HOST, node.host))
        self.pool.lend(self._lent)
        return places

    def unpin(self, places: Iterable[Place]) -> None:
        """The counterpart of ``pin``, the last block first. A peer gets its device blocks back all at once: else some
        would stand on others that may go."""
        for place in places:
            self._pinned -= 1
            if place.tier == HOST:
                self.pool.host.unpin((place.node,))
        if self._pinned:
            return
        lent, self._lent = self._lent, []
        self.pool.take_back(lent[::-1])
        if self.peer:
            self.wake()


class PeerScheduler(Protocol):
    """The scheduler of an executor that lends blocks."""

    kv: KVCacheManager
    epoch: int

    @property
    def last_step(self) -> int:
        """The step that was planned last."""
        ...


@dataclass(slots=True, eq=False)
class Peer:
    """An executor whose blocks others may fetch.

    ``endpoint``: where. ``block_format``: of what is fetched; equal ones fit. ``wake``: tells it that blocks came back.
    ``key``: its public key (Z85 text), empty where connections have none.
    """

    endpoint: str
    block_format: Hashable
    scheduler: PeerScheduler
    wake: Callable[[], None]
    key: str = ""


@dataclass(slots=True)
class PrefixDirectory:
    """All peers of a fleet, by their endpoints."""

    peers: dict[str, Peer] = field(default_factory=dict)

    def longest(
        self, asker: str, cache_salt: str | None, tokens: bytes, more_than: int, usable: Callable[[str], bool]
    ) -> tuple[Peer, list[CachedBlock]] | None:
        """The peer that holds the longest prefix of ``tokens`` (int32 bytes), if it is of ``more_than`` blocks.

        ``asker``: the endpoint of who asks; it gets blocks of its own format only. ``usable``: whether an endpoint may
        be asked. Costs nothing for executors that do not hold the first block, and a look-up per block for others.
        """
        own = self.peers.get(asker)
        if own is None:
            return None
        best: tuple[Peer, list[CachedBlock]] | None = None
        keys: list[bytes] = []
        for peer in self.peers.values():
            if peer is own or peer.block_format != own.block_format or not usable(peer.endpoint):
                continue
            tree = peer.scheduler.kv.pool.tree
            node = tree.root_of(cache_salt)
            if node is None:
                continue
            if not keys:  # cut once: a bytes object remembers its hash
                keys = list(block_keys(tokens, peer.scheduler.kv.block_size))
            # Until its next plan goes out, what it has just demoted is not on its way to its host.
            nodes = _readable(tree.walk(node, keys), host_too=not peer.scheduler.kv.pool.host.stores)
            if len(nodes) > max(more_than, len(best[1]) if best else 0):
                best = peer, nodes
        return best


def _readable(path: list[CachedBlock], *, host_too: bool) -> list[CachedBlock]:
    """The beginning of a path that lies on the device, or on the host if ``host_too``."""
    return [*takewhile(lambda node: node.block >= 0 or (host_too and node.host >= 0), path)]

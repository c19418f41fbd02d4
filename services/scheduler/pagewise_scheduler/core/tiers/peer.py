"""Where the blocks come from that a recovery brings to the device: the executor's own lower tiers, or those of a peer.

Together the prefix trees of all executors are the directory: they say exactly which content lies where. Blocks are
pinned while they are being read, a peer's in the peer's own tiers, so that they neither move nor change.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, Protocol

from pagewise_shared.protocol import DEVICE, tier_name

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, block_keys
from pagewise_scheduler.core.tiers.copy_costs import Link
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.host import CacheTier
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.tier import Tier


class BlockPlace(NamedTuple):
    """Where a pinned block lies: the number of the tier, and its id there."""

    node: CachedBlock
    tier: int
    block: int


class RecoverySource(Protocol):
    """Tiers from which a recovery copies blocks to the device.

    ``peer``: the block endpoint of the executor that they are of, in its ``epoch``; empty: it is the own one. ``name``:
    for people and metrics. ``link``: what copies from there cost; of several tiers, from the slowest.
    """

    peer: str
    epoch: int
    name: str
    link: Link

    def link_from(self, tier: int) -> Link:
        """What copies from one of the tiers cost."""
        ...

    def pin(self, nodes: list[CachedBlock]) -> list[BlockPlace]:
        """Keep these blocks, one after the other of a prefix, where they are until they are released."""
        ...

    def release(self, places: Iterable[BlockPlace]) -> None:
        """The counterpart of ``pin``, the last block first."""
        ...


class OwnTiers:
    """The executor's tiers below the device, in which ``nodes`` lie."""

    __slots__ = ("_tiers", "epoch", "link", "name", "peer")

    def __init__(self, tiers: Sequence[CacheTier], nodes: Iterable[CachedBlock]) -> None:
        self.peer, self.epoch = "", 0
        self._tiers = {tier.number: tier for tier in tiers}
        used = {node.nearest_tier for node in nodes}
        slowest = max((self._tiers[number] for number in used), key=lambda tier: tier.costs.load.predict(0, 1))
        self.name, self.link = tier_name(slowest.number), slowest.costs.load

    def link_from(self, tier: int) -> Link:
        """What copies from one of the tiers cost."""
        return self._tiers[tier].costs.load

    def pin(self, nodes: list[CachedBlock]) -> list[BlockPlace]:
        """Keep these blocks in the nearest tier that has each of them."""
        places = []
        for node in nodes:
            number = node.nearest_tier
            place = BlockPlace(node, number, node.block_id(number))
            self._tiers[number].pin((place.block,))
            places.append(place)
        return places

    def release(self, places: Iterable[BlockPlace]) -> None:
        """The counterpart of ``pin``, the last block first."""
        for place in places:
            self._tiers[place.tier].release((place.block,))


class PeerTiers:
    """The tiers of another executor, as they are in its present life. ``wake``: called when its blocks are back."""

    __slots__ = ("_device", "_lent", "_num_pinned", "_tiers", "_wake", "epoch", "link", "name", "peer")

    def __init__(self, peer: "Peer", link: Link) -> None:
        kv = peer.scheduler.kv
        self.peer, self.epoch, self.name, self.link = peer.endpoint, peer.scheduler.epoch, "peer", link
        self._device: BlockPool = kv.pool
        self._tiers: Mapping[int, Tier] = kv.tiers
        self._wake: Callable[[], None] = peer.wake
        self._lent: list[int] = []  # blocks of the peer's device that are kept for this, in a sequence's order
        self._num_pinned = 0

    def link_from(self, tier: int) -> Link:
        """What copies from one of the tiers cost."""
        return self.link

    def pin(self, nodes: list[CachedBlock]) -> list[BlockPlace]:
        """Keep these blocks in the nearest tier that has each of them.

        What comes before them on the peer's device is kept too: what is in use stands on it.
        """
        before = takewhile(lambda node: node.block >= 0, ancestors(nodes[0].parent))
        self._lent += [node.block for node in before]
        self._lent.reverse()
        places = []
        for node in nodes:
            number = node.nearest_tier
            place = BlockPlace(node, number, node.block_id(number))
            if number == DEVICE:
                self._lent.append(place.block)
            else:
                self._tiers[number].pin((place.block,))
            places.append(place)
        self._device.lend(self._lent)
        self._num_pinned += len(places)
        return places

    def release(self, places: Iterable[BlockPlace]) -> None:
        """The counterpart of ``pin``, the last block first. The peer's device gets its blocks back all at once: else
        some would stand on others that may go."""
        for place in places:
            self._num_pinned -= 1
            if place.tier != DEVICE:
                self._tiers[place.tier].release((place.block,))
        if not self._num_pinned:
            lent, self._lent = self._lent, []
            self._device.take_back(lent[::-1])
            self._wake()


class PeerScheduler(Protocol):
    """The scheduler of an executor whose blocks others may read."""

    kv: KVCacheManager
    epoch: int

    @property
    def last_step(self) -> int:
        """The step that was planned last."""
        ...

    @property
    def has_unsent_demotions(self) -> bool:
        """Whether blocks are to go to lower tiers by copies that no plan has asked for yet."""
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
            # Until its next plan goes out, what it has just demoted is not under way.
            nodes = _readable(tree.walk(node, keys), device_only=peer.scheduler.has_unsent_demotions)
            if len(nodes) > max(more_than, len(best[1]) if best else 0):
                best = peer, nodes
        return best


def _readable(path: list[CachedBlock], *, device_only: bool) -> list[CachedBlock]:
    """The beginning of a path that lies on the device, or in any tier unless ``device_only``."""
    if device_only:
        return [*takewhile(lambda node: node.block >= 0, path)]
    return [*takewhile(lambda node: node.num_places, path)]

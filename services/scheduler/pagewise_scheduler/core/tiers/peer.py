"""The tiers of other executors, from which blocks are fetched.

Together the prefix trees of all executors are the directory: they have the exact location of all content. Blocks are
pinned while they are being read, a peer's in the peer's own tiers, so that they neither move nor change.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from pagewise_shared.protocol import DEVICE, RemoteTier

from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, block_keys
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.cost_model import Link
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.pool import Pool
from pagewise_scheduler.core.tiers.snapshots import SnapshotPool, nearest_pool
from pagewise_scheduler.core.tiers.tier import Location, Source

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler


class PeerTiers(Source):
    """The tiers of another executor, under its present epoch, from which one recovery or prefetch gets blocks.

    ``counters``: of the executor that gets them.
    """

    name, is_far = "peer", True

    def __init__(self, peer: "Peer", link: Link, counters: MemoryCounters) -> None:
        kv = peer.scheduler.kv
        self.peer, self.epoch, self.link = peer.endpoint, peer.scheduler.epoch, link
        self._counters = counters
        self._peer = peer
        self._device: BlockPool = kv.pool
        self._tiers: Mapping[int, Pool] = kv.tiers
        self._windows, self._pools = kv.windows, dict[tuple[int, int], SnapshotPool]()
        self._pinned: list[int] = []  # blocks of the peer's device that are kept for this, in a sequence's order
        self._num_held = 0

    def hold(self, nodes: Sequence[CachedBlock]) -> list[Location]:
        """Hold each of these blocks in the nearest tier that has it.

        The blocks before them on the peer's device are held too: a block in use needs its ancestors there.
        """
        before = takewhile(lambda node: node.block >= 0, ancestors(nodes[0].parent))
        pinned = [node.block for node in before]
        pinned.reverse()
        locations = []
        for node in nodes:
            number = node.nearest_tier
            location = Location(self, number, node.block_id(number), node)
            if number == DEVICE:
                pinned.append(location.block)
            else:
                self._tiers[number].pin((location.block,))
            locations.append(location)
        self._device.pin_remote(pinned)
        self._pinned += pinned
        self._num_held += len(locations)
        return locations

    def hold_windows(self, node: CachedBlock, groups: Sequence[int]) -> list[list[Location]]:
        """Hold the windows at the end of a node, of each of ``groups``, in the nearest tier that has them."""
        held: list[list[Location]] = []
        for number in groups:
            pool = nearest_pool(self._windows[number - 1], node)
            assert pool is not None
            self._pools[pool.tier, number] = pool
            pool.pin(blocks := pool.blocks_at(node) or [])
            held.append([Location(self, pool.tier, block, node, group=number) for block in blocks])
            self._num_held += len(blocks)
        return held

    def unhold(self, locations: Iterable[Location]) -> None:
        """Release these blocks. The peer's device gets its blocks back all at once: else a block could be evicted
        while one of its descendants is still lent."""
        for location in locations:
            self._num_held -= 1
            if location.group:
                self._pools[location.tier, location.group].release((location.block,))
            elif location.tier != DEVICE:
                self._tiers[location.tier].release((location.block,))
        if not self._num_held:
            pinned, self._pinned = self._pinned, []
            self._device.unpin_remote(pinned[::-1])
            self._peer.wake()

    def remote(self, tier: int) -> RemoteTier:
        """How a copy names the peer, and the step of the peer that has to be back before."""
        # Blocks of its device that are in the tree were computed by steps that are back. Copies to its other tiers may
        # be under way.
        step = 0 if tier == DEVICE else self._peer.scheduler.last_step
        return RemoteTier(self.peer, self.epoch, step, self._peer.key)

    def came(
        self, locations: Sequence[Location], bad: Sequence[Location], request: Request | None
    ) -> Iterable[CachedBlock]:
        """Count fetched blocks."""
        self._counters.fetched += len(locations) - len(bad)
        self._counters.fetch_failed += len(bad)
        return ()

    def has_failed(self, num_bad: int, num_blocks: int) -> bool:
        """Whether any block is missing: a pinned block comes, unless the peer or the connection is broken."""
        return num_bad > 0


@dataclass(slots=True, eq=False)
class Peer:
    """An executor whose blocks others may fetch.

    ``endpoint``: its block endpoint. ``block_format``: blocks can only be fetched between equal ones. ``wake``: called
    when lent blocks were taken back.
    ``key``: its public key (Z85 text), empty where connections have none.
    """

    endpoint: str
    block_format: Hashable
    scheduler: "Scheduler"
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

        ``asker``: the endpoint of the executor that fetches, which takes blocks of its own format only. ``usable``:
        whether an endpoint may be asked. Costs nothing for executors that do not hold the first block, and a look-up
        per block for others.
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
            # Copies of blocks that it has just demoted begin with its next plan.
            device_only, kv = peer.scheduler.has_unsent_demotions, peer.scheduler.kv
            nodes = _readable(tree.walk(node, keys), device_only=device_only)
            while nodes and not kv.can_begin(nodes[-1], device_only=device_only):
                nodes.pop()
            if len(nodes) > max(more_than, len(best[1]) if best else 0):
                best = peer, nodes
        return best


def _readable(path: list[CachedBlock], *, device_only: bool) -> list[CachedBlock]:
    """The beginning of a path that the device has, or, unless ``device_only``, any tier."""
    if device_only:
        return [*takewhile(lambda node: node.block >= 0, path)]
    return [*takewhile(lambda node: node.num_tiers, path)]

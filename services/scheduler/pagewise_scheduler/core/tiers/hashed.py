"""Tiers below the device whose blocks are found by their hashes: the disk cache and the store.

They outlive executors, and several executors share one. A scheduler keeps no list of their blocks: others write
there too, and the tier forgets by itself. When a request comes, an executor is asked how much of its prompt is there
(``LookUp``), which is noted in the request. A block that is gone when it is loaded is computed.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from typing import Protocol

from pagewise_shared.block_hash import BlockHash, BlockName, is_private, unpack_names
from pagewise_shared.protocol import DEVICE, BlockCopies

from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.eviction import EvictionPolicy
from pagewise_scheduler.core.memory.prefix_tree import PRIVATE, CachedBlock, ancestors, hash_chain, hash_of
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.cost_model import TierCosts
from pagewise_scheduler.core.tiers.snapshots import Snapshot, SnapshotPool, nearest_pool
from pagewise_scheduler.core.tiers.tier import BlockCopy, DemotionPolicy, Location, Tier

MAX_ARRIVING = 256
"""Blocks that may be on their way to such a tier when another prefix is offered to it."""
_MOST_ARRIVING = 512
_MOST_WAITING = 1 << 16
_WRITTEN_PER_STEP = 32
_BEGUN = _BITS = 16
"""Bits of ``CachedBlock.flags`` for all tiers."""


class StoredWatcher(Protocol):
    """Receives changes of the known blocks of a tier without ids, of the first group of layers."""

    def entered(self, node: CachedBlock, tier: int) -> None:
        """A tier has the block."""

    def gone(self, hashes: Iterable[BlockHash], tier: int) -> None:
        """A tier does not have blocks with these hashes, as far as it had them."""


class HashedTier(Tier):
    """A tier without ids, which several executors may share.

    Blocks come here in two ways. A tier above that evicts a block offers it, as to any tier. And when a sequence ends,
    its blocks that the tier lacks wait to be written back, the beginning of a prefix before its end: each plan takes
    some along. If one of them is not worth the copy, or no tier has it any more at its turn, the blocks that follow it
    are not written either.

    A prefix is of use only from its beginning on. The tiers above evict blocks from its end, so when such a block is
    taken over, all blocks before it are to be written too. ``CachedBlock.flags`` has two bits for each tier: the tier
    has the block or will when copies under way are made, and a block behind it was taken over.

    Of a model with windowed layers, the windows at the end of a snapshot are written with the block there.
    ``CachedBlock.flags`` has a further bit for the block of each group that holds the same tokens.

    ``identity``: executors with the same one share it. ``salted``: whether KV of requests with a cache salt may be
    here. ``windows``: the device's groups of windowed layers. ``watcher``: of its blocks; None: there is none.
    """

    is_far = True

    def __init__(
        self,
        number: int,
        identity: str,
        policy: EvictionPolicy,
        counters: MemoryCounters,
        below: Tier | None,
        costs: TierCosts,
        demotion: DemotionPolicy | None = None,
        *,
        salted: bool = True,
    ) -> None:
        self.number = number
        self.policy = policy
        self.below = below
        self.costs = costs
        self.identity = identity
        self.num_arriving, self.max_arriving = 0, MAX_ARRIVING
        self._counters = counters
        self.demotion = demotion
        self._salted = salted
        self._bit, self._begun = 1 << number, 1 << (number + _BEGUN)
        self.windows: Sequence[SnapshotPool] = ()
        self.watcher: StoredWatcher | None = None
        self._arriving: dict[tuple[BlockHash, int], CachedBlock] = {}  # by hash and group
        self._waiting: deque[list[CachedBlock]] = deque()  # the end of a prefix first: they are taken from the back
        self._num_waiting = 0

    def may_have(self, cache_salt: str | None) -> bool:
        """Whether KV of requests with this cache salt may be here."""
        return self._salted or not is_private(cache_salt)

    # ---- copies to this tier -------------------------------------------------------------------------

    def holds(self, node: CachedBlock) -> bool:
        """Whether the tier has the block, or will when copies under way are made. It may have been forgotten since."""
        return bool(node.flags & self._bit)

    def has(self, node: CachedBlock) -> bool:
        """Whether the tier has the block, and its copy has been made. It may have been forgotten since."""
        return bool(node.flags & self._bit) and (hash_of(node), 0) not in self._arriving

    def found(self, nodes: Iterable[CachedBlock]) -> None:
        """The tier has these blocks."""
        for node in nodes:
            node.flags |= self._bit

    def take_over(self, node: CachedBlock, source: int, copies: list[BlockCopy]) -> bool:
        """Take over a block that ``source`` evicts, as ``Tier`` describes."""
        if node.num_tiers == 1 and not node.flags & self._bit:  # else another tier has it, or this one
            if not self._write(node, source, copies):
                return False
            self._counters.demoted += source == DEVICE
            assert node.parent is not None
            if node.parent.parent is not None and not node.parent.flags & (self._bit | self._begun):
                path = self._lacking(node.parent, 0)
                for before in path:
                    before.flags |= self._begun
                self._wait(path)
        return True

    def ended(self, last_node: CachedBlock, num_stored: int) -> None:
        """A sequence lets go of its blocks, of which ``last_node`` is the last that is full. The first
        ``num_stored`` were found here."""
        if self._salted or not last_node.flags & PRIVATE:
            self._wait(self._lacking(last_node, num_stored))

    def forgot(self, nodes: list[CachedBlock]) -> None:
        """The tier has lost these blocks of a prefix and their descendants, unless they are on their way."""
        for node in (behind := [*nodes]):  # grows while it is walked
            if node.flags & self._bit and (hash_of(node), 0) not in self._arriving:
                node.flags &= ~self._bit
                self._gone([hash_of(node)])
                behind += node.children.values()
        windows = sum(map(self._window_bit, self.windows))
        for node in chain(ancestors(nodes[0].parent), behind) if windows and nodes else ():
            node.flags &= ~windows  # some of them may be the reason

    def dropped(self, node: CachedBlock) -> None:
        """The block is about to be deleted here: if it is used again, it is written again."""
        if node.flags & self._bit:
            self._gone([hash_of(node)])
        node.flags &= ~(self._bit | self._begun)
        for group in self.windows:
            node.flags &= ~self._window_bit(group)

    def _gone(self, hashes: Iterable[BlockHash]) -> None:
        if self.watcher is not None:
            self.watcher.gone(hashes, self.number)

    def _lacking(self, last_node: CachedBlock, num_stored: int) -> list[CachedBlock]:
        """The blocks up to ``last_node`` that do not lie here, the last one first; ``last_node`` itself if its windows
        may be lacking."""
        path: list[CachedBlock] = []
        if last_node.flags & self._bit and not all(last_node.flags & self._window_bit(one) for one in self.windows):
            return [last_node]
        for node in ancestors(last_node):
            if node.flags & self._bit:
                break
            if node.depth <= num_stored:
                node.flags |= self._bit
                if self.watcher is not None:
                    self.watcher.entered(node, self.number)
            else:
                path.append(node)
        return path

    def _wait(self, path: list[CachedBlock]) -> None:
        if self._num_waiting + len(path) > _MOST_WAITING:
            self._counters.not_written += len(path)
        elif path:
            self._num_waiting += len(path)
            self._waiting.append(path)

    @property
    def writes_back(self) -> bool:
        """Whether a block that waits to be written back may be written now."""
        return bool(self._waiting) and self.num_arriving < self.max_arriving

    def write_back(self, copies: list[BlockCopy]) -> None:
        """Write some of the blocks that wait. The copies are added to ``copies``."""
        most = len(copies) + min(_WRITTEN_PER_STEP, self.max_arriving - self.num_arriving)
        while self._waiting and len(copies) < most:
            path = self._waiting[0]
            node = path.pop()
            self._num_waiting -= 1
            if node.flags & self._bit:  # another sequence wrote it
                self._write_windows_at(node, copies)
            else:
                lies = node.nearest_tier
                if not DEVICE <= lies < self.number or not self._write(node, lies, copies):
                    self._counters.not_written += 1 + len(path)
                    self._num_waiting -= len(path)
                    path.clear()
            if not path:
                self._waiting.popleft()

    def _write(self, node: CachedBlock, source: int, copies: list[BlockCopy]) -> bool:
        """Copy a block from the tier ``source`` to here if it is wanted."""
        if node.flags & PRIVATE and not self._salted:
            return False
        # Blocks before a block that is here are written in any case.
        if self.num_arriving >= _MOST_ARRIVING or not (node.flags & self._begun or self.wants(node)):
            return False
        self._add(node, self._bit, (source, node.block_id(source), self.number, node, 0), copies)
        self._write_windows_at(node, copies)
        return True

    def _add(self, node: CachedBlock, bit: int, copy: BlockCopy, copies: list[BlockCopy]) -> None:
        node.flags |= bit
        self._arriving[hash_of(node), copy[4]] = node
        self.num_arriving += 1
        copies.append(copy)

    def _window_bit(self, group: SnapshotPool) -> int:
        return 1 << (self.number + (1 + group.number) * _BITS)

    def _write_windows_at(self, node: CachedBlock, copies: list[BlockCopy]) -> None:
        """Write the windows at a node where snapshots end, and of which the block is here."""
        for group in self.windows:
            pool = nearest_pool(group, node)
            if pool is not None and (snapshot := pool.at.get(node)) is not None and snapshot.node is node:
                self.write_snapshot(snapshot, pool, copies)

    def write_snapshot(self, snapshot: Snapshot, pool: SnapshotPool, copies: list[BlockCopy]) -> None:
        """Copy the blocks of a snapshot to here, as far as they are not here, if its prefix is."""
        node, bit = snapshot.node, self._window_bit(pool)
        if not node.flags & self._bit or self.num_arriving >= _MOST_ARRIVING:
            return
        path = [*islice(ancestors(node), node.depth - snapshot.first)]
        for one, block in zip(reversed(path), snapshot.blocks, strict=False):
            if not one.flags & bit:
                self._add(one, bit, (pool.tier, block, self.number, one, pool.number), copies)

    def arrived(self, copies: BlockCopies, bad: Collection[int], seconds: float) -> None:
        """Copies to this tier were made."""
        names = unpack_names(copies.names)
        self.num_arriving -= len(names)
        for index, name in enumerate(names):
            node = self._arriving.pop((name.hash, copies.group), None)
            if node is not None and index in bad:
                bit = self._window_bit(self.windows[copies.group - 1]) if copies.group else self._bit
                node.flags &= ~bit  # another sequence that uses it tries again
            elif node is not None and not copies.group and self.watcher is not None:
                self.watcher.entered(node, self.number)
        self._counters.written += len(names) - len(bad)
        self._counters.not_written += len(bad)
        if not bad and not copies.group:
            self.costs.store.observe(seconds, 1, len(names))

    # ---- copies from this tier -----------------------------------------------------------------------

    def locations(self, root: BlockHash, tokens: bytes, block_size: int, start: int, stop: int) -> list[Location]:
        """The locations of the blocks ``start`` to ``stop`` of a prompt, without holding the blocks.

        ``root``: the root of the prompt's block hashes. ``tokens``: of the prompt (int32 bytes).
        """
        hashes = hash_chain(root, tokens, 4 * block_size)
        names = (BlockName(hashes[at], hashes[at - 1] if at else root) for at in range(start, stop))
        return [Location(self, self.number, name=name) for name in names]

    def came(
        self, locations: Sequence[Location], bad: Sequence[Location], request: Request | None
    ) -> Iterable[CachedBlock]:
        """Count loaded blocks. If a block is gone, the answer to the look-up is void."""
        self._counters.recalled += len(locations) - len(bad)
        self._counters.recall_failed += len(bad)
        self._gone(location.name.hash for location in bad if location.name is not None)
        if bad and request is not None:
            request.stored.pop(self.identity, None)
        return ()

    def has_failed(self, num_bad: int, num_blocks: int) -> bool:
        """Whether no block came at all: the tier may forget a block now and then."""
        return num_bad == num_blocks

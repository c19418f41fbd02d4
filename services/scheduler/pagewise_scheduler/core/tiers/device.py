"""The device's blocks: free, cached, or in use with a number of references.

Source: the block pool of vLLM (arXiv 2309.06180, section 4.3), with a prefix tree instead of hashes.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.eviction import NEAREST, EvictionPolicy, LeastRecentlyUsed
from pagewise_scheduler.core.memory.eviction_history import RequestRef
from pagewise_scheduler.core.memory.prefix_tree import NOWHERE, CachedBlock, PrefixTree, ancestors
from pagewise_scheduler.core.tiers.pool import CACHED, FREE, Pool
from pagewise_scheduler.core.tiers.tier import Tier


class BlockPool(Pool):
    """The tier in which sequences compute.

    Block tables hold references to its blocks. The content of a block in use may not be known yet. A cached block is
    evicted after its descendants, so all ancestors of a block on the device are on the device too.
    ``num_remote_pins``: references of other executors that read blocks; ``remote_pins``: their number for each block.
    """

    def __init__(
        self,
        num_blocks: int,
        tree: PrefixTree,
        policy: EvictionPolicy | None = None,
        counters: MemoryCounters | None = None,
        below: Tier | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool holds at least one block, not {num_blocks}")
        super().__init__(DEVICE, num_blocks, tree, policy or LeastRecentlyUsed(), counters or MemoryCounters(), below)
        self.num_remote_pins = 0
        self.remote_pins = Counter[int]()

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block, a sequence's last block first.

        Blocks without any reference left are cached if their content is known, else free at once.
        """
        references, nodes, free, states = self._references, self._nodes, self._free, self.states
        tick, budgets = self.policy.tick(), self.budgets
        for block in blocks:
            left = references[block] - 1
            assert left >= 0, f"block {block} was released more often than it was taken"
            references[block] = left
            if left == 0:
                node = nodes[block]
                if node is None:
                    free.append(block)
                    states[block] = FREE
                else:
                    node.last_used = tick
                    states[block] = CACHED
                    self.num_cached += 1
                    if budgets is not None:
                        budgets.released(node)
                    if not node.num_on_device:
                        self.offer(node)
                    if node.num_tiers > 1:
                        for tier in self.lower:  # where it was offered with an older tick
                            tier.offer(node)
        self._evictable.shrink(self.num_cached)

    def restore(self, node: CachedBlock) -> None:
        """Restore a block as ``Pool`` does, but only behind blocks that are on the device."""
        parent = node.parent
        if node.hash in self.recoverable and parent is not None and (not parent.depth or parent.block >= 0):
            node.last_used = self.policy.tick()
            super().restore(node)

    def begin_with(self, nodes: Sequence[CachedBlock]) -> list[int]:
        """Pin the blocks with which a sequence begins, and return them."""
        blocks = [node.block for node in nodes]
        self.pin(blocks)
        for watcher in self.watchers:
            watcher.used(nodes)
        return blocks

    def close(self) -> None:
        """Close the pool as ``Pool`` does; its executor's blocks are gone from all tiers."""
        for watcher in self.watchers:
            watcher.all_gone()
        super().close()

    def pin_remote(self, blocks: list[int]) -> None:
        """Pin blocks that another executor reads, until they are taken back."""
        self.pin(blocks)
        self.num_remote_pins += len(blocks)
        self.remote_pins.update(blocks)

    def unpin_remote(self, blocks: list[int]) -> None:
        """Drop the references of ``pin_remote``, a sequence's last block first."""
        self.num_remote_pins -= len(blocks)
        if blocks:
            remote_pins = self.remote_pins
            for block in blocks:
                remote_pins[block] -= 1
                if not remote_pins[block]:
                    del remote_pins[block]  # no executor reads it any more
            self.release(blocks)

    def cache_full_block(
        self,
        parent: CachedBlock,
        tokens: bytes,
        block: int,
        known: CachedBlock | None,
        owner: RequestRef | None = None,
    ) -> CachedBlock:
        """Enter the content of a block in use into the tree: ``tokens`` (int32 bytes) after ``parent``.

        ``known``: the tree's node of this content, which is not on the device; None: the tree has no such node.
        ``owner``: the request that has computed the block.
        """
        node = self.tree.add(parent, tokens) if known is None else known
        node.cached_by = owner
        node.block = block
        node.num_tiers += 1
        parent.num_on_device += 1
        self._nodes[block] = node
        if known is not None:
            for tier in self.lower:  # copies in these tiers are redundant from now on
                tier.offer(known)
        if self.watchers:
            self._tell_entered(node)
        return node

    def _rank(self, node: CachedBlock) -> int | None:
        block = node.block
        return None if block < 0 or self._references[block] or node.num_on_device else NEAREST

    def forget(self, node: CachedBlock) -> None:
        """Give up the block of ``node``, if it is here, and neither it nor a block behind it is in use."""
        if self._rank(node) is not None:
            self._leave(node)

    def _count_evicted(self, *, kept: bool) -> None:
        self.counters.evicted += 1
        self.counters.dropped += not kept

    def _leave(self, node: CachedBlock) -> None:
        parent = node.parent
        assert parent is not None
        self._set_free(node.block)
        node.block = NOWHERE
        node.num_tiers -= 1
        parent.num_on_device -= 1
        if not parent.num_on_device and (above := parent.block) >= 0 and not self._references[above]:
            self.offer(parent)
        if self.watchers:
            self._tell_left(node)

    def _enter(self, node: CachedBlock, block: int) -> None:
        assert node.parent is not None
        node.block = block
        node.num_tiers += 1
        node.parent.num_on_device += 1
        self._nodes[block] = node
        if self.watchers:
            self._tell_entered(node)


@dataclass(slots=True, frozen=True)
class HotPrefix:
    """A prefix of ``num_blocks`` full blocks: its ``tokens`` (int32 bytes), and whose cache it is in."""

    cache_salt: str | None
    tokens: bytes
    num_blocks: int


def hottest_prefixes(pool: BlockPool, limit: int) -> list[HotPrefix]:
    """The prefixes that eviction would give up last, at most ``limit``, the most valuable first."""
    hottest = heapq.nlargest(limit, pool.tree.leaves(), key=lambda leaf: pool.policy.value(leaf[1]))
    return [_prefix(cache_salt, leaf) for cache_salt, leaf in hottest]


def _prefix(cache_salt: str | None, leaf: CachedBlock) -> HotPrefix:
    pieces = [node.tokens for node in ancestors(leaf)]
    return HotPrefix(cache_salt, b"".join(reversed(pieces)), len(pieces))

"""The device's blocks: which are free, which are cached, and which are in use by how many.

Source: the block pool of vLLM (arXiv 2309.06180, section 4.3), with a prefix tree instead of hashes.
"""

from collections.abc import Iterable

from pagewise_shared.block_hash import BlockHash

from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.eviction import EvictionPolicy, EvictionQueue, LeastRecentlyUsed
from pagewise_scheduler.core.memory.host_pool import HostPool
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, PrefixTree


class OutOfBlocksError(Exception):
    """More blocks were asked for than there are. Callers ask ``num_available`` first, so this escapes only as a bug."""


class BlockPool:
    """``num_blocks`` blocks. Each is in one state: free, cached (content known, no references), or in use.

    ``num_lent``: references of other executors that read blocks. ``restorable``: cached blocks from before, by block
    hash, whose content nobody has asked for yet; they are the first to go.

    Blocks are plain ids, 0 <= id < num_blocks. Allocating and releasing n blocks costs O(n), and O(log blocks) for each
    one that has to be evicted. What is evicted goes to ``host`` if that takes it, else it is dropped.
    """

    __slots__ = (
        "_evictable",
        "_free",
        "_nodes",
        "_num_cached",
        "_references",
        "_tick",
        "counters",
        "host",
        "num_blocks",
        "num_lent",
        "policy",
        "restorable",
        "tree",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        policy: EvictionPolicy | None = None,
        counters: MemoryCounters | None = None,
        model_fingerprint: str = "",
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool holds at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.policy = policy = policy or LeastRecentlyUsed()
        self.counters = counters or MemoryCounters()
        self.tree = PrefixTree(block_size, model_fingerprint)
        self.host = HostPool(num_host_blocks, self.tree, self.counters, policy)
        self._references = [0] * num_blocks
        self._nodes: list[CachedBlock | None] = [None] * num_blocks
        # A stack: the block freed last is used next, while the caches may still hold it.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_cached = 0
        self.num_lent = 0
        self.restorable: dict[BlockHash, int] = {}
        self._evictable = EvictionQueue(policy, self._may_go)
        self._tick = 0

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without references whose content may be used again."""
        return self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can hand out now: free ones, and cached ones, which are evicted for it."""
        return len(self._free) + self._num_cached

    @property
    def num_in_use(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free) - self._num_cached

    def next_evicted(self) -> CachedBlock | None:
        """The cached block that gives way first, if there is one."""
        return self._evictable.peek()

    def references(self, block: int) -> int:
        """How many holders the block has; 0 means free or cached."""
        return self._references[block]

    def node(self, block: int) -> CachedBlock | None:
        """The block's place in the prefix tree, if its content is known."""
        return self._nodes[block]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, each with one reference; cached ones are evicted if too few are free.

        Raises:
            OutOfBlocksError: there are fewer; nothing was taken.
        """
        if count == 0:
            return []
        free = self._free
        if count > len(free):
            if count > self.num_available:
                raise OutOfBlocksError(f"{count} blocks asked for, {self.num_available} of {self.num_blocks} available")
            self._evict(count - len(free))
        blocks = free[-count:]
        del free[-count:]
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, all of them in use or cached."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                assert self._nodes[block] is not None, f"block {block} is free and cannot be shared"
                self._num_cached -= 1
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block, a sequence's last block first.

        Those without any left are cached if their content is known, else free at once.
        """
        references, nodes, free = self._references, self._nodes, self._free
        self._tick = tick = self._tick + 1
        for block in blocks:
            left = references[block] - 1
            assert left >= 0, f"block {block} was released more often than it was taken"
            references[block] = left
            if left == 0:
                node = nodes[block]
                if node is None:
                    free.append(block)
                else:
                    node.last_used = tick
                    self._num_cached += 1
                    if not node.num_on_device:
                        self._evictable.push(node)
                    if node.host >= 0:
                        self.host.offer(node)
        self._evictable.shrink(self._num_cached)

    def expect(self, restorable: dict[BlockHash, int]) -> None:
        """The pool, empty so far, holds these blocks from before."""
        taken = set(restorable.values())
        self._free = [block for block in self._free if block not in taken]
        self.restorable = restorable
        self._num_cached = len(restorable)

    def restore(self, node: CachedBlock) -> None:
        """The content of ``node``, whose parent is on the device, is here from before, if it is; it is in the tree."""
        block = self.restorable.pop(node.hash, -1)
        if block >= 0:
            assert node.parent is not None
            node.block = block
            node.parent.num_on_device += 1
            node.last_used = self._tick
            self._nodes[block] = node
            self._evictable.push(node)

    def lend(self, blocks: list[int]) -> None:
        """Another executor reads these blocks: they stay, and stay as they are, until they are taken back."""
        self.share(blocks)
        self.num_lent += len(blocks)

    def take_back(self, blocks: list[int]) -> None:
        """The counterpart of ``lend``, a sequence's last block first."""
        self.num_lent -= len(blocks)
        if blocks:
            self.release(blocks)

    def cache_full_block(
        self, parent: CachedBlock, tokens: bytes, block: int, known: CachedBlock | None
    ) -> CachedBlock:
        """The content of a block in use is known from now on: ``tokens`` (int32 bytes) after ``parent``.

        ``known``: the tree's node of that content, if it has one, which then is not on the device.
        """
        node = self.tree.add(parent, tokens) if known is None else known
        node.block = block
        parent.num_on_device += 1
        self._nodes[block] = node
        if node.host >= 0:
            self.host.offer(node)
        return node

    def _may_go(self, node: CachedBlock, rank: int = 0) -> bool:
        return node.block >= 0 and self._references[node.block] == 0 and not node.num_on_device

    def _evict(self, count: int) -> None:
        while count and self.restorable:
            self._free.append(self.restorable.popitem()[1])
            self._num_cached -= 1
            self.counters.evicted += 1
            self.counters.dropped += 1
            count -= 1
        for _ in range(count):
            node = self._evictable.pop()
            assert node is not None
            parent, block = node.parent, node.block
            assert parent is not None
            node.block = -1
            parent.num_on_device -= 1
            self._nodes[block] = None
            self._free.append(block)
            self._num_cached -= 1
            self.counters.evicted += 1
            if not self.host.take_over(node, block):
                self.host.drop(node)
            if self._may_go(parent):
                self._evictable.push(parent)

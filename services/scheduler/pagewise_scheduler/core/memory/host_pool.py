"""The host's blocks: where cached blocks go that the device has no room for.

A host block holds a copy of a node of the prefix tree. While the node is on the device too, the copy is *clean*: it may
be dropped at no loss, and evicting the node from the device costs no transfer. Copies that are the only ones left go
tails first, like blocks on the device.
"""

from collections.abc import Callable, Iterable

from pagewise_shared.block_hash import BlockHash

from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.eviction import EvictionPolicy, EvictionQueue
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, PrefixTree

_CLEAN, _ONLY = 0, 1


class HostPool:
    """``num_blocks`` blocks of host memory, possibly none.

    Fields:
        stores: pairs (device block, host block) to be copied before the next step computes anything.
        num_storing: blocks whose copy to the host has been asked for and not confirmed. With ``max_storing`` of them
            under way, no more prefixes are begun: what is evicted then is dropped.
        restorable: blocks from before whose content nobody has asked for yet, by block hash; the first to go.
        worth_keeping: whether the prefix that ends with a node, which the device evicts, is worth its copies.
    """

    __slots__ = (
        "_evictable",
        "_free",
        "_tree",
        "counters",
        "max_storing",
        "num_blocks",
        "num_storing",
        "restorable",
        "stores",
        "worth_keeping",
    )

    def __init__(
        self,
        num_blocks: int,
        tree: PrefixTree,
        counters: MemoryCounters,
        policy: EvictionPolicy,
        max_storing: int = 1024,
    ) -> None:
        self.num_blocks = num_blocks
        self.max_storing = max_storing
        self.stores: list[int] = []
        self.num_storing = 0
        self.counters = counters
        self.restorable: dict[BlockHash, int] = {}
        self.worth_keeping: Callable[[CachedBlock], bool] = lambda node: True
        self._tree = tree
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable = EvictionQueue(policy, self._may_go)

    @property
    def num_used(self) -> int:
        """Blocks that hold a copy."""
        return self.num_blocks - len(self._free)

    def expect(self, restorable: dict[BlockHash, int]) -> None:
        """The pool, empty so far, holds these blocks from before."""
        taken = set(restorable.values())
        self._free = [block for block in self._free if block not in taken]
        self.restorable = restorable

    def restore(self, node: CachedBlock) -> None:
        """The content of ``node`` is here from before, if it is; it lies in the tree now."""
        host = self.restorable.pop(node.hash, -1)
        if host >= 0:
            node.host = host
            self.offer(node)

    def take_over(self, node: CachedBlock, block: int) -> bool:
        """The device evicts ``node`` from ``block``: keep it here if possible; False: nobody has it any more."""
        if node.host >= 0:
            self.offer(node)
            return True
        # A prefix comes from its end. Once that is here, refusing what comes before would make it worthless.
        begins = not node.children
        if not self.num_blocks or (begins and (self.num_storing >= self.max_storing or not self.worth_keeping(node))):
            self.counters.dropped += 1
            return False
        node.pins += 1  # so that making room does not drop what hangs on it, and it with them
        host = self._take()
        node.pins -= 1
        if host < 0:
            self.counters.dropped += 1
            return False
        node.host = host
        self.stores += (block, host)
        self.num_storing += 1
        self.counters.demoted += 1
        self.offer(node)
        return True

    def offer(self, node: CachedBlock) -> None:
        """The copy of ``node`` may have become evictable, or evictable as something else."""
        rank = _CLEAN if node.block >= 0 else _ONLY
        if self._may_go(node, rank):
            self._evictable.push(node, rank)
            self._evictable.shrink(self.num_used)

    def pin(self, nodes: Iterable[CachedBlock]) -> None:
        """Keep these copies until they are unpinned as often."""
        for node in nodes:
            assert node.host >= 0
            node.pins += 1

    def unpin(self, nodes: Iterable[CachedBlock]) -> None:
        """The counterpart of ``pin``; a sequence's last block first."""
        for node in nodes:
            node.pins -= 1
            assert node.pins >= 0
            self.offer(self._prune(node))

    def tidy(self, node: CachedBlock) -> None:
        """Take ``node`` out of the tree, and what leads to it alone, if it lies nowhere."""
        self.offer(self._prune(node))

    def drop(self, node: CachedBlock) -> None:
        """The copy of ``node`` and those of all nodes below it are void; what is nowhere else leaves the tree."""
        subtree = [node]
        for found in subtree:  # grows while it is walked: parents come before their children
            subtree += found.children.values()
        for found in reversed(subtree):
            if found.host >= 0 and not found.pins:
                self._free.append(found.host)
                found.host = -1
            if found is not node and found.block < 0 and found.host < 0 and not found.pins and not found.children:
                self._tree.remove(found)
        self.offer(self._prune(node))

    def stored(self, count: int) -> None:
        """So many copies to the host have been made."""
        self.num_storing -= count
        self.counters.stored += count
        assert self.num_storing >= 0

    def _may_go(self, node: CachedBlock, rank: int) -> bool:
        if node.host < 0 or node.pins:
            return False
        if node.block >= 0:
            return rank == _CLEAN
        return rank == _ONLY and not node.children

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if self.restorable:
            self.counters.host_evicted += 1
            return self.restorable.popitem()[1]
        node = self._evictable.pop()
        if node is None:
            return -1
        host, node.host = node.host, -1
        self.counters.host_evicted += 1
        if node.block < 0:
            parent = node.parent
            assert parent is not None
            self._tree.remove(node)
            self.offer(self._prune(parent))
        return host

    def _prune(self, node: CachedBlock) -> CachedBlock:
        """Take nodes out of the tree that lie nowhere and lead nowhere; returns the first that stays, now a leaf maybe.

        One that lies nowhere but leads somewhere is there while a transfer pins what is below it. Nobody finds that.
        """
        while node.block < 0 and node.host < 0 and not node.pins and not node.children and node.parent is not None:
            self._tree.remove(node)
            node = node.parent
        return node

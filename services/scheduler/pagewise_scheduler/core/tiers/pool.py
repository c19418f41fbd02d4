"""Blocks with ids: the common part of the device and of the tiers below it whose content is known exactly.

Each block is free, cached or in use. To *reserve* a block is to take one; if none is free, another one is *evicted*
first. The content of an evicted block remains in another tier that has it as well, or moves to a tier below that takes
it (it is *demoted*), or it is lost. The methods that evict return the copies that the next plan has to make before a
step writes into the blocks. To *pin* a block is to add a reference, which keeps it in place until the block is
*released*.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pagewise_shared.block_hash import BlockHash

from pagewise_scheduler.core.memory.block_watch import BlockWatcher
from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.eviction import EvictionPolicy
from pagewise_scheduler.core.memory.eviction_history import LossReason
from pagewise_scheduler.core.memory.eviction_queue import EvictionQueue
from pagewise_scheduler.core.memory.prefix_tree import NOWHERE, OWNER_SHIFT, CachedBlock, PrefixTree
from pagewise_scheduler.core.tiers.tier import BlockCopy, Copies, Tier

if TYPE_CHECKING:
    from pagewise_scheduler.core.memory.budgets import TierBudgets
    from pagewise_scheduler.core.tiers.host import HostTier


FREE, CACHED, IN_USE = 0, 1, 2
"""The states of blocks, as ``Pool.states`` has them."""


class OutOfBlocksError(Exception):
    """More blocks were requested than are available. Callers check ``num_available`` first, so only bugs raise it."""


class Pool:
    """The blocks of one tier: ids, 0 <= id < ``num_blocks``. Each is in one state: free, cached, or in use.

    A *cached* block has no references, and its content is known: it belongs to a node of the prefix tree. Reserving and
    releasing n blocks costs O(n), and O(log blocks) for each eviction.

    ``number``: the number of the tier on the wire. ``below``: the next tier down, if there is one. ``lower``: all tiers
    below that have ids too. ``num_cached``: number of cached blocks. ``states``: the state of each block, a byte, for
    the console. ``recoverable``: cached blocks that the executor has listed by hash in its Hello, and that no prompt
    has requested yet; they are evicted first. ``watchers``: called when a block enters and leaves. ``budgets``: the
    budgets of the owners of its blocks; None: no owner has a budget.
    """

    def __init__(
        self,
        number: int,
        num_blocks: int,
        tree: PrefixTree,
        policy: EvictionPolicy,
        counters: MemoryCounters,
        below: Tier | None,
    ) -> None:
        self.number = number
        self.num_blocks = num_blocks
        self.tree = tree
        self.policy = policy
        self.counters = counters
        self.below = below
        self.lower: tuple[HostTier, ...] = tuple(_pools_from(below))
        self.recoverable: dict[BlockHash, int] = {}
        self.watchers: Sequence[BlockWatcher] = ()
        self._caches = self.lower  # this tier, unless it is the device, and the lower ones: they hold copies alone
        self.states = bytearray(num_blocks)
        self._references = [0] * num_blocks
        self._nodes: list[CachedBlock | None] = [None] * num_blocks
        # A stack: the block freed last is used next, while the caches may still hold it.
        self._free = list(range(num_blocks - 1, -1, -1))
        self.num_cached = 0
        self._evictable: EvictionQueue[CachedBlock] | TierBudgets = EvictionQueue[CachedBlock](policy, self._rank)
        self.budgets: TierBudgets | None = None

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that are cached or in use."""
        return self.num_blocks - len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that ``reserve`` can hand out: free ones, and cached ones, which are evicted for it."""
        return len(self._free) + self.num_cached - self.num_protected

    @property
    def num_protected(self) -> int:
        """Cached blocks that budgets keep from being evicted."""
        return 0 if self.budgets is None else self.budgets.num_protected

    @property
    def num_in_use(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free) - self.num_cached

    def next_evicted(self) -> CachedBlock | None:
        """The cached block that gives way first, if there is one."""
        return self._evictable.peek()

    def next_evictions(self, count: int) -> list[CachedBlock]:
        """The cached blocks that would be evicted first at present, at most ``count``."""
        return self._evictable.first(count)

    def references(self, block: int) -> int:
        """How many holders the block has; 0 means free or cached."""
        return self._references[block]

    def num_freed(self, blocks: Iterable[int], earlier: Iterable[int] = ()) -> int:
        """By how much ``num_available`` rises if each of these blocks, of one owner, loses one reference after the
        blocks ``earlier`` have lost one each."""
        references, budgets = self._references, self.budgets
        if budgets is None:
            return sum(references[block] == 1 for block in blocks)
        last = [self._nodes[block] for block in blocks if references[block] == 1]
        known = [node for node in last if node is not None]
        if not known:
            return len(last)
        before = [node for block in earlier if references[block] == 1 and (node := self._nodes[block]) is not None]
        num_before = sum(node.flags >> OWNER_SHIFT == known[0].flags >> OWNER_SHIFT for node in before)
        protected = (budgets.more_protected(known[0], number) for number in (num_before, num_before + len(known)))
        return len(last) + next(protected) - next(protected)

    def num_shared(self, nodes: Sequence[CachedBlock]) -> int:
        """By how much less ``num_available`` falls if a sequence begins with these blocks than with as many new blocks:
        some are in use already, or are protected."""
        references = self._references
        shared = sum(1 for node in nodes if references[node.block] > 0)
        if self.budgets is not None and nodes:
            shared -= self.budgets.more_protected(nodes[0], shared - len(nodes))
        return shared

    def node(self, block: int) -> CachedBlock | None:
        """The block's node in the prefix tree, if its content is known."""
        return self._nodes[block]

    def divide(self, make: "type[TierBudgets]") -> "TierBudgets":
        """Evict by budgets from now on, which count no blocks yet; each cached block is then to be offered again."""
        self.budgets = self._evictable = budgets = make(self.policy, self._rank, self.states, CACHED)
        return budgets

    def close(self) -> None:
        """Stop reserving blocks. Blocks that are still held may be released."""
        self._evictable.close()
        self._caches = ()  # which may name the tier itself

    # ---- taking and giving back ----------------------------------------------------------------------

    def reserve(self, count: int) -> tuple[list[int], Copies]:
        """Take ``count`` blocks, each with one reference; cached ones are evicted if too few are free.

        Returns them, and the copies that have to be made before a step writes into them.

        Raises:
            OutOfBlocksError: there are fewer. Nothing was taken, and on the device nothing was evicted.
        """
        free = self._free
        copies: Copies = ()
        if count > len(free):
            if count > self.num_available:
                raise OutOfBlocksError(f"{count} blocks asked for, {self.num_available} of {self.num_blocks} available")
            copies = self.evict(count - len(free))
            if count > len(free):  # in a lower tier, children of evictable blocks may be pinned
                raise OutOfBlocksError(f"{count} blocks asked for, of which only {len(free)} could be freed")
        elif not count:
            return [], ()
        blocks = free[-count:]
        del free[-count:]
        references, states = self._references, self.states
        for block in blocks:
            references[block] = 1
            states[block] = IN_USE
        return blocks, copies

    def evict(self, count: int) -> Copies:
        """Free ``count`` blocks, or as many as may be evicted, the ones with the lowest value first.

        Returns the copies that keep their content.
        """
        copies: list[BlockCopy] = []
        while count and self._give_up_one(copies):
            count -= 1
        return copies

    def _give_up_one(self, copies: list[BlockCopy]) -> bool:
        """Evict the block that is worth the least; False: none can be evicted. ``copies``: the list to which copies
        that keep its content are added."""
        kept = False
        if self.recoverable:
            self._set_free(self.recoverable.popitem()[1])
        elif (node := self._evictable.pop()) is None:
            return False
        else:
            kept = self._give_up(node, copies)
        self._count_evicted(kept=kept)
        return True

    def _give_up(self, node: CachedBlock, copies: list[BlockCopy], reason: LossReason = "evicted") -> bool:
        """Let go of the cached block of ``node``; returns whether a tier below keeps its content. ``reason``: why it is
        lost if none does."""
        kept = self.below is not None and self._demote(node, copies)
        self._leave(node)
        if not node.num_tiers:
            self.drop(node, reason)
        for tier in self.lower if node.num_tiers else ():  # it may be the nearest one there now
            tier.offer(node)
        return kept

    def evict_nodes(self, nodes: Iterable[CachedBlock], reason: LossReason = "evicted") -> Copies:
        """Evict the blocks of ``nodes``, the last one of a prefix first, as far as they may be evicted.

        Returns the copies that keep their content. ``reason``: why the others are lost.
        """
        copies: list[BlockCopy] = []
        for node in nodes:
            if self._rank(node) is not None:
                self._count_evicted(kept=self._give_up(node, copies, reason))
        return copies

    def _set_free(self, block: int) -> None:
        """A cached block holds nothing any more."""
        self._nodes[block] = None
        self._free.append(block)
        self.states[block] = FREE
        self.num_cached -= 1

    def pin(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, all of them in use or cached."""
        references, budgets = self._references, self.budgets
        for block in blocks:
            if references[block] == 0:
                node = self._nodes[block]
                assert node is not None, f"block {block} is free and cannot be pinned"
                self.num_cached -= 1
                self.states[block] = IN_USE
                if budgets is not None:
                    budgets.pinned(node)
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block, a sequence's last block first."""
        for block in blocks:
            left = self._references[block] - 1
            assert left >= 0, f"block {block} was released more often than it was taken"
            self._references[block] = left
            if left == 0:
                node = self._nodes[block]
                assert node is not None
                self.num_cached += 1
                self.states[block] = CACHED
                if self.budgets is not None:
                    self.budgets.released(node)
                self.offer(node)

    def forget(self, node: CachedBlock) -> None:
        """Give up the block of ``node``, if it is here and may go."""
        raise NotImplementedError

    # ---- known content -------------------------------------------------------------------------------

    def expect(self, recoverable: dict[BlockHash, int]) -> None:
        """The executor has offered these blocks of the tier, which is empty so far, by their hashes."""
        taken = set(recoverable.values())
        self._free = [block for block in self._free if block not in taken]
        self.recoverable = recoverable
        self.num_cached = len(recoverable)
        for block in taken:
            self.states[block] = CACHED

    def restore(self, node: CachedBlock) -> None:
        """Let ``node``, a node of the tree, have the recoverable block with its hash, if there is one."""
        if node.block_id(self.number) < 0 and (block := self.recoverable.pop(node.hash, NOWHERE)) >= 0:
            self._enter(node, block)
            self.offer(node)

    def forget_recoverable(self) -> None:
        """Give up the recoverable blocks."""
        for block in self.recoverable.values():
            self._set_free(block)
        self.recoverable.clear()

    def offer(self, node: CachedBlock) -> None:
        """Decide again whether the block of ``node``, if this tier has it, can be evicted, and with which rank."""
        rank = self._rank(node)
        if rank is not None:
            self._evictable.push(node, rank)
            self._evictable.shrink(self.num_blocks - len(self._free))

    def drop(self, node: CachedBlock, reason: LossReason = "evicted") -> None:
        """Forget the content of ``node``, and of its descendants in lower tiers, unless they are pinned there.

        Nodes that lie in no tier then leave the tree.
        """
        if node.children:
            self._drop_below(node, reason)
        lay = self.number
        if node.num_tiers:
            lay = node.nearest_tier
            for tier in self._caches:
                tier.forget(node)
        if not node.num_tiers:
            self.tree.eviction_history.note(node, reason, lay, self.policy, self._evictable.price)
        stays = self.tree.prune(node)
        if self._caches:  # where nothing can go further down, the children of a block are evicted before it
            self._caches[-1].offer(stays)

    def _drop_below(self, node: CachedBlock, reason: LossReason) -> None:
        subtree = [*node.children.values()]
        for found in subtree:  # grows while it is walked: parents come before their children
            subtree += found.children.values()
        for found in reversed(subtree):
            lay = found.nearest_tier
            for tier in self._caches:
                tier.forget(found)
            if lay != NOWHERE and not found.num_tiers:
                self.tree.eviction_history.note(found, reason, lay, self.policy, self._evictable.price)
            if not found.children and not found.num_tiers:
                self.tree.remove(found)

    def _demote(self, node: CachedBlock, copies: list[BlockCopy]) -> bool:
        """Let the nearest tier below that wants it keep the content of ``node``; False: none does.

        Called while this tier still has the node: room made below must not take it out of the tree.
        """
        below = self.below
        while below is not None and not below.take_over(node, self.number, copies):
            below = below.below
        return below is not None

    # ---- watchers ------------------------------------------------------------------------------------

    def _tell_entered(self, node: CachedBlock) -> None:
        for watcher in self.watchers:
            watcher.entered(node, self.number)

    def _tell_left(self, node: CachedBlock) -> None:
        for watcher in self.watchers:
            watcher.left(node, self.number)

    # ---- for the kinds of tiers to override ----------------------------------------------------------

    def _rank(self, node: CachedBlock) -> int | None:
        """The rank at which the block of ``node`` is evicted; None: it does not lie here, or has to stay."""
        raise NotImplementedError

    def _enter(self, node: CachedBlock, block: int) -> None:
        """``block`` has the content of ``node`` from now on."""
        raise NotImplementedError

    def _leave(self, node: CachedBlock) -> None:
        """``node`` does not lie here any more, and its cached block is free."""
        raise NotImplementedError

    def _count_evicted(self, *, kept: bool) -> None:
        """Count a block that was evicted. ``kept``: a tier below has its content."""
        raise NotImplementedError


def _pools_from(tier: Tier | None) -> Iterator[Any]:
    """The tiers with ids among ``tier`` and all tiers below it."""
    while tier is not None:
        if isinstance(tier, Pool):
            yield tier
        tier = tier.below

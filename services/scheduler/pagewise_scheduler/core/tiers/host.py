"""Tiers below the device whose blocks have ids, and whose content is known exactly: host memory."""

from collections.abc import Collection, Iterable, Sequence

from pagewise_shared.protocol import DEVICE, BlockCopies, unpack_int32s

from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.eviction import NEAREST, REDUNDANT, EvictionPolicy
from pagewise_scheduler.core.memory.prefix_tree import NOWHERE, OWNER_SHIFT, CachedBlock, PrefixTree
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.cost_model import TierCosts
from pagewise_scheduler.core.tiers.pool import CACHED, Pool
from pagewise_scheduler.core.tiers.tier import BlockCopy, DemotionPolicy, Location, Tier

MAX_ARRIVING = 1024
"""Blocks that may be on their way to a tier when another prefix is offered to it."""


class HostTier(Pool, Tier):
    """A tier below the device: it holds copies of cached blocks.

    While a tier above has a node as well, its copy here is *redundant*: it may be dropped at no loss, and evicting the
    node above costs no copy. Copies that are the nearest ones are evicted tails first, like blocks on the device.

    With ``max_arriving`` blocks on their way, or where ``demotion`` refuses it, the tier begins no further prefix: the
    blocks that the tier above evicts then go further down, or are lost.
    """

    def __init__(
        self,
        number: int,
        num_blocks: int,
        tree: PrefixTree,
        policy: EvictionPolicy,
        counters: MemoryCounters,
        below: Tier | None,
        costs: TierCosts,
        demotion: DemotionPolicy | None = None,
    ) -> None:
        super().__init__(number, num_blocks, tree, policy, counters, below)
        self.costs = costs
        self.num_arriving = 0
        self.max_arriving = MAX_ARRIVING
        self.demotion = demotion
        self._caches = (self, *self.lower)
        self._no_copies = tree.no_copies
        self._before, self._after = tree.no_copies[:number], tree.no_copies[number + 1 :]
        # How many children of each block's node lie here too; of no interest where nothing can go further down.
        self._num_children = [0] * num_blocks if self.lower else []

    @property
    def memory(self) -> tuple[int, int]:
        """The size of the tier, and its part with content: blocks, or pages if several groups of layers share it."""
        return self.num_blocks, self.num_used

    # ---- copies to this tier -------------------------------------------------------------------------

    def holds(self, node: CachedBlock) -> bool:
        """Whether the tier has the block."""
        return node.copies[self.number] >= 0

    def take_over(self, node: CachedBlock, source: int, copies: list[BlockCopy]) -> bool:
        """Take over a block that ``source`` evicts, as ``Tier`` describes."""
        if node.num_tiers == 1:  # else this tier or a lower one has it already
            # A prefix comes from its end. Once that is here, refusing the blocks before it would make it worthless.
            if not node.children and not self.wants(node):
                return False
            if not self._make_room_for_one(node, copies):
                return False
            block = self._free.pop()
            self.states[block] = CACHED
            self._enter(node, block)
            self.num_cached += 1  # without references: once no tier above has it, it may be evicted
            self.num_arriving += 1
            self._comes(block)
            if source == DEVICE:
                self.counters.demoted += 1
            copies.append((source, node.block_id(source), self.number, block, 0))
        return True

    def _make_room_for_one(self, node: CachedBlock, copies: list[BlockCopy]) -> bool:
        """Have a free block for ``node``; False: none can be evicted."""
        if self._free or self.budgets is None:
            return bool(self._free) or self._give_up_one(copies)
        self.budgets.taker = node.flags >> OWNER_SHIFT
        made = self._give_up_one(copies)
        self.budgets.taker = None
        return made

    def _comes(self, block: int) -> None:
        """A copy to a block is asked for. It may be evicted before it has arrived."""

    def arrived(self, copies: BlockCopies, bad: Collection[int], seconds: float) -> None:
        """Copies to this tier were made, except to the targets ``bad``, whose blocks are not here after all."""
        targets = unpack_int32s(copies.pairs)[1::2]
        count, lost = len(targets), [block for block in targets if block in bad] if bad else []
        self.num_arriving -= count
        self.counters.stored += count - len(lost)
        self.costs.store.observe(seconds, 1, count)
        assert self.num_arriving >= 0
        for block in lost:
            # Another content may have the block by now, and is lost too, which costs no more than time. A block that is
            # being loaded stays: that load finds out.
            node = self._nodes[block]
            if node is not None and node.num_tiers > 1:
                self.forget(node)
            elif node is not None and not self._references[block]:
                self.drop(node)

    # ---- copies from this tier -----------------------------------------------------------------------

    def hold(self, nodes: Iterable[CachedBlock]) -> list[Location]:
        """Keep these blocks here until they are released by ``unhold``."""
        locations = [Location(self, self.number, node.copies[self.number], node) for node in nodes]
        self.pin(location.block for location in locations)
        return locations

    def unhold(self, locations: Iterable[Location]) -> None:
        """Unpin these blocks."""
        self.release(location.block for location in locations)

    def came(
        self, locations: Sequence[Location], bad: Sequence[Location], request: Request | None
    ) -> Iterable[CachedBlock]:
        """Count loaded blocks, and return the nodes of the corrupt ones."""
        self.counters.loaded += len(locations)
        self.counters.corrupt += len(bad)
        # A generator, because the caller drops each node, and that takes others along.
        return (
            location.node
            for location in bad
            if location.node is not None and self.node(location.block) is location.node
        )

    # ---- eviction ------------------------------------------------------------------------------------

    def forget(self, node: CachedBlock) -> None:
        """Give up the copy of ``node``, if there is one and it is not pinned."""
        block = node.copies[self.number]
        if block >= 0 and not self._references[block]:
            self._leave(node)

    def _rank(self, node: CachedBlock) -> int | None:
        number = self.number
        block = node.copies[number]
        if block < 0 or self._references[block]:
            return None
        if node.block >= 0 or (node.num_tiers > 1 and node.nearest_tier < number):
            return REDUNDANT
        # Its children go first: the ones here, or, where nothing can go further down, all of them.
        return None if (self._num_children[block] if self._num_children else node.children) else NEAREST

    def _count_evicted(self, *, kept: bool) -> None:
        self.counters.lower_evicted[self.number] += 1

    def _enter(self, node: CachedBlock, block: int) -> None:
        number, copies = self.number, node.copies
        if copies is self._no_copies:
            node.copies = self._before + (block,) + self._after  # noqa: RUF005 - the faster way
        else:
            node.copies = (*copies[:number], block, *copies[number + 1 :])
        node.num_tiers += 1
        self._nodes[block] = node
        if self._num_children:
            self._num_children[block] = sum(child.copies[number] >= 0 for child in node.children.values())
            assert node.parent is not None
            parent_block = node.parent.copies[number]
            if parent_block >= 0:
                self._num_children[parent_block] += 1
        if self.watchers:
            self._tell_entered(node)

    def _leave(self, node: CachedBlock) -> None:
        """The cached block of ``node`` is free."""
        number, copies = self.number, node.copies
        block = copies[number]
        node.num_tiers -= 1
        if node.num_tiers == (node.block >= 0):
            node.copies = self._no_copies
        else:
            node.copies = (*copies[:number], NOWHERE, *copies[number + 1 :])
        self._set_free(block)
        if self._num_children:
            assert node.parent is not None
            parent_block = node.parent.copies[number]
            if parent_block >= 0:
                self._num_children[parent_block] -= 1
                self.offer(node.parent)
        if self.watchers:
            self._tell_left(node)

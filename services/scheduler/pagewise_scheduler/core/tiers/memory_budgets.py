"""The budgets of an executor's memory: the owners of its blocks, and their budgets in each tier."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import proxy

from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.budgets import Budget, OwnerUse, TierBudgets
from pagewise_scheduler.core.memory.prefix_tree import OWNER_SHIFT, CachedBlock, cache_salt_of
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager

_OTHER_FLAGS = (1 << OWNER_SHIFT) - 1
_MOST_OF_TIER = 2
"""The minima of all owners together are at most one part in this number of a tier."""


class MemoryBudgets:
    """Divides the tiers with ids of one executor, whose model has one group of layers, among owners.

    ``owner_of``: returns the name of the owner of a cache salt. ``longest``: the most tokens of a sequence. ``scaled``:
    the tiers in which the minima were too large together and were made smaller, all by the same factor.

    It watches the tiers' blocks. A block that enters, leaves, is pinned or released costs O(1), besides the queues.
    """

    def __init__(self, kv: KVCacheManager, owner_of: Callable[[str | None], str], longest: int) -> None:
        self._kv: KVCacheManager = proxy(kv)  # with a cycle, the memory of a lost executor would stay for a while
        self._owner_of, self._longest = owner_of, longest
        self._numbers: dict[str, int] = {}
        self._budgets: dict[int, list[Budget]] = {}  # by tier, then by the number of the owner
        self._tiers: dict[int, TierBudgets] = {}
        self.scaled: frozenset[int] = frozenset()
        kv.watchers.append(self)
        self._attach()

    # ---- budgets -------------------------------------------------------------------------------------

    def try_set(self, budgets: Mapping[str, Mapping[int, Budget]], num_owed: int) -> bool:
        """Replace the budgets of all owners, and return True. Return False if that would take back promised blocks.

        ``budgets``: by the name of the owner, and by tier; an owner that is missing has no budget. ``num_owed``: the
        number of blocks of the device that have to stay available. No live request may be longer than ``capacity_of``
        these budgets.
        """
        self._adopt_new(budgets)
        fitting, scaled = self._fitting(budgets)
        device, pool = self._tiers[DEVICE], self._kv.pool
        protected = sum(device.protected_by(number, budget) for number, budget in enumerate(fitting[DEVICE]))
        if pool.num_free + pool.num_cached - protected < num_owed:
            return False
        self.scaled, self._budgets = scaled, fitting
        self._kv.capacity_tokens = self.capacity_of(budgets)
        for tier, each in fitting.items():
            for number, budget in enumerate(each):
                self._tiers[tier].set(number, budget)
        return True

    def capacity_of(self, budgets: Mapping[str, Mapping[int, Budget]]) -> int:
        """The most tokens of a sequence that has the device to itself, beside the minima."""
        self._adopt_new(budgets)
        minima = sum(budget.min for budget in self._fitting(budgets)[0][DEVICE])
        return (self._kv.pool.num_blocks - minima) * self._kv.block_size

    def uses(self) -> Iterable[tuple[str, int, OwnerUse]]:
        """Yield the use of each tier by each owner, as the owner's name, the tier and the use."""
        for owner, number in self._numbers.items():
            for tier, budgets in self._tiers.items():
                yield owner, tier, budgets.uses[number]

    def _fitting(self, budgets: Mapping[str, Mapping[int, Budget]]) -> tuple[dict[int, list[Budget]], frozenset[int]]:
        """The budgets by tier and by the number of the owner, with minima that fit, and the tiers with scaled minima.

        A request of the longest length has to fit beside the minima. Otherwise it would wait for ever.
        """
        fitting, scaled = dict[int, list[Budget]](), set[int]()
        for tier, pool in self._kv.tiers.items():
            each = [Budget(), *(budgets.get(owner, {}).get(tier, Budget()) for owner in self._numbers)]
            most, total = pool.num_blocks // _MOST_OF_TIER, sum(budget.min for budget in each)
            if tier == DEVICE:
                most = min(most, max(0, pool.num_blocks - self._kv.blocks_for(self._longest)))
            if total > most:
                scaled.add(tier)
                each = [budget._replace(min=budget.min * most // total) for budget in each]
            fitting[tier] = each
        return fitting, frozenset(scaled)

    # ---- owners --------------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Count the blocks of tiers that have no budgets yet."""
        kv = self._kv
        kv.pool.tree.owner_of = self._number_of
        self._tiers = {number: pool.divide(TierBudgets) for number, pool in kv.tiers.items()}
        for tier, budgets in self._tiers.items():
            known = self._budgets.get(tier, [])
            for number in self._numbers.values():  # an owner has none yet whose budgets could not be set
                budgets.add(known[number] if number < len(known) else Budget())
        self._tiers[DEVICE].on_rebuilt = self._attach
        roots = kv.pool.tree.roots
        for node in _below(roots):
            for tier, budgets in self._tiers.items():
                if (block := node.block_id(tier)) >= 0:
                    budgets.entered(node, block)
        self._adopt(roots)

    def _adopt_new(self, owners: Iterable[str]) -> None:
        """Give numbers to new owners."""
        new = [owner for owner in owners if owner not in self._numbers]
        for owner in new:
            self._numbers[owner] = len(self._numbers) + 1
            for budgets in self._tiers.values():
                budgets.add(Budget())
        if new:
            self._adopt([one for one in self._kv.pool.tree.roots if self._owner_of_root(one) in new])

    def _adopt(self, roots: Sequence[CachedBlock]) -> None:
        """Assign the blocks below these roots to the owners of their cache salts."""
        tiers = self._kv.tiers
        for root in roots:
            number = self._numbers.get(self._owner_of_root(root), 0)
            for node in (root, *_below([root])):
                for tier, budgets in self._tiers.items():
                    if (block := node.block_id(tier)) >= 0:
                        budgets.moves(node, block, number)
                node.flags = node.flags & _OTHER_FLAGS | number << OWNER_SHIFT
                for pool in tiers.values() if node is not root else ():
                    pool.offer(node)

    def _owner_of_root(self, root: CachedBlock) -> str:
        return self._owner_of(cache_salt_of(root))

    def _number_of(self, cache_salt: str | None) -> int:
        return self._numbers.get(self._owner_of(cache_salt), 0)

    # ---- watching ------------------------------------------------------------------------------------

    def entered(self, node: CachedBlock, tier: int) -> None:
        """Count the block."""
        self._tiers[tier].entered(node, node.block_id(tier))

    def left(self, node: CachedBlock, tier: int) -> None:
        """Count the block no more."""
        self._tiers[tier].left(node)

    def used(self, nodes: Sequence[CachedBlock]) -> None:
        """Nothing to count: the blocks are counted when they are pinned."""

    def all_gone(self) -> None:
        """Count nothing more in these tiers."""
        self._tiers = {}


def _below(roots: Iterable[CachedBlock]) -> list[CachedBlock]:
    """All blocks below these roots, parents before children."""
    nodes = [child for root in roots for child in root.children.values()]
    for node in nodes:  # grows while it is walked
        nodes += node.children.values()
    return nodes

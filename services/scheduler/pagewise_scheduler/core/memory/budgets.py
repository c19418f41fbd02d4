"""Budgets in one tier, as control groups of Linux have them: ``memory.min``, ``memory.low`` and ``memory.high``.

The *owner* of a block is the API key, or the group of keys, whose cache salt its prefix has. A tier whose owners have
budgets evicts by these rules, in this order:

- Blocks of an owner that uses at most its ``min`` are not evicted.
- Blocks of owners that use more than their ``high`` are evicted first. Blocks of owners that use at most their ``low``
  are evicted last.
- Then rank and value decide, as in a tier without budgets (see ``eviction``).

Source: "Control Group v2" of the Linux kernel's documentation, section "Memory Interface Files".
"""

import heapq
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pagewise_scheduler.core.memory.eviction import EvictionPolicy
from pagewise_scheduler.core.memory.eviction_queue import EvictionQueue
from pagewise_scheduler.core.memory.prefix_tree import OWNER_SHIFT, CachedBlock

_POPS_BETWEEN_LOOKS = 128
_ABOVE_HIGH, _USUAL, _UP_TO_LOW = range(3)


class Budget(NamedTuple):
    """The budget of one owner in one tier, in blocks. ``high``: None is no bound."""

    min: int = 0
    low: int = 0
    high: int | None = None


class OwnerUse:
    """Counts the blocks of one owner in one tier whose content is known: ``cached`` blocks, and blocks ``in_use``.

    ``protected``: the number of cached blocks that the budget protects from eviction. ``queue``: the cached blocks that
    may be evicted, as far as the budget allows. ``version``: rises with each change.
    """

    __slots__ = ("budget", "cached", "in_use", "protected", "queue", "version")

    def __init__(self, queue: EvictionQueue[CachedBlock], budget: Budget) -> None:
        self.queue, self.budget = queue, budget
        self.cached = self.in_use = self.protected = self.version = 0

    @property
    def used(self) -> int:
        """All blocks of the owner."""
        return self.cached + self.in_use

    @property
    def urgency(self) -> int:
        """The owner with the lowest urgency gives up its blocks first."""
        _, low, high = self.budget
        if high is not None and self.used > high:
            return _ABOVE_HIGH
        return _UP_TO_LOW if self.used <= low else _USUAL


class TierBudgets:
    """The uses of a tier by all owners, and the queue of its evictable blocks: an ``EvictionQueue`` for each owner.

    ``uses``: by the number of the owner; number 0 is the number of all owners without budgets. ``num_protected``: the
    number of cached blocks that no request may evict. They do not count as available, not even to their owner: the
    owner gets blocks as other owners do, and its cached blocks may be evicted again as soon as it uses more than its
    minimum. So the number of available blocks is the same for every request. ``price``: see ``EvictionQueue``.
    ``taker``: the owner for whose block room is made in a tier below the device. It may evict its own protected blocks,
    because it uses as many blocks afterwards. ``on_rebuilt``: called when an empty tier without budgets has replaced
    this tier.
    """

    def __init__(
        self, policy: EvictionPolicy, rank_of: Callable[[CachedBlock], int | None], states: bytearray, cached: int
    ) -> None:
        """``states``: the states of the tier's blocks. ``cached``: the state of a cached block."""
        self._policy, self._rank_of = policy, rank_of
        self._states, self._cached_state = states, cached
        self.uses: list[OwnerUse] = []
        self.num_protected = 0
        self.price = 0.0
        self.taker: int | None = None
        self.on_rebuilt: Callable[[], None] = lambda: None
        self._changed: set[int] = set()
        self._heap: list[tuple[int, int, float, int, int]] = []  # urgency, rank, value, owner, version
        self._until_look = _POPS_BETWEEN_LOOKS
        self.add(Budget())

    # ---- budgets -------------------------------------------------------------------------------------

    def add(self, budget: Budget) -> None:
        """Add an owner, which has no blocks yet."""
        number = len(self.uses)
        self.uses.append(OwnerUse(EvictionQueue[CachedBlock](self._policy, partial(self._rank, number)), budget))

    def set(self, number: int, budget: Budget) -> None:
        """Give an owner another budget."""
        self.uses[number].budget = budget
        self._count(number, 0, 0)

    def protected_by(self, number: int, budget: Budget) -> int:
        """How many cached blocks of an owner ``budget`` would protect now."""
        use = self.uses[number]
        return max(0, min(budget.min - use.in_use, use.cached))

    def _rank(self, number: int, node: CachedBlock) -> int | None:
        return self._rank_of(node) if node.flags >> OWNER_SHIFT == number else None

    # ---- counts --------------------------------------------------------------------------------------

    def _count(self, number: int, cached: int, in_use: int) -> None:
        use = self.uses[number]
        use.cached += cached
        use.in_use += in_use
        protected = max(0, min(use.budget.min - use.in_use, use.cached))
        self.num_protected += protected - use.protected
        use.protected = protected
        self._changed.add(number)

    def entered(self, node: CachedBlock, block: int) -> None:
        """The tier has ``node`` from now on, in ``block``."""
        cached = self._states[block] == self._cached_state
        self._count(node.flags >> OWNER_SHIFT, cached, not cached)

    def left(self, node: CachedBlock) -> None:
        """A cached block left the tier."""
        self._count(node.flags >> OWNER_SHIFT, -1, 0)

    def pinned(self, node: CachedBlock) -> None:
        """A cached block is in use from now on."""
        self._count(node.flags >> OWNER_SHIFT, -1, 1)

    def released(self, node: CachedBlock) -> None:
        """A block in use is cached from now on."""
        self._count(node.flags >> OWNER_SHIFT, 1, -1)

    def moves(self, node: CachedBlock, block: int, number: int) -> None:
        """``block`` of ``node`` is about to belong to another owner."""
        cached = self._states[block] == self._cached_state
        self._count(node.flags >> OWNER_SHIFT, -cached, cached - 1)
        self._count(number, cached, not cached)

    def more_protected(self, node: CachedBlock, num_released: int) -> int:
        """By how much ``num_protected`` rises if ``num_released`` blocks of the owner of ``node`` are released.

        A negative ``num_released`` is a number of cached blocks that are pinned.
        """
        use = self.uses[node.flags >> OWNER_SHIFT]
        left = use.in_use - num_released
        return max(0, min(use.budget.min - left, use.cached + num_released)) - use.protected

    # ---- the queue -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Hold neither blocks nor the tier any more."""
        for use in self.uses:
            use.queue.close()
        self._heap.clear()
        self._rank_of = _never

    def push(self, block: CachedBlock, rank: int) -> None:
        """A block may be evicted from now on, as far as budgets allow."""
        number = block.flags >> OWNER_SHIFT
        self.uses[number].queue.push(block, rank)
        self._changed.add(number)

    def pop(self) -> CachedBlock | None:
        """Take the block to evict first; None: no block may be evicted."""
        number = self._first()
        if number is None and (number := self.taker) is None:
            return None
        use = self.uses[number]
        block = use.queue.pop()
        self.price = use.queue.price
        self._changed.add(number)
        self._until_look -= 1
        if not self._until_look:  # values change with time
            self._until_look = _POPS_BETWEEN_LOOKS
            self._changed.update(range(len(self.uses)))
        return block

    def peek(self) -> CachedBlock | None:
        """The block to evict first, without taking it; None: no block may be evicted."""
        number = self._first()
        return None if number is None else self.uses[number].queue.peek()

    def first(self, count: int) -> list[CachedBlock]:
        """The blocks to evict first at present, at most ``count``, approximately as ``EvictionQueue.first``."""
        found = [
            (use.urgency, self._rank_of(block) or 0, self._policy.value(block), number, place, block)
            for number, use in enumerate(self.uses)
            for place, block in enumerate(use.queue.first(min(count, use.cached - use.protected)))
        ]
        return [entry[-1] for entry in heapq.nsmallest(count, found, key=lambda entry: entry[:-1])]

    def shrink(self, num_evictable: int) -> None:
        """Drop stale entries, so that the queues stay in proportion to the tier."""
        for use in self.uses:
            use.queue.shrink(use.cached)

    def _first(self) -> int | None:
        """The owner of the block to evict first."""
        heap, uses = self._heap, self.uses
        if len(heap) > 64 + 4 * len(uses):
            heap.clear()
            self._changed.update(range(len(uses)))
        for number in self._changed:
            use = uses[number]
            use.version += 1
            if use.cached > use.protected and (block := use.queue.peek()) is not None:
                rank = self._rank_of(block) or 0
                heapq.heappush(heap, (use.urgency, rank, self._policy.value(block), number, use.version))
        self._changed.clear()
        while heap and heap[0][4] != uses[heap[0][3]].version:
            heapq.heappop(heap)
        return heap[0][3] if heap else None


def _never(block: CachedBlock) -> int | None:
    """Return no rank: a block may not be evicted."""

"""Device memory that several groups of layers share: pages, of which a block of each group takes a fixed number.

No share is fixed ahead. A block takes any free pages; if too few are free, the group whose next victim is worth the
least per page gives it up.
"""

from collections.abc import Callable
from typing import Protocol

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.pool import OutOfBlocksError
from pagewise_scheduler.core.tiers.tier import BlockCopy, Copies


class Member(Protocol):
    """A group's blocks in the arena. ``num_used``: blocks that hold something; ``num_cached``: those that may go."""

    pages_per_block: int

    @property
    def num_used(self) -> int:
        """Blocks that hold something, whether it is in use or not."""
        ...

    @property
    def num_cached(self) -> int:
        """Blocks without users, which are evicted for others."""
        ...

    def next_value(self) -> float | None:
        """The value of a page of the next victim; None: the group has none."""
        ...

    def give_up(self, copies: list[BlockCopy]) -> bool:
        """Evict the next victim; False: there is none. ``copies``: the list to which copies are added that keep its
        content."""
        ...


class Arena:
    """``num_pages`` pages, which the blocks of all ``members`` share."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.members: list[Member] = []

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self.num_pages - sum(one.num_used * one.pages_per_block for one in self.members)

    @property
    def num_available(self) -> int:
        """Pages that can be taken: free ones, and pages of cached blocks, which are evicted for it."""
        return self.num_pages - sum((one.num_used - one.num_cached) * one.pages_per_block for one in self.members)

    def make_room(self, num_pages: int) -> Copies:
        """Evict until ``num_pages`` are free. Returns the copies that keep evicted content.

        Raises:
            OutOfBlocksError: there are fewer; nothing was evicted.
        """
        if num_pages > self.num_available:
            raise OutOfBlocksError(f"{num_pages} pages asked for, {self.num_available} of {self.num_pages} available")
        copies: list[BlockCopy] = []
        while self.num_free < num_pages:
            values = [
                (value, number) for number, one in enumerate(self.members) if (value := one.next_value()) is not None
            ]
            if not values or not self.members[min(values)[1]].give_up(copies):
                raise OutOfBlocksError(f"{num_pages} pages asked for, of which only {self.num_free} could be freed")
        return copies


class SharedBlockPool(BlockPool):
    """The blocks of full layers in an arena: a free block holds no pages."""

    arena: Arena
    pages_per_block: int
    forget: Callable[[CachedBlock], None]

    def share(self, arena: Arena, pages_per_block: int, forget: Callable[[CachedBlock], None]) -> None:
        """Take the pages from ``arena``. ``forget``: is called with a node whose block has left."""
        self.arena, self.pages_per_block, self.forget = arena, pages_per_block, forget
        arena.members.append(self)

    def _leave(self, node: CachedBlock) -> None:
        super()._leave(node)
        self.forget(node)

    @property
    def num_available(self) -> int:
        """Blocks that ``reserve`` can hand out."""
        return min(super().num_available, self.arena.num_available // self.pages_per_block)

    def reserve(self, count: int) -> tuple[list[int], Copies]:
        """Take ``count`` blocks as ``Pool`` does, and the pages for them from all groups."""
        copies = self.arena.make_room(count * self.pages_per_block) if count else ()
        blocks, further = super().reserve(count)
        return blocks, [*copies, *further]

    def next_value(self) -> float | None:
        """The value of a page of the next victim."""
        if self.recoverable:
            return 0.0
        node = self.next_evicted()
        return None if node is None else self.policy.value(node) / self.pages_per_block

    def give_up(self, copies: list[BlockCopy]) -> bool:
        """Evict the next victim."""
        return self._give_up_one(copies)

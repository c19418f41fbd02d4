"""Device memory that several groups of layers share: pages, of which a block of each group takes a fixed number.

No share is fixed ahead. A block takes any free pages; if too few are free, the group whose next victim is worth the
least per page gives it up.

The executor chooses the pages of a block when a plan names the block first. A freed block keeps its pages, and is taken
again before ids without pages. Only when a group needs pages that free blocks of another group keep, such blocks lose
them (they are *unmapped*), and the plan says so.
"""

from collections.abc import Callable
from typing import Protocol

from pagewise_shared.block_hash import BlockHash

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.pool import OutOfBlocksError
from pagewise_scheduler.core.tiers.tier import BlockCopy, Copies


class Member(Protocol):
    """A group's blocks in the arena. ``num_used``: blocks that hold something; ``num_cached``: those that may go.

    ``num_unmapped``: ids without pages. All of them are free, and are taken after the other free ones.
    """

    pages_per_block: int
    num_blocks: int
    num_unmapped: int

    @property
    def num_used(self) -> int:
        """Blocks that hold something, whether it is in use or not."""
        ...

    @property
    def num_cached(self) -> int:
        """Blocks without users, which are evicted for others."""
        ...

    def unmap(self) -> int:
        """Take the pages from a free block that has some, and return it."""
        ...

    def next_value(self) -> float | None:
        """The value of a page of the next victim; None: the group has none."""
        ...

    def give_up(self, copies: list[BlockCopy]) -> bool:
        """Evict the next victim; False: there is none. ``copies``: the list to which copies are added that keep its
        content."""
        ...


class Arena:
    """``num_pages`` pages, which the blocks of all ``members`` share. A group's number is its index there.

    ``unmapped``: groups and blocks that lost their pages since the last plan.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.members: list[Member] = []
        self.unmapped: dict[tuple[int, int], None] = {}

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

    def take(self, taker: Member, count: int) -> Copies:
        """Make room for ``count`` blocks of a group, and let the free ones that it takes next have pages.

        Raises:
            OutOfBlocksError: there are fewer; nothing was evicted.
        """
        copies = self.make_room(count * taker.pages_per_block)
        taker.num_unmapped = min(taker.num_unmapped, taker.num_blocks - taker.num_used - count)
        lacking = sum((one.num_blocks - one.num_unmapped) * one.pages_per_block for one in self.members)
        lacking -= self.num_pages
        others = [(number, one) for number, one in enumerate(self.members) if one is not taker]
        while lacking > 0:
            number, one = max(others, key=lambda other: _num_kept(other[1]))
            self.unmapped[number, one.unmap()] = None
            lacking -= one.pages_per_block
        return copies


def _num_kept(member: Member) -> int:
    """Pages that free blocks of a group keep."""
    return (member.num_blocks - member.num_used - member.num_unmapped) * member.pages_per_block


class SharedBlockPool(BlockPool):
    """The blocks of full layers in an arena: a free block holds no pages."""

    arena: Arena
    pages_per_block: int
    num_unmapped: int
    forget: Callable[[CachedBlock], None]

    def share(self, arena: Arena, pages_per_block: int, forget: Callable[[CachedBlock], None]) -> None:
        """Take the pages from ``arena``. ``forget``: is called with a node whose block has left."""
        self.arena, self.pages_per_block, self.forget = arena, pages_per_block, forget
        self.num_unmapped = self.num_blocks
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
        if not count:
            return [], ()
        copies = self.arena.take(self, count)
        return super().reserve(count)[0], copies

    def expect(self, recoverable: dict[BlockHash, int]) -> None:
        """Expect blocks as ``Pool`` does. They have kept their pages, and no others have."""
        super().expect(recoverable)
        self.num_unmapped = self.num_free

    def unmap(self) -> int:
        """Take the pages from the block that has been free for the longest time."""
        self.num_unmapped += 1
        return self._free[self.num_unmapped - 1]

    def next_value(self) -> float | None:
        """The value of a page of the next victim."""
        if self.recoverable:
            return 0.0
        node = self.next_evicted()
        return None if node is None else self.policy.value(node) / self.pages_per_block

    def give_up(self, copies: list[BlockCopy]) -> bool:
        """Evict the next victim."""
        return self._give_up_one(copies)

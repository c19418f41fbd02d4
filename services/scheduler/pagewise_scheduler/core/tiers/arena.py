"""Memory of a tier that several groups of layers share: pages, of which a block of each group takes a fixed number.

No share is fixed ahead. A block takes any free pages; if too few are free, the group whose next victim is worth the
least per page gives it up.

The executor chooses the pages of a block when a plan names the block first. A freed block keeps its pages, and is taken
again before ids without pages. Only when a group needs pages that free blocks of another group keep, such blocks lose
them (they are *unmapped*), and the plan lists them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import BlockCopies, GroupKind, unpack_int32s

from pagewise_scheduler.core.memory.eviction import NEAREST, REDUNDANT, SHIELDED, EvictionPolicy
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.host import HostTier
from pagewise_scheduler.core.tiers.pool import OutOfBlocksError, Pool
from pagewise_scheduler.core.tiers.tier import BlockCopy, Copies, Location

if TYPE_CHECKING:
    from pagewise_scheduler.core.tiers.snapshots import SnapshotPool


class WindowShape(NamedTuple):
    """A group of windowed layers.

    ``window``: tokens that a query sees, itself included; if ``chunked``, tokens of a chunk. ``pages_per_block``: pages
    that a block takes. ``state``: the layers are recurrent, and a block has their states behind a token.
    """

    window: int
    pages_per_block: int
    chunked: bool = False
    state: bool = False

    @property
    def kind(self) -> GroupKind:
        """The kind of content of its blocks."""
        return "state" if self.state else "chunk" if self.chunked else "window"


@dataclass(slots=True, frozen=True)
class ArenaShape:
    """The device memory of a model with several groups: ``num_pages`` pages, of which a block of the full layers takes
    ``pages_per_block``. ``most_tokens``: most tokens of a sequence that steps in flight compute at the same time.
    ``latent``: the blocks of the full layers have latents."""

    num_pages: int
    pages_per_block: int
    windows: tuple[WindowShape, ...]
    most_tokens: int
    latent: bool = False

    @property
    def kinds(self) -> tuple[GroupKind, ...]:
        """The kind of content of each group's blocks, by the group's number on the wire."""
        return ("latent" if self.latent else "full", *(one.kind for one in self.windows))


class Member(Protocol):
    """A group's blocks in the arena. ``num_used``: blocks with content; ``num_cached``: the evictable blocks of these.

    ``num_unmapped``: ids without pages. All of them are free, and are taken after the other free ones.
    """

    pages_per_block: int
    num_blocks: int
    num_unmapped: int

    @property
    def num_used(self) -> int:
        """Blocks with content, in use or cached."""
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

    def next_value(self) -> float:
        """The value of each page that is evicted next; 0 if none can be."""
        value = min((value for one in self.members if (value := one.next_value()) is not None), default=inf)
        return value if value < inf else 0.0

    def make_room(self, num_pages: int, copies: list[BlockCopy]) -> bool:
        """Evict until ``num_pages`` are free; False: there are fewer.

        ``copies``: the list to which copies are added that keep evicted content.
        """
        if num_pages > self.num_available:
            return False
        while self.num_free < num_pages:
            values = [
                (value, number) for number, one in enumerate(self.members) if (value := one.next_value()) is not None
            ]
            if not values or not self.members[min(values)[1]].give_up(copies):
                return False  # below the device, children of evictable blocks may be pinned
        return True

    def take(self, taker: Member, count: int) -> Copies:
        """Make room for ``count`` blocks of a group, and let the free ones that it takes next have pages.

        Raises:
            OutOfBlocksError: there are fewer; on the device nothing was evicted.
        """
        copies: list[BlockCopy] = []
        if not self.try_take(taker, count, copies):
            pages = count * taker.pages_per_block
            raise OutOfBlocksError(f"{pages} pages asked for, {self.num_available} of {self.num_pages} available")
        return copies

    def try_take(self, taker: Member, count: int, copies: list[BlockCopy]) -> bool:
        """Do the same if there is room, and return whether there is. Copies are added to ``copies``."""
        if not self.make_room(count * taker.pages_per_block, copies):
            return False
        taker.num_unmapped = min(taker.num_unmapped, taker.num_blocks - taker.num_used - count)
        lacking = sum((one.num_blocks - one.num_unmapped) * one.pages_per_block for one in self.members)
        lacking -= self.num_pages
        others = [(number, one) for number, one in enumerate(self.members) if one is not taker]
        while lacking > 0:
            number, one = max(others, key=lambda other: _num_kept(other[1]))
            self.unmapped[number, one.unmap()] = None
            lacking -= one.pages_per_block
        return True


def _num_kept(member: Member) -> int:
    """Pages that free blocks of a group keep."""
    return (member.num_blocks - member.num_used - member.num_unmapped) * member.pages_per_block


def per_page(policy: EvictionPolicy, value: float, num_pages: int) -> float:
    """The value of each of ``num_pages`` that are evicted together: a share of their saving, or their last use."""
    return value / num_pages if policy.learns else value


class _Shared(Pool):
    """The blocks of full layers of one tier, in an arena: a free block holds no pages.

    The last blocks of a path are of no use without the windows behind them, and these are of none without the blocks.
    So they go together: the value of a snapshot counts the pages of both, and the blocks follow it.

    ``forget_snapshots``: is called with a node that has left its last tier. ``can_begin``: whether any tier has the
    windows at the end of a node. ``snapshots``: the tier's pools of the groups of windowed layers.
    """

    arena: Arena
    pages_per_block: int
    num_unmapped: int
    forget_snapshots: Callable[[CachedBlock], None]
    can_begin: Callable[[CachedBlock], bool]
    snapshots: "Sequence[SnapshotPool]" = ()

    def share(
        self,
        arena: Arena,
        pages_per_block: int,
        forget_snapshots: Callable[[CachedBlock], None],
        can_begin: Callable[[CachedBlock], bool],
    ) -> None:
        """Take the pages from ``arena``."""
        self.arena, self.pages_per_block = arena, pages_per_block
        self.forget_snapshots, self.can_begin = forget_snapshots, can_begin
        self.num_unmapped = self.num_blocks
        arena.members.append(self)

    def _leave(self, node: CachedBlock) -> None:
        super()._leave(node)
        if not node.num_tiers:
            self.forget_snapshots(node)

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
        if (node := self.next_evicted()) is None:
            return None
        if (rank := self._rank(node)) != NEAREST:
            return inf if rank == SHIELDED else 0.0
        return per_page(self.policy, self.policy.value(node), self.pages_per_block)

    def _rank(self, node: CachedBlock) -> int | None:
        if (rank := super()._rank(node)) != NEAREST:
            return rank
        if any(node in one.at for one in self.snapshots):
            return SHIELDED
        return NEAREST if self.can_begin(node) else REDUNDANT

    def give_up(self, copies: list[BlockCopy]) -> bool:
        """Evict the next victim."""
        return self._give_up_one(copies)


class SharedBlockPool(_Shared, BlockPool):
    """The device's blocks of full layers."""


class SharedHostTier(_Shared, HostTier):
    """The blocks of full layers in host memory. Prefixes go there from a block on behind which sequences can begin."""

    @property
    def memory(self) -> tuple[int, int]:
        """Pages of the tier, and pages with content."""
        return self.arena.num_pages, self.arena.num_pages - self.arena.num_free

    def take_over(self, node: CachedBlock, source: int, copies: list[BlockCopy]) -> bool:
        """Take over a block that ``source`` evicts, if a hit can use it."""
        return bool(node.children or self.can_begin(node)) and super().take_over(node, source, copies)

    def _comes(self, block: int) -> None:
        """A copy to a block is asked for: it stays in use until it has arrived, so that its pages get nothing else."""
        self.pin((block,))

    def _make_room_for_one(self, node: CachedBlock, copies: list[BlockCopy]) -> bool:
        return self.arena.try_take(self, 1, copies)

    def arrived(self, copies: BlockCopies, bad: Collection[int], seconds: float) -> None:
        """Copies to this tier were made: their targets may be evicted from now on."""
        targets = unpack_int32s(copies.pairs)[1::2].tolist()
        if copies.group:  # a block of a snapshot that is not here is noticed when it is loaded
            self.counters.stored += sum(block not in bad for block in targets)
            self.snapshots[copies.group - 1].release(targets)
        else:
            self.release(targets)
            super().arrived(copies, bad, seconds)

    def unhold(self, locations: Iterable[Location]) -> None:
        """Unpin these blocks, which are of any group."""
        for location in locations:
            pool = self.snapshots[location.group - 1] if location.group else self
            pool.release((location.block,))

    def came(
        self, locations: Sequence[Location], bad: Sequence[Location], request: Request | None
    ) -> Iterable[CachedBlock]:
        """Count loaded blocks, and return the nodes of the corrupt ones. A snapshot with a corrupt block is dropped."""
        if not (group := locations[0].group):
            return super().came(locations, bad, request)
        self.counters.loaded += len(locations)
        self.counters.corrupt += len(bad)
        self.tree.eviction_history.reason = "corrupt"
        for location in bad:
            assert location.node is not None
            self.snapshots[group - 1].spoilt(location.node)
        self.tree.eviction_history.reason = "evicted"
        return ()

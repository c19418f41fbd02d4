"""Eviction policies, and the queue of evictable blocks that they order."""

import heapq
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock

if TYPE_CHECKING:
    from pagewise_scheduler.core.memory.use_history import UseHistory

PREEMPTED, TOOL_CALL, BATCH, RETAINED_MINUTES, RETAINED_HOURS, RETAINED_DAYS = range(7, 13)
"""Endings that predict the next use better than the length of the answer, which has lower numbers: see ``ending``."""
NUM_ENDINGS = 13
MOST_USES = 4
"""Uses of a block that its class counts."""
CLASSES_PER_USE = 2 * NUM_ENDINGS
NUM_BLOCK_CLASSES = (MOST_USES + 1) * CLASSES_PER_USE

_HOURS, _DAYS = 900.0, 4 * 3600.0
"""Seconds from which on a retention is one of hours, or of days."""


def ending(num_output_tokens: int, *, retention: float = 0.0, tool_call: bool = False, priority: int = 0) -> int:
    """The class of the end of one use of a prefix, which predicts the next use.

    A hint of the client or of the protocol counts more than the length of the answer, which distinguishes people who
    read from programs that ask for one word. A tool's result follows the prefix that called the tool, and a sequence
    that was ``PREEMPTED`` comes back. ``retention``: seconds for which the client wants the prefix kept; 0: no hint.
    ``priority``: of the request; late requests mostly belong to a batch.
    """
    if retention > 0:
        return RETAINED_MINUTES + (retention >= _HOURS) + (retention >= _DAYS)
    if tool_call:
        return TOOL_CALL
    return BATCH if priority > 0 else min(num_output_tokens.bit_length() // 2, PREEMPTED - 1)


REDUNDANT, NEAREST, SHIELDED = range(3)
"""The ranks of evictable blocks. Redundant ones are lost at no cost: a higher tier has the content as well, or no hit
can use it. Else this is the highest tier that has it. Shielded blocks stay as long as the snapshot behind them."""


class Evictable(Protocol):
    """Memory that is evicted as a unit. ``last_used``: the tick of its last release. ``kind``: a class that predicts
    its next use."""

    last_used: int
    kind: int


EvictableT = TypeVar("EvictableT", bound=Evictable)
_ContraT = TypeVar("_ContraT", contravariant=True)


class Ordering(Protocol[_ContraT]):
    """The part of ``EvictionPolicy`` that a queue needs."""

    def group(self, block: _ContraT) -> int:
        """See ``EvictionPolicy.group``."""
        ...

    def order(self, block: _ContraT) -> float:
        """See ``EvictionPolicy.order``."""
        ...

    def value(self, block: _ContraT) -> float:
        """See ``EvictionPolicy.value``."""
        ...


class EvictionPolicy(Protocol):
    """Orders blocks that may be evicted. ``learns``: whether it wants to hear of uses.

    Blocks of one group are evicted in an order that does not change while they wait. The group whose first block has
    the lowest value at that time gives up this block next.
    """

    learns: bool

    @property
    def now(self) -> int:
        """The newest tick."""
        ...

    def tick(self) -> int:
        """The time of a release, ``last_used`` of the released blocks. It never decreases."""
        ...

    def group(self, block: CachedBlock) -> int:
        """The group of a block that may be evicted from now on."""
        ...

    def order(self, block: CachedBlock) -> float:
        """Its place within the group; the lowest is evicted first."""
        ...

    def value(self, block: CachedBlock, use: Evictable | None = None) -> float:
        """The value of the first block of a group now; the group with the lowest value gives up its first block.

        ``use``: whose class and last use count, if not the block's: a snapshot at its end.
        """
        ...

    def value_of_new(self, place: int, depth: int) -> float:
        """The ``value`` of the block at ``depth`` with a snapshot that is taken at a place now (see ``roles``)."""
        ...

    def probability(self, block: CachedBlock) -> float:
        """How likely the block is used again, 0 to 1, as far as is known."""
        ...

    def used(self, blocks: Iterable[CachedBlock], ending: int) -> None:
        """A sequence lets go of ``blocks``, in order; ``ending``: how this use of them ended."""
        ...

    def role(self, key: int) -> int:
        """The role that a snapshot has, or had when it was lost (see ``roles``); 0: none is remembered. ``key``: of the
        snapshot."""
        ...

    def lives(self, key: int, role: int, *, returned: bool) -> None:
        """A snapshot has a role from now on; ``returned``: because a sequence began with it, or would have done so."""
        ...


class LeastRecentlyUsed:
    """LRU: evicts by the tick of the last release. ``now``: the newest tick."""

    learns = False

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> int:
        """One more than before."""
        self.now += 1
        return self.now

    def group(self, block: CachedBlock) -> int:
        """All blocks are in one group."""
        return 0

    def order(self, block: CachedBlock) -> float:
        """The tick."""
        return block.last_used

    def value(self, block: CachedBlock, use: Evictable | None = None) -> float:
        """The tick."""
        return (use or block).last_used

    def value_of_new(self, place: int, depth: int) -> float:
        """The tick."""
        return self.now

    def probability(self, block: CachedBlock) -> float:
        """Nothing is known."""
        return 0.5

    def used(self, blocks: Iterable[CachedBlock], ending: int) -> None:
        """Nothing to remember: the tick is the block's own."""

    def role(self, key: int) -> int:
        """None is remembered."""
        return 0

    def lives(self, key: int, role: int, *, returned: bool) -> None:
        """Nothing to remember."""


class CostAware:
    """Evicts by hit density: a block's expected uses per unit of time (see ``UseHistory``), times the seconds that each
    use saves.

    All blocks have the same size, so the blocks that save the most seconds per unit of time stay.
    ``seconds(depth, tier)``: the time of the cheapest recovery if the tier loses the block at that depth.
    """

    learns = True

    def __init__(self, seconds: Callable[[int, int], float], history: "UseHistory") -> None:
        self._seconds = seconds
        self._history = history

    @property
    def now(self) -> int:
        """The blocks that have come into the caches so far."""
        return self._history.now

    def tick(self) -> int:
        """The blocks that have come into the caches so far."""
        return self._history.now

    def group(self, block: CachedBlock) -> int:
        """Its class."""
        return block.kind

    def order(self, block: CachedBlock) -> float:
        """The tick of its last release."""
        return block.last_used

    def value(self, block: CachedBlock, use: Evictable | None = None) -> float:
        """The seconds that keeping the block saves, per unit of time (one block that comes into the caches)."""
        use = use or block
        return self._history.density(use.kind, use.last_used) * self._seconds(block.depth, block.nearest_tier)

    def value_of_new(self, place: int, depth: int) -> float:
        """The same of a snapshot on the device."""
        return self._history.density_of_new(place) * self._seconds(depth, DEVICE)

    def probability(self, block: CachedBlock) -> float:
        """How likely the block is used again."""
        return self._history.probability(block.kind, block.last_used)

    def used(self, blocks: Iterable[CachedBlock], ending: int) -> None:
        """Count the return of blocks that were used before, and put each block into its class."""
        self._history.used(blocks, ending)

    def role(self, key: int) -> int:
        """As the history remembers it."""
        return self._history.role(key)

    def lives(self, key: int, role: int, *, returned: bool) -> None:
        """Let the history count it."""
        self._history.lives(key, role, returned=returned)


def _never(block: object) -> None:
    """Say of a block that it may not be evicted."""


_Key = tuple[int, int]
"""A rank, and a group of the policy's."""

_Entry = tuple[float, int, int, EvictableT]
"""The policy's order, a number that no other has, the tick of the block's last release, the block."""

_POPS_BETWEEN_LOOKS = 128


class EvictionQueue(Generic[EvictableT]):
    """Blocks of one tier that may be evicted now, the lowest ``rank`` first, then by the policy.

    Nothing is taken out when a block stops being evictable: its entry is stale, and skipped when its turn comes.
    ``rank_of`` returns the rank of a block now, None: it may not be evicted.

    Each group is a heap. A heap of the groups, by the values of their first blocks, has the next one on top. A group
    that gave up a block is valued again at once, all groups now and then, because values change with
    time. ``_valued``: the block of each group whose worth that is. A prefix is evicted from its end, and each of its
    blocks enters the queue only when the one behind it has gone, so meanwhile the others of its group stay as they are.
    ``price``: the value of the block that was taken last, or of the first block of its group a moment before.
    """

    def __init__(self, policy: Ordering[EvictableT], rank_of: Callable[[EvictableT], int | None]) -> None:
        self._policy = policy
        self._rank_of = rank_of
        self._groups: dict[_Key, list[_Entry[EvictableT]]] = {}  # none of them empty
        self._worth: list[tuple[int, float, _Key]] = []  # rank, value of the first block, group: one of each group
        self._valued: dict[_Key, EvictableT] = {}
        self._size = self._tie = 0
        self.price = 0.0
        self._until_look = _POPS_BETWEEN_LOOKS

    def close(self) -> None:
        """Hold neither blocks nor the tier any more: from now on none may be evicted."""
        self._groups.clear()
        self._worth.clear()
        self._valued.clear()
        self._rank_of = _never

    def push(self, block: EvictableT, rank: int) -> None:
        """A block may be evicted from now on."""
        self._tie += 1
        self._size += 1
        key, entry = (rank, self._policy.group(block)), (self._policy.order(block), self._tie, block.last_used, block)
        group = self._groups.get(key)
        if group is None:
            self._groups[key] = [entry]
            self._valued[key] = block
            heapq.heappush(self._worth, (rank, self._policy.value(block), key))
        else:
            heapq.heappush(group, entry)

    def pop(self) -> EvictableT | None:
        """Take the block to evict first; None if none may be evicted."""
        block = self.peek()
        if block is not None:
            _, self.price, key = self._worth[0]
            heapq.heappop(self._groups[key])
            self._size -= 1
            self._until_look -= 1
            if self._until_look:
                self._look_at_first()
            else:
                self._look_at_all()
        return block

    def peek(self) -> EvictableT | None:
        """The block to evict first, without taking it; None if none may be evicted."""
        while self._worth:
            key = self._worth[0][2]
            entry = self._groups[key][0]
            if self._is_live(key, entry):
                return entry[3]
            self._look_at_first()
        return None

    def first(self, count: int) -> list[EvictableT]:
        """The blocks to evict first at present, at most ``count``; fewer if most entries are stale.

        Looks at a few entries of each group, from the top of its heap on.
        """
        found: list[EvictableT] = []
        seen: set[EvictableT] = set()
        heap = [self._candidate(key, 0) for key in self._groups]
        heapq.heapify(heap)
        left = 64 + 16 * count
        while heap and left and len(found) < count:
            *_, key, index = heapq.heappop(heap)
            left -= 1
            group = self._groups[key]
            block = group[index][3]
            if self._is_live(key, group[index]) and block not in seen:
                seen.add(block)
                found.append(block)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(group):
                    heapq.heappush(heap, self._candidate(key, child))
        return found

    def _candidate(self, key: _Key, index: int) -> tuple[int, float, int, _Key, int]:
        """An entry of a group, which compares as less than later ones."""
        _, tie, _, block = self._groups[key][index]
        return key[0], self._policy.value(block), tie, key, index

    def shrink(self, num_evictable: int) -> None:
        """Drop stale entries once they are most of the queue, so that it stays in proportion to the pool."""
        if self._size > 64 + 4 * num_evictable:
            for key, group in self._groups.items():
                live = {id(entry[3]): entry for entry in group if self._is_live(key, entry)}
                group[:] = live.values()
                heapq.heapify(group)
            self._size = sum(map(len, self._groups.values()))
            self._look_at_all()

    def _is_live(self, key: _Key, entry: _Entry[EvictableT]) -> bool:
        # An entry of an earlier life of the block is stale: it was pushed again when it was released again.
        return entry[2] == entry[3].last_used and self._rank_of(entry[3]) == key[0]

    def _first(self, key: _Key) -> EvictableT | None:
        """The first block of a group, which is forgotten if it has none."""
        group = self._groups[key]
        while group:
            if self._is_live(key, group[0]):
                return group[0][3]
            heapq.heappop(group)
            self._size -= 1
        del self._groups[key]
        return None

    def _look_at_first(self) -> None:
        key = self._worth[0][2]
        if (block := self._first(key)) is None:
            heapq.heappop(self._worth)
            self._valued.pop(key, None)
        elif block is not self._valued.get(key):
            self._valued[key] = block
            heapq.heapreplace(self._worth, (key[0], self._policy.value(block), key))

    def _look_at_all(self) -> None:
        self._until_look = _POPS_BETWEEN_LOOKS
        firsts = [(key, self._first(key)) for key in list(self._groups)]
        self._valued = {key: block for key, block in firsts if block is not None}
        self._worth = [(key[0], self._policy.value(block), key) for key, block in self._valued.items()]
        heapq.heapify(self._worth)

"""The queue of evictable memory, in the order of an eviction policy."""

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from pagewise_scheduler.core.memory.eviction import Evictable

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
        self._moved: list[tuple[EvictableT, int]] = []
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
            if self._is_live(key, entry) and self._policy.group(entry[3]) == key[1]:
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
                live = {id(entry[3]): entry for entry in group if self._stays(key, entry)}
                group[:] = live.values()
                heapq.heapify(group)
            self._size = sum(map(len, self._groups.values()))
            self._look_at_all()

    def _is_live(self, key: _Key, entry: _Entry[EvictableT]) -> bool:
        # An entry of an earlier life of the block is stale: it was pushed again when it was released again.
        return entry[2] == entry[3].last_used and self._rank_of(entry[3]) == key[0]

    def _stays(self, key: _Key, entry: _Entry[EvictableT]) -> bool:
        """Whether an entry is live and in its block's group; if the group has changed, the block is noted as moved."""
        if not self._is_live(key, entry):
            return False
        if self._policy.group(entry[3]) == key[1]:
            return True
        self._moved.append((entry[3], key[0]))
        return False

    def _push_moved(self) -> None:
        """Push the blocks whose group has changed into their new groups. That is noticed when their turn comes."""
        moved, self._moved = self._moved, []
        for block, rank in moved:
            self.push(block, rank)

    def _first(self, key: _Key) -> EvictableT | None:
        """The first block of a group, which is forgotten if it has none."""
        group = self._groups[key]
        while group:
            if self._stays(key, group[0]):
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
        if self._moved:
            self._push_moved()

    def _look_at_all(self) -> None:
        self._until_look = _POPS_BETWEEN_LOOKS
        firsts = [(key, self._first(key)) for key in list(self._groups)]
        self._valued = {key: block for key, block in firsts if block is not None}
        self._worth = [(key[0], self._policy.value(block), key) for key, block in self._valued.items()]
        heapq.heapify(self._worth)
        if self._moved:
            self._push_moved()

"""In which order cached blocks give way."""

import heapq
from collections.abc import Callable

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock

EvictionPolicy = Callable[[CachedBlock], float]
"""The priority of a block that may be evicted; the lowest goes first."""


def least_recently_used(block: CachedBlock) -> float:
    """LRU: by the tick of the last release."""
    return block.last_used


class EvictionQueue:
    """Blocks that may be evicted now: without references, and without cached descendants.

    Tails therefore go before their parents, and nothing goes from under a descendant. A block that is taken up again is
    skipped when its turn comes: ``is_evictable`` says so.
    """

    __slots__ = ("_heap", "_is_evictable", "_policy", "_tie")

    def __init__(self, policy: EvictionPolicy, is_evictable: Callable[[CachedBlock], bool]) -> None:
        self._policy = policy
        self._is_evictable = is_evictable
        self._heap: list[tuple[float, int, int, CachedBlock]] = []
        self._tie = 0

    def push(self, block: CachedBlock) -> None:
        """A block may be evicted from now on."""
        self._tie += 1
        heapq.heappush(self._heap, (self._policy(block), self._tie, block.last_used, block))

    def pop(self) -> CachedBlock:
        """Take the block that goes first.

        Raises:
            IndexError: no block may be evicted.
        """
        while True:
            _, _, last_used, block = heapq.heappop(self._heap)
            # An entry of an earlier life of the block is stale: it was pushed again when it was released again.
            if last_used == block.last_used and self._is_evictable(block):
                return block

    def shrink(self, num_evictable: int) -> None:
        """Drop stale entries once they are most of the queue, so that it stays in proportion to the pool."""
        if len(self._heap) > 64 + 4 * num_evictable:
            live = {id(entry[3]): entry for entry in self._heap if entry[2] == entry[3].last_used}
            self._heap = [entry for entry in live.values() if self._is_evictable(entry[3])]
            heapq.heapify(self._heap)

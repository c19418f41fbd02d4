"""In which order cached blocks give way."""

import heapq
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock

PREEMPTED = -1
"""The kind of use of a sequence that was preempted: it will be back."""

EvictionName = Literal["lru", "cost"]

REDUNDANT, NEAREST = 0, 1
"""The ranks of evictable blocks: a tier nearer to the computing has it as well; this is the nearest that has it."""


class EvictionPolicy(Protocol):
    """Orders blocks that may be evicted. ``learns``: whether it wants to hear of uses."""

    learns: bool

    def priority(self, block: CachedBlock, clock: float) -> float:
        """Of a block that may be evicted from now on; the lowest goes first.

        ``clock``: the highest priority that was evicted from the same tier so far.
        """
        ...

    def probability(self, block: CachedBlock) -> float:
        """How likely the block is used again, 0 to 1, as far as is known."""
        ...

    def used(self, blocks: Iterable[CachedBlock], output_tokens: int) -> None:
        """A sequence that generated so many tokens (or ``PREEMPTED``) lets go of ``blocks``, in order."""
        ...


class LeastRecentlyUsed:
    """LRU: by the tick of the last release."""

    learns = False

    def priority(self, block: CachedBlock, clock: float) -> float:
        """The tick."""
        return block.last_used

    def probability(self, block: CachedBlock) -> float:
        """Nothing is known."""
        return 0.5

    def used(self, blocks: Iterable[CachedBlock], output_tokens: int) -> None:
        """Nothing to remember: the tick is the block's own."""


def _never(block: CachedBlock) -> None:
    """Say of a block that it may not be evicted."""


class EvictionQueue:
    """Blocks of one tier that may be evicted now, those of the lowest ``rank`` first, then by the policy.

    Nothing is taken out when a block stops being evictable: its entry is stale, and skipped when its turn comes.
    ``rank_of`` says as what a block may be evicted now, None: not at all.
    """

    __slots__ = ("_clock", "_heap", "_policy", "_rank_of", "_tie")

    def __init__(self, policy: EvictionPolicy, rank_of: Callable[[CachedBlock], int | None]) -> None:
        self._policy = policy
        self._rank_of = rank_of
        self._heap: list[tuple[int, float, int, int, CachedBlock]] = []
        self._tie = 0
        self._clock = 0.0

    def close(self) -> None:
        """Hold neither blocks nor the tier any more: from now on none may be evicted."""
        self._heap.clear()
        self._rank_of = _never

    def push(self, block: CachedBlock, rank: int) -> None:
        """A block may be evicted from now on."""
        self._tie += 1
        heapq.heappush(self._heap, (rank, self._policy.priority(block, self._clock), self._tie, block.last_used, block))

    def pop(self) -> CachedBlock | None:
        """Take the block that goes first; None if none may be evicted."""
        heap = self._heap
        while heap:
            rank, priority, _, last_used, block = heapq.heappop(heap)
            # An entry of an earlier life of the block is stale: it was pushed again when it was released again.
            if last_used == block.last_used and self._rank_of(block) == rank:
                self._clock = max(self._clock, priority)
                return block
        return None

    def peek(self) -> CachedBlock | None:
        """The block that goes first, left where it is; None if none may be evicted."""
        heap = self._heap
        while heap:
            rank, _, _, last_used, block = heap[0]
            if last_used == block.last_used and self._rank_of(block) == rank:
                return block
            heapq.heappop(heap)
        return None

    def shrink(self, num_evictable: int) -> None:
        """Drop stale entries once they are most of the queue, so that it stays in proportion to the pool."""
        if len(self._heap) > 64 + 4 * num_evictable:
            live = {
                (id(entry[4]), entry[0]): entry
                for entry in self._heap
                if entry[3] == entry[4].last_used and self._rank_of(entry[4]) == entry[0]
            }
            self._heap = list(live.values())
            heapq.heapify(self._heap)

"""Eviction by what losing a block is expected to cost: how soon it is used again, times the cheapest way back."""

from collections.abc import Callable, Iterable

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.memory.use_history import UseHistory


class CostAware:
    """By hit density: the uses per unit of time that keeping a block brings (see ``UseHistory``), times the seconds
    that each saves.

    A block takes the same room as any other, so the room goes to those that bring the most seconds per unit of time.
    ``seconds(block)``: the cheapest way back if its tier loses the block.
    """

    learns = True

    def __init__(self, seconds: Callable[[CachedBlock], float], history: UseHistory) -> None:
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

    def value(self, block: CachedBlock) -> float:
        """Seconds that keeping it saves, for each block that comes in."""
        return self._history.density(block.kind, block.last_used) * self._seconds(block)

    def probability(self, block: CachedBlock) -> float:
        """How likely the block is used again."""
        return self._history.probability(block.kind, block.last_used)

    def used(self, blocks: Iterable[CachedBlock], ending: int) -> None:
        """Count the return of those used before, and put each into its class."""
        self._history.used(blocks, ending)

"""Eviction by Belady's rule: the block that is used again the latest goes first. It needs to know the future."""

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.replay.traces import TraceRequest

_NEVER = 1 << 60


class Belady:
    """The limit that other policies are compared with.

    A block is known by its first token, which the traces' prompts take from the block's id. Requests run one after the
    other; ``now``: index of the one that runs, kept by whoever replays.
    """

    learns = False

    def __init__(self, trace: Iterable[TraceRequest]) -> None:
        self.now = self._tick = 0
        self._uses: dict[int, list[int]] = defaultdict(list)
        for index, request in enumerate(trace):
            for block in request.blocks:
                self._uses[block].append(index)

    def tick(self) -> int:
        """One more than before."""
        self._tick += 1
        return self._tick

    def group(self, block: CachedBlock) -> int:
        """All are in one."""
        return 0

    def order(self, block: CachedBlock) -> float:
        """The later the next use, the lower."""
        return -self._next_use(block)

    def value(self, block: CachedBlock) -> float:
        """The order."""
        return self.order(block)

    def probability(self, block: CachedBlock) -> float:
        """Whether it is used again."""
        return float(self._next_use(block) < _NEVER)

    def _next_use(self, block: CachedBlock) -> int:
        uses = self._uses.get(array("i", block.tokens[:4])[0], [])
        following = bisect_right(uses, self.now)
        return uses[following] if following < len(uses) else _NEVER

    def used(self, blocks: Iterable[CachedBlock], ending: int) -> None:
        """The future is known already."""

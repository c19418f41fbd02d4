"""Eviction by Belady's rule: the block whose next use is the latest is evicted first. It needs to know the future."""

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from pagewise_scheduler.core.memory.eviction import Evictable, LeastRecentlyUsed
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.replay.traces import TraceRequest

_NEVER = 1 << 60


class Belady(LeastRecentlyUsed):
    """The upper bound for other policies' hit rates.

    Identifies a block by its first token, which is the trace's block id in replayed prompts. Requests run one after the
    other; the replay sets ``index`` to the index of the request that runs.
    """

    def __init__(self, trace: Iterable[TraceRequest]) -> None:
        super().__init__()
        self.index = 0
        self._uses: dict[int, list[int]] = defaultdict(list)
        for index, request in enumerate(trace):
            for block in request.blocks:
                self._uses[block].append(index)

    def order(self, block: CachedBlock) -> float:
        """The later the next use, the lower."""
        return -self._next_use(block)

    def value(self, block: CachedBlock, use: Evictable | None = None) -> float:
        """The order."""
        return self.order(block)

    def probability(self, block: CachedBlock) -> float:
        """Whether it is used again."""
        return float(self._next_use(block) < _NEVER)

    def _next_use(self, block: CachedBlock) -> int:
        uses = self._uses.get(array("i", block.tokens[:4])[0], [])
        following = bisect_right(uses, self.index)
        return uses[following] if following < len(uses) else _NEVER

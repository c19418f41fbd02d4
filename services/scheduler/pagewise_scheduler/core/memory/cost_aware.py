"""Eviction by what losing a block is expected to cost: how likely it is used again, times the cheapest way back.

GreedyDual (Cao and Irani, USITS 1997): a block's priority is its expected cost on top of a clock that moves on to the
priority of whatever is evicted, so what is not used again sinks, and what is worth more sinks later. How likely a
block is used again is learned from the blocks themselves, by class: how often it was used before, how long the answer
was that its last user got, and whether it was a new end on a known beginning. Nothing is known about the workload in
advance, and classes that mean nothing come out equal.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from pagewise_shared.block_hash import BlockHash

from pagewise_scheduler.core.memory.eviction import PREEMPTED
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, hash_of

_MOST_USES = 4
_KINDS = 7
_STRIDE = 16
_LEAST_REMEMBERED, _REMEMBERED_PER_BLOCK, _MOST_REMEMBERED = 1 << 12, 4, 1 << 18
"""How many prefixes are remembered; each takes about 160 bytes."""
_HALF_LIFE = 1 << 15
"""Counted uses after which what was learned weighs half."""


class UseHistory:
    """What is known of prefixes that were used and came back, in one executor's cache or in those of a fleet.

    Executors of one model may share it: the same users ask all of them, and each alone would learn from a part of what
    there is to learn. Prefixes are remembered after their blocks were evicted too, so that a return is noticed.
    Neighbouring blocks share their fate: every sixteenth is remembered and counted, the others go by the one before
    them.
    """

    def __init__(self) -> None:
        self._most = _LEAST_REMEMBERED
        self._seen: OrderedDict[BlockHash, int] = OrderedDict()
        num_classes = (_MOST_USES + 1) * 2 * (_KINDS + 1)
        self._uses = [0.0] * num_classes
        self._returns = [0.0] * num_classes
        self._until_halved = _HALF_LIFE

    def serve(self, num_blocks: int) -> None:
        """Remember enough prefixes for a pool of ``num_blocks`` blocks.

        These are four times as many as it has blocks, and so stand for 64 times what it holds, because every sixteenth
        block is remembered. On the Mooncake synthetic trace with a pool of a million tokens, four times and twice as
        many prefixes as blocks bring equal hit rates, and as many as blocks a lower one.
        """
        self._most = max(self._most, min(_REMEMBERED_PER_BLOCK * num_blocks, _MOST_REMEMBERED))

    def probability(self, kind: int) -> float:
        """How likely a block of that class is used again, by what became of others of it."""
        return (self._returns[kind] + 0.5) / (self._uses[kind] + 1.0)

    def used(self, blocks: Iterable[CachedBlock], output_tokens: int) -> None:
        """Count the return of those used before, and put each into its class."""
        kind = _KINDS if output_tokens == PREEMPTED else min(output_tokens.bit_length() // 2, _KINDS - 1)
        per_use = 2 * (_KINDS + 1)
        remembered = parent_uses = 0
        for block in blocks:
            counted = block.depth % _STRIDE == 1
            if counted:
                key = hash_of(block)
                remembered = self._seen.pop(key, 0)  # and put back at the end: the longest unused is forgotten first
            before = block.kind or remembered
            number = min(before // per_use + 1, _MOST_USES)
            block.kind = now = number * per_use + (number == 1 and parent_uses > 1) * (_KINDS + 1) + kind
            parent_uses = number
            if counted:
                self._seen[key] = now
                self._uses[now] += 1.0
                if before:
                    self._returns[before] += 1.0
                self._until_halved -= 1
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)
        if self._until_halved <= 0:
            self._until_halved = _HALF_LIFE
            self._uses = [value / 2 for value in self._uses]
            self._returns = [value / 2 for value in self._returns]


class CostAware:
    """GreedyDual with learned probabilities. ``seconds(block)``: the cheapest way back if its tier loses the block."""

    learns = True

    def __init__(self, seconds: Callable[[CachedBlock], float], history: UseHistory) -> None:
        self._seconds = seconds
        self._history = history

    def priority(self, block: CachedBlock, clock: float) -> float:
        """The clock plus the expected cost of losing the block now."""
        return clock + self._history.probability(block.kind) * self._seconds(block)

    def probability(self, block: CachedBlock) -> float:
        """How likely the block is used again."""
        return self._history.probability(block.kind)

    def used(self, blocks: Iterable[CachedBlock], output_tokens: int) -> None:
        """Count the return of those used before, and put each into its class."""
        self._history.used(blocks, output_tokens)

"""Eviction policies."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock

if TYPE_CHECKING:
    from pagewise_scheduler.core.memory.predicted_uses import PredictedUses
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
    its next use. ``prediction``: of its next use, which counts instead of the class; 0: none."""

    last_used: int
    kind: int
    prediction: int


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
    ``predicted``: the predictions of single blocks, which count instead of their classes; None: there are none yet.
    """

    learns = True

    def __init__(self, seconds: Callable[[int, int], float], history: "UseHistory") -> None:
        self._seconds = seconds
        self._history = history
        self.predicted: PredictedUses | None = None

    @property
    def now(self) -> int:
        """The blocks that have come into the caches so far."""
        return self._history.now

    def tick(self) -> int:
        """The blocks that have come into the caches so far."""
        return self._history.now

    def group(self, block: CachedBlock) -> int:
        """Its prediction, or its class."""
        return block.prediction or block.kind

    def order(self, block: CachedBlock) -> float:
        """The tick of its last release."""
        return block.last_used

    def value(self, block: CachedBlock, use: Evictable | None = None) -> float:
        """The seconds that keeping the block saves, per unit of time (one block that comes into the caches)."""
        use = use or block
        if use.prediction and self.predicted is not None:
            density = self.predicted.value(use.prediction, use.last_used)
        else:
            density = self._history.density(use.kind, use.last_used)
        return density * self._seconds(block.depth, block.nearest_tier)

    def uses_from(self, block: CachedBlock, seconds: float) -> float:
        """The uses of a block with a prediction per unit of time, if it is kept from ``seconds`` from now on."""
        if not block.prediction or self.predicted is None:
            return 0.0
        return self.predicted.value(block.prediction, block.last_used, seconds)

    def new_tick(self) -> int:
        """The time of something else than a release: one more than before."""
        self._history.now += 1
        return self._history.now

    def value_of_new(self, place: int, depth: int) -> float:
        """The same of a snapshot on the device."""
        return self._history.density_of_new(place) * self._seconds(depth, DEVICE)

    def probability(self, block: CachedBlock) -> float:
        """How likely the block is used again."""
        if block.prediction and self.predicted is not None:
            return self.predicted.probability(block.prediction, block.last_used)
        return self._history.probability(block.kind, block.last_used)

    def used(self, blocks: Iterable[CachedBlock], ending: int) -> None:
        """Count the return of blocks that were used before, and put each block into its class."""
        if self.predicted is not None:
            blocks = list(blocks)
            self.predicted.used(blocks, ending)
        self._history.used(blocks, ending)

    def role(self, key: int) -> int:
        """As the history remembers it."""
        return self._history.role(key)

    def lives(self, key: int, role: int, *, returned: bool) -> None:
        """Let the history count it."""
        self._history.lives(key, role, returned=returned)

"""The further life of prefixes after a use: the probability that they are used again, by class and by age.

A prefix that is used, used again, or forgotten is a lifetime, so the history is a life table, as in actuarial
science and survival analysis: for each class and each span of ages, how many prefixes reached that age unused, and
how many of them were used again within the span. Prefixes that are still waiting count for the ages they have
reached. From it follows the number that eviction needs: the uses per block and unit of time that keeping a prefix
for a while can bring, if it is kept for the best while. That is the Gittins index of a job whose service time is
unknown (Gittins, 1979), with a use in place of the job's end; the hit density of LHD (Beckmann, Chen and Cidon, NSDI
2018) is its relative.
"""

from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable
from math import log2

from pagewise_scheduler.core.memory.eviction import (
    BATCH,
    CLASSES_PER_USE,
    MOST_USES,
    NUM_BLOCK_CLASSES,
    NUM_ENDINGS,
    PREEMPTED,
)
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, hash_of
from pagewise_scheduler.core.memory.roles import FIRST_KNOWN, INSIDE, NUM_CLASSES, NUM_PLACES, new_role

_STRIDE = 16
_LEAST_REMEMBERED, _REMEMBERED_PER_BLOCK, _MOST_REMEMBERED = 1 << 12, 4, 1 << 18
"""How many prefixes are remembered; each takes about 160 bytes."""
_LEAST_HALF_LIFE = 1 << 15
"""Counted uses after which old counts weigh half; as many as prefixes are remembered, if these are more."""
_MOST_BETWEEN_LESSONS = 1 << 10
_MOST_USES_KEPT = 4
"""Uses that are kept for each remembered prefix, because a popular prefix has many."""

_FIRST_SPAN = 64
_SPANS = 40
_BOUNDS = [_FIRST_SPAN * 2 ** (number / 2) for number in range(_SPANS)]
"""Where spans of ages end: each is longer than the one before by the square root of two."""
_WIDTHS = [end - begin for begin, end in zip([0.0, *_BOUNDS], _BOUNDS, strict=False)]
_PRIOR_RATES, _PRIOR_WEIGHT = [0.15, *[0.05] * (_SPANS - 1)], 1.0
"""Where nothing is known, one in twenty of the prefixes that reach a span is used again in it, three times as many in
the first, which is that much longer. As spans grow, an older prefix is worth less than a younger one: that is LRU."""
_ALIKE = (
    (0, NUM_BLOCK_CLASSES, 4.0, 1.0),
    (NUM_BLOCK_CLASSES, new_role(INSIDE), 16.0, 1.0),
    (new_role(INSIDE), FIRST_KNOWN, 16.0, 0.125),
    (FIRST_KNOWN, NUM_CLASSES, 16.0, 0.1),
)
"""Groups of classes: blocks, new snapshots, new snapshots inside of prompts, and passed snapshots. Each has its first
class, the class after its last, the weight of the group's return rates beside a class's own (as a number of prefixes),
and the factor on ``_PRIOR_RATES`` while nothing is known. The last two factors are low, because few prompts leave
earlier prompts at an arbitrary place, and because conversations continue from their newest snapshots."""
_ANNOUNCED, _MOST_ANNOUNCED = 4.0, 0.5
"""Until more is known of a class whose return is announced, it returns so many times as often as all classes do, but
not in more than half of all cases. If clients announce returns that do not happen, their classes get a low value."""


def _span(age: int) -> int:
    """The number of the span that contains an age."""
    return 0 if age < _FIRST_SPAN else min(int(2 * log2(age)) - 11, _SPANS - 1)


class UseHistory:
    """Counts of prefixes that were used and came back, in one executor's cache or in the caches of a fleet.

    Executors of one model may share it: the same users ask all of them, and each alone would see only a part of
    the returns. Prefixes are remembered after their blocks were evicted too, so that a return is noticed.
    Neighbouring blocks have similar lives: every sixteenth is remembered and counted, and represents the blocks after
    it. A class is given by the number of times a block was used before, how its last use ended (see
    ``eviction.ending``), and whether it was a new end on a known beginning. Nothing is known about the workload in
    advance, and classes that predict nothing get equal values.

    ``now``: the blocks that have come into the caches, which is the time in which ages are counted.
    """

    def __init__(self) -> None:
        self.now = 0
        self._most = _LEAST_REMEMBERED
        self._remembered: OrderedDict[int, int] = OrderedDict()
        """The number of the last use of each remembered prefix: uses are numbered in their order."""
        # Of each use since ``_first``: when it was, and the class it left its prefix in; 0 once that was used again, or
        # has been forgotten.
        self._first = 0
        self._times, self._classes = array("q"), bytearray()
        # By class and span: the prefixes that have reached the span unused, and the ones among them that were used
        # again in it. Uses before the number in ``_counted`` have been asked whether their prefix reaches the span.
        self._reached = [[0.0] * _SPANS for _ in range(NUM_CLASSES)]
        self._returned = [[0.0] * _SPANS for _ in range(NUM_CLASSES)]
        self._counted = [0] * _SPANS
        self._densities: list[list[float]] = []
        for first, end, _, often in _ALIKE:
            densities = [_densities(rates) for rates in _expected([often * rate for rate in _PRIOR_RATES])]
            self._densities += [densities[_is_announced(kind)] for kind in range(first, end)]
        self._new = [self._densities[new_role(place)][0] for place in range(NUM_PLACES)]
        self._num_uses = self._halved = 0
        self._next_lesson = 1

    def serve(self, num_blocks: int) -> None:
        """Remember enough prefixes for a pool of ``num_blocks`` blocks.

        These are four times as many as it has blocks, and so stand for 64 times its content, because every sixteenth
        block is remembered.
        """
        self._most = max(self._most, min(_REMEMBERED_PER_BLOCK * num_blocks, _MOST_REMEMBERED))

    def density(self, kind: int, last_used: int) -> float:
        """Uses per block that comes in, if a block of that class is kept from now on for as long as is best."""
        return self._densities[kind][_span(self.now - last_used)]

    def density_of_new(self, place: int) -> float:
        """The density of a snapshot that is taken at a place now, before the ending of its sequence is known."""
        return self._new[place]

    def probability(self, kind: int, last_used: int) -> float:
        """The probability that a block of that class and age is used again: the share of earlier ones of that age."""
        reached, returned = self._reached[kind], self._returned[kind]
        span = _span(self.now - last_used)
        at_any_age = (sum(returned) + 0.5) / (reached[0] + 1.0)
        return min(1.0, (sum(returned[span:]) + at_any_age) / (reached[span] + 1.0))

    def used(self, blocks: Iterable[CachedBlock], ending: int) -> None:
        """A sequence lets go of ``blocks``, in order: count the return of blocks that were used before, and put each
        block into its class. ``ending``: how this use of them ended."""
        remembered = parent_uses = 0
        key = None
        for block in blocks:
            if key is None:
                assert block.parent is not None
                key = hash(hash_of(block.parent))
            # Python's hashes do: they differ from process to process, but nothing that is learned outlives this one.
            # Python has computed the hashes of the tokens already, because they are keys of dictionaries.
            key = hash((key, block.tokens))
            counted = (block.depth - 1) % _STRIDE == 0
            if counted:
                remembered = self._recall(key)
            before = block.kind or remembered
            if not block.kind:
                self.now += 1
            uses = min(before // CLASSES_PER_USE + 1, MOST_USES)
            block.kind = uses * CLASSES_PER_USE + (uses == 1 and parent_uses > 1) * NUM_ENDINGS + ending
            parent_uses = uses
            if counted:
                self._remember(key, block.kind)
        if self._num_uses >= self._next_lesson:
            self._learn()

    def role(self, key: int) -> int:
        """The role of a snapshot, or 0, as ``EvictionPolicy`` describes."""
        use = self._remembered.get(key, -1)
        return self._classes[use - self._first] if use >= 0 else 0

    def lives(self, key: int, role: int, *, returned: bool) -> None:
        """Let a snapshot have a role, as ``EvictionPolicy`` describes."""
        self._recall(key, returned=returned)
        self._remember(key, role)

    def _recall(self, key: int, *, returned: bool = True) -> int:
        """Count the return of a prefix, or that it is not waited for any more; returns its class, 0 if it is not
        remembered."""
        use = self._remembered.pop(key, -1)
        if use < 0:
            return 0
        place = use - self._first
        kind, span = self._classes[place], _span(self.now - self._times[place])
        self._classes[place] = 0
        self._returned[kind][span] += returned
        reached, counted = self._reached[kind], self._counted
        while span and counted[span] <= use:
            reached[span] += 1.0
            span -= 1
        return kind

    def _remember(self, key: int, kind: int) -> None:
        self._remembered[key] = self._num_uses
        self._num_uses += 1
        self._times.append(self.now)
        self._classes.append(kind)
        self._reached[kind][0] += 1.0

    def _learn(self) -> None:
        """Count the prefixes that have reached each span, and compute the densities of blocks from that."""
        self._forget()
        self._count_reached()
        self._reached[0] = [0.0] * _SPANS  # prefixes that were used again, or forgotten
        for first, end, weight, often in _ALIKE:
            reached, returned = self._reached[first:end], self._returned[first:end]
            common = [
                (sum(back) + _PRIOR_WEIGHT * often * rate) / (sum(all_) + _PRIOR_WEIGHT)
                for all_, back, rate in zip(
                    zip(*reached, strict=True), zip(*returned, strict=True), _PRIOR_RATES, strict=True
                )
            ]
            before, densities = _expected(common), [_densities(rates) for rates in _expected(common)]
            for kind, all_, back in zip(range(first, end), reached, returned, strict=True):
                self._densities[kind] = densities[_is_announced(kind)]
                if all_[0]:
                    rates = zip(all_, back, before[_is_announced(kind)], strict=True)
                    self._densities[kind] = _densities(
                        [(one_back + weight * rate) / (one + weight) for one, one_back, rate in rates]
                    )
        self._learn_places()
        self._next_lesson = self._num_uses + min(self._num_uses, _MOST_BETWEEN_LESSONS)

    def _learn_places(self) -> None:
        """Compute the densities of new snapshots by place: the mean over endings, weighted by their counts."""
        for place in range(NUM_PLACES):
            first = new_role(place)
            counts = [self._reached[kind][0] for kind in range(first, first + NUM_ENDINGS)]
            if total := sum(counts):
                found = (count * self._densities[first + ending][0] for ending, count in enumerate(counts))
                self._new[place] = sum(found) / total

    def _count_reached(self) -> None:
        """Count the prefixes that have reached each span since the last time; now and then, halve all counts."""
        times, first = self._times, self._first
        for span in range(1, _SPANS):
            begin = max(self._counted[span] - first, 0)
            end = bisect_right(times, self.now - _BOUNDS[span - 1], begin)
            for kind, count in Counter(self._classes[begin:end]).items():
                self._reached[kind][span] += count
            self._counted[span] = first + end
        if self._num_uses - self._halved >= max(_LEAST_HALF_LIFE, self._most):
            self._halved = self._num_uses
            self._reached = [[count / 2 for count in counts] for counts in self._reached]
            self._returned = [[count / 2 for count in counts] for counts in self._returned]

    def _forget(self) -> None:
        """Forget the prefixes that have not been used for the longest, down to the limit."""
        remembered, classes = self._remembered, self._classes
        oldest = self._first
        while remembered:
            oldest = next(iter(remembered.values()))
            if len(remembered) <= self._most and self._num_uses - oldest <= _MOST_USES_KEPT * self._most:
                break
            remembered.popitem(last=False)
            classes[oldest - self._first] = 0
        unused = oldest - self._first
        del self._times[:unused], classes[:unused]
        self._first = oldest


def _is_announced(kind: int) -> bool:
    """Whether a class is one of prefixes whose next use is announced."""
    return kind < NUM_BLOCK_CLASSES and kind % NUM_ENDINGS >= PREEMPTED and kind % NUM_ENDINGS != BATCH


def _expected(rates: list[float]) -> tuple[list[float], list[float]]:
    """The expected rates of an unknown class, and of a class whose return is announced, if all classes together return
    at these ``rates``."""
    return rates, [max(rate, min(_ANNOUNCED * rate, _MOST_ANNOUNCED)) for rate in rates]


def _densities(rates: list[float]) -> list[float]:
    return gittins_densities(rates, _WIDTHS)


def gittins_densities(rates: list[float], widths: list[float]) -> list[float]:
    """For each span of ages: the uses per unit of time that keeping a block of that age brings until the best moment.

    ``widths``: of the spans. ``rates``: the share of the blocks reaching a span that are used again within it. The sums
    over the spans that are waited for grow from the last span on: a span joins its successors as long as that raises
    its uses per time.
    """
    uses, times, alive = [], [], 1.0
    for rate, width in zip(rates, widths, strict=True):
        bounded = min(rate, 0.999)
        uses.append(alive * bounded)
        times.append(alive * width * (1 - bounded / 2))
        alive *= 1 - bounded
    waited_for: list[tuple[float, float]] = []
    densities = [0.0] * len(rates)
    for span in range(len(rates) - 1, -1, -1):
        use, time = uses[span], times[span]
        while waited_for and waited_for[-1][0] * time > use * waited_for[-1][1]:
            later_use, later_time = waited_for.pop()
            use, time = use + later_use, time + later_time
        waited_for.append((use, time))
        densities[span] = use / time
    return densities

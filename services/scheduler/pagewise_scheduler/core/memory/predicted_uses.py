"""Predictions of the next use of blocks that belong to one session alone.

A prediction is a number of seconds until the next use, and its *source*. The times of one source are right, early or
late in a characteristic way, which a life table learns over the *normalised age*: the age divided by the predicted
time. Its densities, divided by the blocks that come into the caches each second, compare with those of the usual
classes (see ``use_history``), so predicted and other blocks wait in one eviction queue.

Without a hint, the source is the event for which the session waits: the result of a tool, or a turn of a person. The
predicted time of such a source is always ``SECONDS``, so its table is the distribution of these waits. The prior of the
table of one tool is the table of all tools, and waits for people have the same order. Waits for the same event are
distinguished by the session's own longest wait for it.

API keys can lie with hints, with names of tools, and with sessions that return or do not. So the hints of each key are
a source of their own, which the hints of other keys do not change. Tables of waits learn from all keys, because each
key alone has few. A table takes at most as many observations of one key as of all others, and ``_MOST_ALONE`` more.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import count
from math import exp, log2
from typing import NamedTuple

from pagewise_scheduler.core.memory.eviction import NUM_ENDINGS, PREEMPTED
from pagewise_scheduler.core.memory.eviction_history import ENDED, key_of
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors
from pagewise_scheduler.core.memory.tick_times import TickTimes
from pagewise_scheduler.core.memory.use_history import gittins_densities

HINTS, TOOLS, PEOPLE = range(1, 4)
"""Kinds of sources: hints, waits for tools and for people. The sources of these numbers are all of a kind; higher
numbers are the hints of one API key each, and waits of one kind each."""
SECONDS = 32.0
"""The predicted time of waits: their table distinguishes one second from two, and one day from two."""
_MOST_SOURCES, _MOST_OF_KEY = 2048, 128
"""The most sources that have tables, and the most of them that one API key has introduced. Of more, the ones that were
not seen for the longest are forgotten."""
_MOST_ALONE = 64
SHARED = -1
"""The session of blocks that several sessions, or requests without a session, have used."""

_RATE_SECONDS, _LEAST_RATE = 600.0, 0.01
"""The time over which the blocks that come in are averaged, and the fewest each second that count."""
_BUCKETS = 64
_SPANS = 44
_BOUNDS = [2 ** (number / 2) / 32 for number in range(_SPANS)]
_WIDTHS = [end - begin for begin, end in zip([0.0, *_BOUNDS], _BOUNDS, strict=False)]
_PRIOR_WEIGHT, _BETWEEN_LESSONS, _MOST_OBSERVED = 4.0, 8, 4096
_PRIOR_RATES = [0.02 + 0.35 * exp(-(log2(bound / 1.2) ** 2) / 4) for bound in _BOUNDS]
"""Until more is known of a source, most uses come within a factor of four of the predicted time."""
_LEAST_OBSERVED, _RISES = 16, 2.0
"""A time is expected if so much was learned of the source, and the value of its blocks rises so much until then."""
MOST_AGE = _BOUNDS[-8]
"""The normalised age after which a return is not waited for any more."""


def _span(age: float) -> int:
    return 0 if age < _BOUNDS[0] else min(_SPANS - 1, 1 + int(2 * log2(age * 32)))


_SCALES = [1.19 * 2 ** (bucket / 2) for bucket in range(_BUCKETS)]
"""The predicted time of each bucket, in seconds: the middle of the bucket."""


def _scale(prediction: int) -> float:
    return _SCALES[(prediction - ENDED) % _BUCKETS]


class _LifeTable:
    """The returns of one source by normalised age.

    ``common``: the table of several sources, which is the prior of this table; None: other sources do not resemble this
    one, so the prior is ``_PRIOR_RATES``. ``share``: the factor on its densities. ``num_observed``: the number of
    observations; from ``_MOST_OBSERVED`` on, all of them count half.
    """

    def __init__(self, common: "_LifeTable | None" = None) -> None:
        self._returned, self._reached = [0.0] * _SPANS, [0.0] * _SPANS
        self.num_observed = self._num_new = 0
        self._told: Counter[str] = Counter()
        self._common = common
        self.share = 1.0
        self._valued: list[float] | None = None
        self._learn(common.rates if common is not None else _PRIOR_RATES)

    def reach(self, age: float, counted: int, key: str) -> int:
        """Count a session of an API key that has not returned up to this normalised age.

        ``counted``: the spans in which it was counted before. Returns in how many it has been now.
        """
        last = _span(age)
        if self._common is not None:
            self._common.reach(age, counted, key)
        if last > counted and self._hears(key):
            for span in range(counted, last):
                self._reached[span] += 1
            self._observed()
        return max(counted, last)

    def returned(self, age: float, counted: int, key: str) -> None:
        """Count a session that returned at this normalised age, and was counted in the spans before as in ``reach``."""
        last = _span(age)
        if self._common is not None:
            self._common.returned(age, counted, key)
        if self._hears(key):
            for span in range(counted, last + 1):
                self._reached[span] += 1
            self._returned[last] += 1
            self._observed()

    def _hears(self, key: str) -> bool:
        """Whether one more observation of an API key counts. While there are none of others, all of them do."""
        told = self._told
        hears = len(told) < 2 or 2 * told[key] < told.total() + _MOST_ALONE
        told[key] += hears
        return hears

    def _observed(self) -> None:
        self.num_observed += 1
        self._num_new += 1
        if self.num_observed >= _MOST_OBSERVED:
            self.num_observed //= 2
            self._reached = [count / 2 for count in self._reached]
            self._returned = [count / 2 for count in self._returned]
            self._told = Counter({key: count // 2 for key, count in self._told.items() if count > 1})

    @property
    def rates(self) -> list[float]:
        """The share of the sessions that reach each span which return in it. A new list when they have changed."""
        expected = self._common.rates if self._common is not None else _PRIOR_RATES
        if self._num_new >= _BETWEEN_LESSONS or expected is not self._expected:
            self._learn(expected)
        return self._rates

    @property
    def densities(self) -> list[float]:
        """The returns per unit of normalised age: see ``gittins_densities``."""
        if self.rates is not self._valued:
            self._valued = self._rates
            self._densities = gittins_densities(self._rates, _WIDTHS)
        return self._densities

    def _learn(self, expected: list[float]) -> None:
        """``expected``: the rates of a table without observations."""
        self._expected, self._num_new = expected, 0
        self._rates = [
            (back + _PRIOR_WEIGHT * before) / (all_ + _PRIOR_WEIGHT)
            for back, all_, before in zip(self._returned, self._reached, expected, strict=True)
        ]

    @property
    def num_known(self) -> int:
        """The number of observations of all waits for the same event."""
        return self.num_observed if self._common is None or self._common._common is None else self._common.num_observed

    def probability(self, age: float) -> float:
        """The probability of a return after this normalised age."""
        missing = 1.0
        for rate in self.rates[_span(age) :]:
            missing *= 1 - min(rate, 1.0)
        return 1 - missing


class PredictedUses:
    """The predictions for the blocks of an executor: see ``CachedBlock.prediction`` and ``CachedBlock.session``.

    ``now``: seconds. ``awaited``: uses that leave this set when they come.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._tables = {source: _LifeTable() for source in (HINTS, TOOLS, PEOPLE)}
        self._sources: OrderedDict[tuple[int, tuple[str, ...]], tuple[int, str]] = OrderedDict()
        self._numbers = count(PEOPLE + 1)
        self._hints: dict[str, int] = {}
        self.awaited: set[AwaitedUse] = set()
        self._next: tuple[CachedBlock, int, int, int] | None = None
        self._times = TickTimes()
        self._noted: tuple[int, float] | None = None
        self._blocks = self._seconds = 1.0

    def note(self, tick: int, now: float) -> None:
        """So many blocks have come into the caches by now."""
        self.now = now
        self._times.note(tick, now)
        if self._noted is None or now - self._noted[1] >= _RATE_SECONDS / 64:
            before = self._noted or (tick, now)
            weight = 0.5 ** ((now - before[1]) / _RATE_SECONDS)
            self._blocks = self._blocks * weight + tick - before[0]
            self._seconds = self._seconds * weight + now - before[1]
            self._noted = tick, now

    def time(self, source: int, seconds: float) -> int:
        """The prediction of a use after so many seconds."""
        bucket = min(_BUCKETS - 1, int(2 * log2(max(1.0, seconds))))
        return ENDED + source * _BUCKETS + bucket

    def source(self, kind: int, what: tuple[str, ...], key: str) -> int:
        """Return the source of waits of one kind for an API key. ``kind``: ``TOOLS`` or ``PEOPLE``. ``what``: the name
        of an event, alone or with a class of the waits for it. The prior of a class is the table of its event."""
        name = kind, what
        source, _ = self._sources.get(name, (0, ""))
        if not source:
            common = self._tables[self.source(kind, what[:-1], key) if len(what) > 1 else kind]
            own = [one for one, (_, by) in self._sources.items() if by == key]
            if len(own) >= _MOST_OF_KEY or len(self._sources) >= _MOST_SOURCES:
                oldest = own[0] if len(own) >= _MOST_OF_KEY else next(iter(self._sources))
                del self._tables[self._sources.pop(oldest)[0]]
            source = next(self._numbers)
            self._sources[name] = source, key
            self._tables[source] = _LifeTable(common)
        self._sources.move_to_end(name)
        return source

    def hints_of(self, key: str) -> int:
        """Return the source of the hints of an API key. It is never forgotten, because it has the key's trust."""
        if (source := self._hints.get(key, 0)) == 0:
            source = self._hints[key] = next(self._numbers)
            self._tables[source] = _LifeTable()
        return source

    def charge(self, source: int, share: float) -> None:
        """Multiply the values of a source's predictions by ``share`` from now on (see ``Trust``)."""
        self._table(source).share = share

    def slowest(self, sources: Iterable[int]) -> int:
        """Return the source whose sessions are worth the least when their waits begin."""
        return min(sources, key=lambda source: self._table(source).densities[0])

    def ends(self, last: CachedBlock, session: int, prediction: int, parent: int = 0) -> None:
        """The blocks up to ``last``, whose use is counted next, are let go of by a turn of ``session``.

        ``prediction``: of their next use; 0: none. ``parent``: the session whose blocks they begin with, which keeps
        them; 0: none.
        """
        self._next = last, session, prediction, parent

    def used(self, blocks: list[CachedBlock], ending: int) -> None:
        """A sequence lets go of ``blocks``, whose kinds are still those of earlier uses."""
        announced, self._next = self._next, None
        if ending == PREEMPTED or not blocks:
            return
        if self.awaited:
            self.awaited -= {one for one in self.awaited if one.is_of(blocks)}
        session = prediction = parent = 0
        if announced is not None and announced[0] is blocks[-1]:
            _, session, prediction, parent = announced
        for block in blocks:
            if (session and block.session == session) or (not block.session and _is_new(block)):
                block.session, block.prediction = session, prediction
            elif not parent or block.session != parent:
                block.session, block.prediction = SHARED, 0

    def value(self, prediction: int, last_used: int, ahead: float = 0.0) -> float:
        """Uses per block that comes in, as ``UseHistory.density``, if a block is kept from ``ahead`` seconds from now
        on. ``last_used``: the tick of the last release."""
        if prediction == ENDED:
            return 0.0
        scale = _scale(prediction)
        table = self._table_of(prediction)
        density = table.share * table.densities[_span((self._age(last_used) + ahead) / scale)]
        return density / scale / max(_LEAST_RATE, self._blocks / self._seconds)

    def probability(self, prediction: int, last_used: int) -> float:
        """The probability that a block is used again."""
        if prediction == ENDED:
            return 0.0
        return self._table_of(prediction).probability(self._age(last_used) / _scale(prediction))

    def _age(self, last_used: int) -> float:
        return max(0.0, self.now - self._times.time_of(last_used, self.now))

    def reaches(self, prediction: int, counted: int) -> float:
        """After how many seconds ``reach`` learns more."""
        return _BOUNDS[counted] * _scale(prediction)

    def reach(self, prediction: int, age: float, counted: int, key: str) -> int:
        """Learn that a session has not come back so many seconds after its prediction; see ``_LifeTable.reach``."""
        return self._table_of(prediction).reach(age / _scale(prediction), counted, key)

    def returned(self, prediction: int, age: float, counted: int, key: str) -> None:
        """Learn that a session came back so many seconds after its prediction."""
        self._table_of(prediction).returned(age / _scale(prediction), counted, key)

    def is_overdue(self, prediction: int, age: float) -> bool:
        """Whether a session is not waited for any more."""
        return age / _scale(prediction) > MOST_AGE

    def likeliest(self, prediction: int) -> tuple[float, float] | None:
        """When a session that is waited for returns most likely: the ages in seconds between which a block of it has
        its highest value. None: that is at once, or little is known of the source."""
        table = self._table_of(prediction)
        span = max(range(_SPANS), key=table.densities.__getitem__)
        if table.num_known < _LEAST_OBSERVED or table.densities[span] < _RISES * table.densities[0]:
            return None
        scale = _scale(prediction)
        return _BOUNDS[span - 1] * scale, _BOUNDS[span] * scale

    def _table_of(self, prediction: int) -> _LifeTable:
        return self._table((prediction - ENDED) // _BUCKETS)

    def _table(self, source: int) -> _LifeTable:
        """The table of a source; that of no source in particular if it was forgotten."""
        return self._tables.get(source, self._tables[HINTS])


class AwaitedUse(NamedTuple):
    """The next use of a block, known by its content, for which advice of an API key waits: another node of the prefix
    tree may have the block then. ``depth``, ``content``: of the block; see ``key_of``."""

    key: str
    depth: int
    content: int

    def is_of(self, blocks: list[CachedBlock]) -> bool:
        """Whether it is a use of these blocks of a prefix, from the first one on."""
        return self.depth <= len(blocks) and key_of(blocks[self.depth - 1]) == self.content


def _is_new(block: CachedBlock) -> bool:
    """Whether no sequence has let go of the block before, but by preemption."""
    return not block.kind or block.kind % NUM_ENDINGS == PREEMPTED


def own_blocks(last: CachedBlock | None, session: int) -> Iterable[CachedBlock]:
    """The blocks up to ``last``, the last one first, that are of ``session`` alone and lie in some tier."""
    return (node for node in ancestors(last) if node.session == session and node.num_tiers)

"""Asks executors how much of a prompt is in storage, before it is placed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from pagewise_shared.protocol import Found

from pagewise_scheduler.actors.clock import clock
from pagewise_scheduler.actors.engine import Engine, Life
from pagewise_scheduler.actors.live_request import LiveRequest
from pagewise_scheduler.core.routing.prefix_query import PrefixQuery
from pagewise_scheduler.metrics import Metrics

ANSWER_SECONDS = 0.1
"""Longest that a request waits for an answer: storage that takes longer is slow or broken, and would not help."""
_LEAST_BLOCKS = 4
"""Fewer blocks than this are computed sooner than they are found."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that is not placed before so many answers have come. ``until``: seconds of ``clock``."""

    live: LiveRequest
    num_missing: int
    until: float


@dataclass(slots=True, eq=False)
class _Question:
    engine: Engine
    identity: str
    waiting: _Waiting


class LookUps:
    """The questions that have not been answered.

    ``place``: called with requests whose answers are there, or late; it has to know those that do not wait any more.
    """

    def __init__(self, place: Callable[[LiveRequest], None], metrics: Metrics) -> None:
        self._place = place
        self._metrics = metrics
        self._numbers = count(1)
        self._questions: dict[int, _Question] = {}

    def begin(self, live: LiveRequest, engines: Sequence[Engine]) -> bool:
        """Ask for a request that is about to be placed on one of ``engines``; returns whether it has to wait.

        One executor is asked for each storage. Nobody is asked if an executor holds about all of the prompt anyway.
        """
        live.request.stored.clear()
        asked: dict[str, Engine] = {}
        for engine in engines:
            for storage in engine.scheduler.recoveries.storages.values():
                link = storage.costs.load
                if link.rests:  # it has failed, and is left alone for some requests
                    link.rests -= 1
                elif engine.life is Life.SERVING and storage.takes(live.request):
                    asked.setdefault(storage.identity, engine)
        if not asked:
            return False
        query = PrefixQuery(live.request)
        engine = next(iter(asked.values()))
        size = engine.hello.block_size
        keys = query.keys(size)
        trees = (one.scheduler.kv.pool.tree for one in engines)
        held = max(len(tree.walk(tree.root_of(query.cache_salt), keys)) for tree in trees)
        if len(keys) - held < _LEAST_BLOCKS:
            return False
        waiting = _Waiting(live, len(asked), clock() + ANSWER_SECONDS)
        for identity, engine in asked.items():
            number = next(self._numbers)
            self._questions[number] = _Question(engine, identity, waiting)
            engine.look_up(number, identity, query.cache_salt, b"".join(keys))
        return True

    def found(self, engine: Engine, message: Found) -> None:
        """An answer has come; one that nobody waits for any more is ignored."""
        question = self._questions.get(message.number)
        if question is None or question.engine is not engine:
            return
        del self._questions[message.number]
        waiting = question.waiting
        waiting.live.request.stored[question.identity] = max(0, message.num_blocks)
        waiting.num_missing -= 1
        if not waiting.num_missing:
            self._place(waiting.live)

    def give_up(self, now: float, engine: Engine | None = None) -> None:
        """Place the requests that have waited long enough, or for an engine that is gone."""
        late = {
            number: question
            for number, question in self._questions.items()
            if question.waiting.until <= now or question.engine is engine
        }
        for number, question in late.items():
            del self._questions[number]
            for storage in question.engine.scheduler.recoveries.storages.values():
                if storage.identity == question.identity:
                    storage.costs.load.failed()
        self._metrics.look_ups_late.inc(len(late))
        placed = {question.waiting: None for question in late.values()}
        for waiting in placed:
            waiting.num_missing = 0
            self._questions = {number: one for number, one in self._questions.items() if one.waiting is not waiting}
            self._place(waiting.live)

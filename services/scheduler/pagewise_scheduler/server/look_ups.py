"""Asks executors how much of a prompt is in tiers without ids, before it is placed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic as clock

from pagewise_shared.protocol import Found

from pagewise_scheduler.core.routing.executor_view import PrefixQuery
from pagewise_scheduler.core.tiers.hashed import HashedTier
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.client_request import ClientRequest
from pagewise_scheduler.server.executor_handle import ExecutorHandle, Life

ANSWER_SECONDS = 0.1
"""Longest that a request waits for an answer: a tier that takes longer is slow or broken, and would not help."""
_LEAST_BLOCKS = 4
"""Fewer blocks than this are computed sooner than they are found."""
_MOST_ORIGINALS = 64
"""Segments of a prompt that are looked up."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that is not placed before so many answers have come. ``until``: seconds of ``clock``."""

    live: ClientRequest
    num_missing: int
    until: float


@dataclass(slots=True, eq=False)
class _Question:
    """``stored``: where the answer is put, by the identity of the tier."""

    executor: ExecutorHandle
    tier: HashedTier
    waiting: _Waiting
    stored: dict[str, int]


class LookUps:
    """The questions that have not been answered.

    ``place``: called with requests whose answers are there, or late; it has to know those that do not wait any more.
    """

    def __init__(self, place: Callable[[ClientRequest], None], metrics: Metrics) -> None:
        self._place = place
        self._metrics = metrics
        self._numbers = count(1)
        self._questions: dict[int, _Question] = {}

    def begin(self, request: ClientRequest, executors: Sequence[ExecutorHandle]) -> bool:
        """Ask for a request that is about to be placed on one of ``executors``; returns whether it has to wait.

        One executor is asked for each identity. Nobody is asked for what an executor holds anyway, or about all of it:
        the prompt itself, and what its segments are moved from.
        """
        if not (asked := self._to_ask(request, executors)):
            return False
        query = PrefixQuery(request)
        size = asked[0][0].hello.block_size
        originals = query.originals(size)[:_MOST_ORIGINALS]
        wanted = [(query.keys(size), request.stored)]
        wanted += [(one.keys, request.stored_originals.setdefault(one.tokens, {})) for one in originals]
        trees = [one.scheduler.kv.pool.tree for one in executors]
        lacked = [
            (b"".join(keys), stored)
            for keys, stored in wanted
            if len(keys) - max(len(tree.walk(tree.root_of(query.cache_salt), keys)) for tree in trees) >= _LEAST_BLOCKS
        ]
        if not lacked:
            return False
        waiting = _Waiting(request, len(asked) * len(lacked), clock() + ANSWER_SECONDS)
        for executor, tier in asked:
            for tokens, stored in lacked:
                number = next(self._numbers)
                self._questions[number] = _Question(executor, tier, waiting, stored)
                executor.look_up(number, tier.number, query.cache_salt, tokens)
        return True

    @staticmethod
    def _to_ask(request: ClientRequest, executors: Sequence[ExecutorHandle]) -> list[tuple[ExecutorHandle, HashedTier]]:
        """One executor for each identity of a tier. Forgets the answers of an earlier placement."""
        request.stored.clear()
        request.stored_originals.clear()
        asked: dict[str, tuple[ExecutorHandle, HashedTier]] = {}
        for executor in executors:
            for tier in executor.scheduler.kv.hashed.values():
                if tier.link.rests:  # it has failed, and is left alone for some requests
                    tier.link.rests -= 1
                elif executor.life is Life.SERVING and tier.may_have(request.params.cache_salt):
                    asked.setdefault(tier.identity, (executor, tier))
        return list(asked.values())

    def found(self, executor: ExecutorHandle, message: Found) -> None:
        """An answer has come; one that nobody waits for any more is ignored."""
        question = self._questions.get(message.number)
        if question is None or question.executor is not executor:
            return
        del self._questions[message.number]
        waiting = question.waiting
        question.stored[question.tier.identity] = max(0, message.num_blocks)
        waiting.num_missing -= 1
        if not waiting.num_missing:
            self._place(waiting.live)

    def give_up(self, now: float, executor: ExecutorHandle | None = None) -> None:
        """Place the requests that have waited long enough, or for an executor that is gone."""
        late = {
            number: question
            for number, question in self._questions.items()
            if question.waiting.until <= now or question.executor is executor
        }
        for number, question in late.items():
            del self._questions[number]
            question.tier.link.failed()
        self._metrics.look_ups_late.inc(len(late))
        placed = {question.waiting: None for question in late.values()}
        for waiting in placed:
            waiting.num_missing = 0
            self._questions = {number: one for number, one in self._questions.items() if one.waiting is not waiting}
            self._place(waiting.live)

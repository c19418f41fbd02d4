"""Look-ups of prompts in the storage tiers of executors, before the prompts are placed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic as clock

from pagewise_shared.protocol import Found

from pagewise_scheduler.core.routing.prompts import PrefixQuery
from pagewise_scheduler.core.tiers.hashed import HashedTier
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.client_request import ClientRequest
from pagewise_scheduler.server.executor_handle import ExecutorHandle, Life

ANSWER_SECONDS = 0.1
"""Maximum wait of a request for answers: a slower tier is overloaded or broken, and would not help."""
_LEAST_BLOCKS = 4
"""Shorter prefixes are computed sooner than they are looked up."""
_MOST_ORIGINALS = 64
"""Segments of a prompt to look up."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for ``num_missing`` answers. ``until``: seconds of ``clock``."""

    live: ClientRequest
    num_missing: int
    until: float


@dataclass(slots=True, eq=False)
class _Question:
    """``stored``: receives the answer, by the identity of the tier."""

    executor: ExecutorHandle
    tier: HashedTier
    waiting: _Waiting
    stored: dict[str, int]


class LookUps:
    """The unanswered look-ups.

    ``place``: called with a request once its answers are there or late; the request may have ended meanwhile.
    """

    def __init__(self, place: Callable[[ClientRequest], None], metrics: Metrics) -> None:
        self._place = place
        self._metrics = metrics
        self._numbers = count(1)
        self._questions: dict[int, _Question] = {}

    def begin(self, request: ClientRequest, executors: Sequence[ExecutorHandle]) -> bool:
        """Look up a request that will be placed on one of ``executors``; return whether it has to wait.

        The prompt itself and the originals of its segments are looked up, unless executors hold almost all of them. Of
        the executors that share a tier's identity, one is asked.
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
        """Return one executor for each identity of a tier, and forget the answers of an earlier placement."""
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
        """Take an answer; late ones are ignored."""
        if message.number < 0:  # a feature of its scheduler has asked
            executor.take_answer(message)
            return
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
        """Place the requests that have waited too long, or for a lost executor."""
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

"""The router: takes requests from the HTTP surface and places each on an engine."""

import asyncio
import logging
from dataclasses import dataclass

from pagewise_scheduler.actors.actor import Actor
from pagewise_scheduler.actors.backlog import Backlog, Homeless, Load, OnTheWay
from pagewise_scheduler.actors.engine import Abort, Engine
from pagewise_scheduler.actors.live_request import LiveRequest, clock
from pagewise_scheduler.actors.placing import Placing
from pagewise_scheduler.core.inspection import MemoryReport, RequestReport
from pagewise_scheduler.core.routing.policies import RoutingName
from pagewise_scheduler.generation import (
    AdmissionError,
    Capacity,
    GenerationError,
    GenerationRequest,
    GenerationStream,
    NoExecutorError,
)
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_DEATHS = 8
"""Executors in a row that may die in steps of one request before it is given up: it may be what kills them."""


@dataclass(slots=True, frozen=True)
class Place:
    """Find an engine for this request."""

    live: LiveRequest


@dataclass(slots=True, frozen=True)
class Expired:
    """This request has waited long enough for an executor."""

    live: LiveRequest


@dataclass(slots=True, frozen=True)
class Joined:
    """An engine is ready."""

    engine: Engine
    capacity_tokens: int
    max_model_len: int
    vocab_size: int


@dataclass(slots=True, frozen=True)
class Left:
    """An engine takes no more requests."""

    engine: Engine


RouterMessage = Place | Abort | Expired | Joined | Left


class Router(Actor[RouterMessage]):
    """Implements ``Gateway``. Requests that no engine can take now wait here, in order, for a bounded time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        max_waiting: int,
        max_waiting_tokens: int,
        patience: float = 60.0,
        routing: RoutingName = "ttft",
    ) -> None:
        super().__init__("router")
        self.tokenizer = tokenizer
        self._metrics = metrics
        self._backlog = Backlog(max_waiting, max_waiting_tokens)
        self._on_the_way = OnTheWay()
        self._patience = patience
        self.placing = Placing(routing, metrics)
        self._engines: dict[Engine, Joined] = {}
        self._homeless = Homeless()
        self._capacity: Capacity | None = None

    # ---- called by others ----------------------------------------------------------------------------

    def capacity(self) -> Capacity | None:
        """The limits that hold now; None until the first executor has joined."""
        return self._capacity

    def submit(self, generation: GenerationRequest) -> GenerationStream:
        """Take a request.

        Raises:
            AdmissionError: no executor could ever hold it, or too many requests wait, or nobody is there to run it.
        """
        capacity = self._capacity
        if capacity is None:
            raise AdmissionError("unavailable", "no executor is ready yet")
        length = len(generation.prompt_token_ids) + generation.max_tokens
        if length > capacity.max_model_len:
            raise AdmissionError(
                "never_fits",
                f"the request may reach {length} tokens, the most that fit are {capacity.max_model_len}",
            )
        live = LiveRequest(generation, self.tokenizer, self._metrics, lambda live: self.tell(Abort(live)))
        self._admit(live)
        self._metrics.prompt_tokens.inc(len(generation.prompt_token_ids))
        return live

    def _admit(self, live: LiveRequest) -> None:
        try:
            key = live.request.key
            self._backlog.admit(Load.of(live), self.waiting, clock(), key=key, of_key=self._waiting_of(key))
        except AdmissionError as error:
            if self._engines:
                self._metrics.requests_refused(error.reason).inc()
                raise
            self._metrics.requests_refused("no_executor").inc()
            raise AdmissionError("unavailable", f"no executor is ready, and {error}") from None
        self._come(live)

    def _come(self, live: LiveRequest) -> None:
        self._on_the_way.enter(live)
        self.tell(Place(live))

    def arrived(self, live: LiveRequest) -> None:
        """A request has arrived at its engine."""
        self._on_the_way.leave(live)

    def give_back(self, requests: list[LiveRequest]) -> None:
        """Let requests of an engine go on elsewhere."""
        for live in requests:
            self._come(live)

    def memory_reports(self, limit: int) -> list[MemoryReport]:
        """What the KV memory of each executor holds, lists cut to ``limit``."""
        return [engine.memory_report(limit) for engine in self._engines]

    def request_report(self, request_id: str, limit: int) -> RequestReport | None:
        """What a request holds, or held if it ended not long ago; None: no engine knows it."""
        for engine in self._engines:
            if (report := engine.request_report(request_id, limit)) is not None:
                return report
        return None

    @property
    def waiting(self) -> Load:
        """What waits, here, at the engines, and on the way to them."""
        load = self._on_the_way.load
        for engine in self._engines:
            queue = engine.scheduler.waiting
            load = load.plus(Load(len(queue), queue.num_prompt_tokens))
        return load

    def _waiting_of(self, key: str) -> Load:
        load = self._on_the_way.of_key(key)
        for engine in self._engines:  # all of them share the accounts of keys
            account = engine.scheduler.waiting.account(key)
            return load.plus(Load(account.num_waiting, account.num_prompt_tokens))
        return load

    def observe_backlog(self) -> None:
        """Called every second or so: how fast the queue moves is what ``Retry-After`` is made of."""
        self._backlog.observe(self.waiting, clock())

    @property
    def engines(self) -> list[Engine]:
        """Engines that are ready."""
        return list(self._engines)

    # ---- the actor -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Place requests until cancelled."""
        while True:
            for message in await self.receive():
                try:
                    self._handle(message)
                except Exception:
                    log.exception("a %s failed", type(message).__name__)
                    if isinstance(message, Place):
                        self._fail(message.live, "it could not be placed")

    def _handle(self, message: RouterMessage) -> None:
        match message:
            case Place(live):
                self._place(live)
            case Abort(live):
                self._abort(live)
            case Expired(live):
                if self._homeless.discard(live, clock()):
                    reason = f"no executor could take the request within {self._patience:g} s"
                    self._fail(live, NoExecutorError(reason))
            case Joined():
                self._engines[message.engine] = message
                self.placing.joined(message.engine)
                self._update_capacity()
                for live in self._homeless.take_all(clock()):
                    self.tell(Place(live))
            case Left(engine):
                self._engines.pop(engine, None)
                self.placing.left(engine)
                self._update_capacity()

    def _place(self, live: LiveRequest) -> None:
        if live.done or live.abandoned:
            self._fail(live, "aborted")
            return
        if live.deaths > MAX_DEATHS:
            self._fail(live, f"{live.deaths} executors in a row died while they ran it")
            return
        request = live.request
        # An engine may have ended before its Left arrives here: what it was given then would never be served.
        able = [
            engine
            for engine in self._engines
            if not engine.ended and engine.scheduler.fits(len(request.prompt_token_ids), request.max_tokens)
        ]
        if not able:
            loop = asyncio.get_running_loop()
            # Executors that come and cannot hold it do not make it wait longer.
            seconds = max(0.0, self._patience - live.homeless_seconds)
            self._homeless.add(live, clock(), loop.call_later(seconds, self.tell, Expired(live)))
            return
        live.homeless_seconds = 0.0
        live.engine = engine = self.placing.place(live, able)
        engine.assign(live)

    def _abort(self, live: LiveRequest) -> None:
        if self._homeless.discard(live, clock()):
            self._fail(live, "aborted")
        elif isinstance(live.engine, Engine):
            live.engine.tell(Abort(live))

    def _fail(self, live: LiveRequest, error: str | GenerationError) -> None:
        self._on_the_way.leave(live)
        live.take_error(error, clock())

    def _update_capacity(self) -> None:
        joined = self._engines.values()
        self._metrics.executors_ready.set(len(self._engines))
        if joined:
            longest = max(min(j.max_model_len, j.capacity_tokens) for j in joined)
            self._capacity = Capacity(len(joined), longest, next(iter(joined)).vocab_size)
        elif self._capacity is not None:
            self._capacity = Capacity(0, self._capacity.max_model_len, self._capacity.vocab_size)

"""The router: bounds what may wait, and gives each request to an executor by the core's routing policies and moves."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import monotonic as clock
from time import perf_counter
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

from pagewise_shared.logs import about
from pagewise_shared.protocol import ROLES, Role

from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.requests.timeline import WaitCause
from pagewise_scheduler.core.routing.executor_view import ExecutorView, Placement
from pagewise_scheduler.core.routing.migrations import Migrations, Move, Roles
from pagewise_scheduler.core.routing.policies import RoutingName, make_routing, place, place_decoding
from pagewise_scheduler.core.scheduling.step import StepOutput
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.admission_error import AdmissionError
from pagewise_scheduler.server.backlog import Backlog, Load, Unplaced
from pagewise_scheduler.server.client_request import ClientRequest
from pagewise_scheduler.server.executor_handle import ExecutorHandle
from pagewise_scheduler.server.look_ups import LookUps

log = logging.getLogger(__name__)

MAX_DEATHS = 8
"""Executors in a row that may die in steps of one request before it is given up: it may be what kills them."""
STARTING_SECONDS = 10.0
"""A scheduler is starting for so long: executors and gateways of the one before are still joining it."""
REJOIN_SECONDS = 1.0
"""Longest that requests wait, in a scheduler that is starting, for the executors that served before."""
Guard = Callable[[ExecutorHandle], AbstractContextManager[None]]
"""What is done to an executor inside of it may fail: then the executor is lost, its requests move on, nothing is
raised."""


class Placer:
    """Chooses executors for requests, and remembers which request is where.

    ``lacks``: a role that some executors need others to have and nobody has, so that they do both; None: there is none.
    """

    def __init__(self, name: RoutingName, metrics: Metrics) -> None:
        self.lacks: Role | None = None
        self._policy = make_routing(name)
        self._metrics = metrics
        self._roles = Roles()
        self._views: dict[ExecutorHandle, ExecutorView] = {}
        self._executors: dict[ExecutorView, ExecutorHandle] = {}
        # Of executors that drain too: requests go on leaving them.
        self._moves: WeakKeyDictionary[ExecutorHandle, Migrations] = WeakKeyDictionary()

    def joined(self, executor: ExecutorHandle) -> None:
        """The executor takes requests from now on."""
        role = cast(Role, executor.hello.role)  # it was looked at when the executor joined
        scheduler, grammars = executor.scheduler, not executor.hello.no_grammars
        self._views[executor] = view = ExecutorView(scheduler, role, grammars=grammars)
        self._executors[view] = executor
        self._look_for_roles()

    def left(self, executor: ExecutorHandle) -> None:
        """The executor takes none any more."""
        if (view := self._views.pop(executor, None)) is not None:
            del self._executors[view]
            self._look_for_roles()

    def _look_for_roles(self) -> None:
        lacks, self.lacks = self.lacks, _lacking({view.role for view in self._executors})
        if self.lacks is not None and self.lacks != lacks:
            log.warning("no executor is there for %s: the others do both", self.lacks)

    def _touch(self, view: ExecutorView) -> None:
        self._executors[view].touch()

    @property
    def num_staying(self) -> int:
        """Requests that decode where their prompt was computed, because nobody else has room."""
        return sum(moves.num_staying for moves in self._moves.values())

    def load(self, executor: ExecutorHandle) -> int:
        """Sequences placed on an executor that have not finished."""
        return self._views[executor].load

    def place(self, live: ClientRequest, able: Sequence[ExecutorHandle]) -> ExecutorHandle:
        """Choose one of the executors that can hold a request, at least one, and remember the request there."""
        began, now = perf_counter(), clock()
        if live.placement is not None:  # it was elsewhere before
            live.placement.end(now)
        views = [self._views[executor] for executor in able]
        placement = place(self._policy, live, views, now, self._roles)
        executor = self._executors[placement.executor]
        if placement.decoder is not None and executor not in self._moves:
            self._moves[executor] = Migrations(placement.executor, self._roles, self._touch)
        if (moves := self._moves.get(executor)) is not None:
            moves.placed(placement)
        if self.lacks is not None:
            self._metrics.requests_without_role(self.lacks).inc()
        return self._placed(live, placement, began)

    def place_decoding(self, live: ClientRequest, view: ExecutorView) -> ExecutorHandle:
        """Remember a request at the executor of ``view``, for which it has left the one that computed its prompt."""
        began, now = perf_counter(), clock()
        assert live.placement is not None
        live.placement.end(now)
        return self._placed(live, place_decoding(live, live.placement.executor, view, now), began)

    def _placed(self, live: ClientRequest, placement: Placement, began: float) -> ExecutorHandle:
        live.placement = placement
        self._metrics.placements(placement.reason).inc()
        self._metrics.placement_predicted_seconds.observe(placement.predicted)
        self._metrics.placement_decision_seconds.observe(perf_counter() - began)
        return self._executors[placement.executor]

    def stepped(self, executor: ExecutorHandle, output: StepOutput) -> list[Move]:
        """A step of an executor has come back. Returns the requests that have left its scheduler."""
        for sequence in output.finished:
            self._roles.ended(len(sequence.output_token_ids))
        moves = self._moves.get(executor)
        return moves.stepped(output, self._executors.keys(), clock()) if moves is not None else []


def could_serve(executor: ExecutorHandle, request: Request) -> bool:
    """Whether an executor could serve a request if it had nothing else to do: it fits, and its segments, its grammar
    and its adapter are of a kind that the executor has."""
    hello, scheduler = executor.hello, executor.scheduler
    return (
        scheduler.fits(len(request.prompt_token_ids), request.max_tokens, request.segments)
        and not (request.segments and hello.no_segments)
        and not (request.params.sampling.grammar and hello.no_grammars)
        and could_adapt(executor, request)
    )


def could_adapt(executor: ExecutorHandle, request: Request) -> bool:
    """Whether an executor could load the adapter of a request, if that has one."""
    adapter = request.params.adapter
    return adapter is None or executor.scheduler.features.adapters.serves(adapter)


def _lacking(present: set[Role]) -> Role | None:
    """The role that nobody has if all executors have the other one."""
    if present in ({"prefill"}, {"decode"}):
        return next(role for role in ROLES if role not in present and role != "both")
    return None


class Capacity(NamedTuple):
    """What the executors that take work could hold: the limits that requests are checked against.

    ``max_model_len``: most tokens (prompt and output) one sequence may reach; 0: no executor has joined yet. It and
    ``vocab_size`` stay known when all have gone. ``no_grammars``: why no output can be made to match a grammar; empty:
    some executor can.
    """

    ready_executors: int = 0
    max_model_len: int = 0
    vocab_size: int = 0
    no_grammars: str = ""


class Router:
    """Places requests. Those that no executor can take now are ``unplaced``, in order, for ``timeout`` seconds at most.
    So are those for which storage is being asked.

    When the scheduler has been restarted, gateways submit their requests again while executors are still coming back,
    each with the KV that it holds. Requests that were placed on whichever comes first would be computed there anew, so
    none is placed until all executors that served before are here, or ``REJOIN_SECONDS`` have passed.
    """

    def __init__(
        self,
        metrics: Metrics,
        guard: Guard,
        *,
        max_waiting: int,
        max_waiting_tokens: int,
        timeout: float = 60.0,
        routing: RoutingName = "ttft",
    ) -> None:
        self.capacity = Capacity()
        self.placer = Placer(routing, metrics)
        self.timeout = timeout
        self._metrics = metrics
        self._guard = guard
        self._backlog = Backlog(max_waiting, max_waiting_tokens)
        self._executors: dict[ExecutorHandle, None] = {}
        self._fits_everywhere = 0  # tokens of a sequence that any executor could hold
        self.unplaced = Unplaced()
        self._started = clock()
        self._expected_executors = 0  # 0: nobody is waited for
        self._expected_until: float | None = None
        self.look_ups = LookUps(self._looked_up, metrics)

    @property
    def executors(self) -> list[ExecutorHandle]:
        """Executors that take requests."""
        return list(self._executors)

    # ---- what may wait -------------------------------------------------------------------------------

    @property
    def waiting(self) -> Load:
        """What waits, here and at the executors."""
        sequences, tokens = self.unplaced.load
        for executor in self._executors:
            scheduler = executor.scheduler
            sequences += scheduler.num_waiting
            tokens += scheduler.waiting.num_prompt_tokens
            if scheduler.features.in_use:
                tokens += scheduler.features.kept().tokens
        return Load(sequences, tokens)

    def _waiting_of(self, key: str) -> Load:
        load, account = self.unplaced.of_key(key), None
        for executor in self._executors:
            if executor.scheduler.features.in_use:
                load = load.plus(Load(*executor.scheduler.features.kept(key)))
            account = executor.scheduler.waiting.account(key)  # all of them share the accounts of keys
        return load if account is None else load.plus(Load(account.num_waiting, account.num_prompt_tokens))

    def observe_backlog(self, now: float) -> None:
        """Called every second or so: how fast the queue moves is what ``Retry-After`` is made of."""
        self._backlog.observe(self.waiting, now)

    def admit(self, requests: Sequence[Request], *, resumed: bool) -> None:
        """Decide whether the prompts of one client's request may come in, all of them or none.

        ``resumed``: they go on from where another scheduler left them; whatever waits, they may.

        Raises:
            AdmissionError: no executor could ever hold one of them, or too much waits.
        """
        new = Load(
            sum(request.params.num_sequences for request in requests),
            sum(len(request.prompt_token_ids) for request in requests),
        )
        if resumed:
            self._backlog.count(new)
            return
        for request in requests:
            self._check(request)
        key = requests[0].params.key
        try:
            self._backlog.admit(new, self.waiting, clock(), key=key, of_key=self._waiting_of(key))
        except AdmissionError as error:
            if error.kind == "invalid":
                raise
            if self._executors:
                self._metrics.requests_refused(error.reason).inc()
                raise
            self._metrics.requests_refused("no_executor").inc()
            raise AdmissionError("unavailable", f"no executor is ready, and {error}", "no_executor") from None

    # ---- executors -------------------------------------------------------------------------------------

    def joined(self, executor: ExecutorHandle) -> None:
        """The executor takes requests from now on, those first that wait here."""
        self._executors[executor] = None
        self.placer.joined(executor)
        self._update_capacity()
        if len(self._executors) >= self._expected_executors:
            self._expected_executors = 0
            self.place(self.unplaced.take_all(clock()))

    def expect(self, executors: int) -> None:
        """So many executors took requests before the scheduler was restarted, as a gateway says that knew it."""
        now = clock()
        if now >= self._started + STARTING_SECONDS or executors <= len(self._executors):
            return
        if self._expected_until is None:
            self._expected_until = now + REJOIN_SECONDS
            log.info("requests wait up to %g s for %d executors that served before", REJOIN_SECONDS, executors)
        if now < self._expected_until:
            self._expected_executors = max(self._expected_executors, executors)

    def left(self, executor: ExecutorHandle) -> None:
        """The executor takes no more requests; harmless the second time."""
        if executor in self._executors:
            del self._executors[executor]
            self.placer.left(executor)
            self._update_capacity()
            self.look_ups.give_up(clock(), executor)

    def _update_capacity(self) -> None:
        self._metrics.executors_ready.set(len(self._executors))
        if not self._executors:
            self.capacity = self.capacity._replace(ready_executors=0)
            return
        schedulers = [executor.scheduler for executor in self._executors]
        lengths = [min(scheduler.max_model_len, scheduler.kv.capacity_tokens) for scheduler in schedulers]
        self._fits_everywhere = min(lengths)
        vocabulary = next(iter(self._executors)).hello.vocab_size
        reasons = [executor.hello.no_grammars for executor in self._executors]
        self.capacity = Capacity(len(self._executors), max(lengths), vocabulary, reasons[0] if all(reasons) else "")

    # ---- requests ------------------------------------------------------------------------------------

    def place(self, requests: Sequence[ClientRequest]) -> None:
        """Give each of these requests to an executor, or let it wait for one."""
        for live in requests:
            self._place_guarded(live, look_up=True)

    def _place_guarded(self, live: ClientRequest, *, look_up: bool = False) -> None:
        try:
            self._place(live, look_up=look_up)
        except Exception:
            log.exception(
                "request %s could not be placed",
                live.request_id,
                extra=about(live.request_id, live.traceparent),
            )
            live.report_failure("internal", "it could not be placed", clock())

    def _looked_up(self, live: ClientRequest) -> None:
        """It is known how much of a request is in storage, or not waited for any more."""
        if self.unplaced.discard(live, clock()):  # else it has been placed, or has ended
            self._place_guarded(live)

    def _check(self, request: Request) -> None:
        """Refuse a request that no executor could ever serve.

        Raises:
            AdmissionError: they lack its grammar, its segments or its adapter, or it is too long.
        """
        executors, params = list(self._executors), request.params
        if params.sampling.grammar and (reason := self.capacity.no_grammars):
            raise AdmissionError("invalid", f"outputs cannot be structured here: {reason}")
        if request.segments and executors:
            self._check_segments(request, executors)
        if executors and not any(could_adapt(executor, request) for executor in executors):
            assert params.adapter is not None
            raise AdmissionError("invalid", f"no executor serves adapters of rank {params.adapter.rank}")
        length, most = len(request.prompt_token_ids) + request.max_tokens, self.capacity.max_model_len
        if most and length > most:
            raise AdmissionError("never_fits", f"the request may reach {length} tokens, the most that fit are {most}")

    @staticmethod
    def _check_segments(request: Request, executors: Sequence[ExecutorHandle]) -> None:
        able = [executor for executor in executors if not executor.hello.no_segments]
        if not able:
            raise AdmissionError("invalid", f"the model cannot have segments: {executors[0].hello.no_segments}")
        size = len(request.prompt_token_ids), request.max_tokens
        if not any(executor.scheduler.fits(*size, request.segments) for executor in able):
            raise AdmissionError(
                "never_fits",
                "the request does not fit beside what its segments are moved from, or one of them with the root and "
                "the rest of a block is longer than the model allows",
            )

    def _place(self, live: ClientRequest, *, look_up: bool) -> None:
        """``look_up``: whether storage is to be asked first; then this is called again when the answer is there."""
        if live.done:
            return
        if live.deaths > MAX_DEATHS:
            live.report_failure("internal", f"{live.deaths} executors in a row died while they ran it", clock())
            return
        able = self._able(live)
        cause: WaitCause | None = None
        if self._expected_executors:
            cause = "restart"
        elif not able:
            cause = "no executor"
        elif look_up and self.look_ups.begin(live, able):
            cause = "storage"
        if cause is not None:
            live.executor = None
            self.unplaced.add(live, clock(), cause)
            return
        live.unplaced_seconds = 0.0
        executor = self.placer.place(live, able)
        with self._guard(executor):
            executor.serve(live)

    def _able(self, live: ClientRequest) -> list[ExecutorHandle]:
        """The executors that a request may be placed on. Those where loads of adapters do not return are the last
        choice, because it would only fail there."""
        params, able = live.params, self.executors
        num_tokens = len(live.prompt_token_ids) + live.max_tokens
        if num_tokens > self._fits_everywhere or live.segments or params.sampling.grammar or params.adapter is not None:
            able = [executor for executor in able if could_serve(executor, live)]
            if (adapter := params.adapter) is not None:
                able = [executor for executor in able if executor.scheduler.features.adapters.can_take(adapter)] or able
        live.short_rope_len = min((one.scheduler.short_rope_len for one in able), default=live.short_rope_len)
        return able

    def stepped(self, executor: ExecutorHandle, output: StepOutput) -> None:
        """A step of an executor has come back: let those go on elsewhere whose prompts are computed."""
        for request, view in self.placer.stepped(executor, output):
            live = executor.let_go(request)
            request.timeline.left(executor.executor_id, "decode", clock())
            if view is None:
                self.place([live])
                continue
            target = self.placer.place_decoding(live, view)
            with self._guard(target):
                target.serve(live)

    def abort(self, live: ClientRequest) -> None:
        """Nobody wants the request any more, wherever it is."""
        while not live.done:  # again if its executor failed instead, and it has moved on
            if self.unplaced.discard(live, clock()) or live.executor is None:
                live.end(clock())
            else:
                with self._guard(live.executor):
                    live.executor.abort(live)

    def finish(self, live: ClientRequest, index: int) -> None:
        """Output ``index`` of a request takes no more tokens: its gateway has found a stop string in its text."""
        if live.executor is not None:
            with self._guard(live.executor):
                live.executor.finish(live, index)
        elif index < len(live.sequences) and not live.sequences[index].finished:
            live.sequences[index].end("stop")
            live.take_finish(live.sequences[index], clock(), tell=False)
            if live.done:
                self.unplaced.discard(live, clock())

    def watch(self, now: float) -> None:
        """Place what has waited in vain for executors to come back, and fail the requests that have waited too long."""
        if self._expected_until is not None and self._expected_executors and now >= self._expected_until:
            log.info("only %d of %d executors are back", len(self._executors), self._expected_executors)
            self._expected_executors = 0
            self.place(self.unplaced.take_all(now))
        self.look_ups.give_up(now)
        for live in self.unplaced.expired(self.timeout, now):
            self.unplaced.discard(live, now)
            live.report_failure("unavailable", f"no executor could take the request within {self.timeout:g} s", now)

"""The router: admits requests to the queues, looks their prompts up in storage tiers, and places each on an executor by
the core's routing policy and migrations."""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from time import monotonic as clock
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from pagewise_shared.logs import about
from pagewise_shared.protocol import MemoryBudget, Role

from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.requests.timeline import WaitCause
from pagewise_scheduler.core.requests.waiting_queue import QueueLoad
from pagewise_scheduler.core.routing.executor_view import ExecutorView, Placement
from pagewise_scheduler.core.routing.migrations import Migrations
from pagewise_scheduler.core.routing.policies import Roles, RoutingName, make_routing, place, place_decoding
from pagewise_scheduler.core.scheduling.step import StepOutput
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.client_request import ClientRequest
from pagewise_scheduler.server.executor_handle import ExecutorHandle
from pagewise_scheduler.server.look_ups import LookUps
from pagewise_scheduler.server.request_limits import AdmissionError, Backlog, Unplaced

if TYPE_CHECKING:
    from pagewise_scheduler.server.key_budgets import KeyBudgets

log = logging.getLogger(__name__)

MAX_DEATHS = 8
"""Executors in a row that may die in steps of one request before the request fails: it may be the cause."""
STARTING_SECONDS = 10.0
"""Seconds after its start in which the scheduler expects executors and gateways of the scheduler before it."""
REJOIN_SECONDS = 1.0
"""Maximum seconds that requests wait for the executors that served before a restart."""
_OTHER_ROLE: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
Guard = Callable[[ExecutorHandle], AbstractContextManager[None]]
"""Makes a context for work on an executor: an exception inside ends its session, its requests move on, nothing is
raised."""


class Capacity(NamedTuple):
    """The capacity of the executors that take work: the limits that gateways check requests against.

    ``max_model_len``: maximum tokens (prompt and output) of a sequence; 0: no executor has joined yet. It and
    ``vocab_size`` stay known after all executors have left. ``no_grammars``: why no output can be constrained by a
    grammar; empty: some executor can do it. ``snapshots``: prompts begin at snapshots of windows or states alone.
    """

    ready_executors: int = 0
    max_model_len: int = 0
    vocab_size: int = 0
    no_grammars: str = ""
    snapshots: bool = False


class Router:
    """Places requests. ``unplaced`` is the queue of requests that no executor can take now, for ``timeout`` seconds at
    most, and of requests that wait for a look-up in storage.

    After a restart of the scheduler, gateways submit their requests again while executors are still coming back, each
    with its KV. The first executor would get all requests, and would have to recompute the KV of the others. So no
    request is placed until all earlier executors are back, or ``REJOIN_SECONDS`` have passed.
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
        self.timeout = timeout
        self._policy = make_routing(routing)
        self._roles = Roles()
        self._missing_role: Role | None = None
        self._metrics = metrics
        self._guard = guard
        self._backlog = Backlog(max_waiting, max_waiting_tokens)
        self._executors: dict[ExecutorView, ExecutorHandle] = {}
        # Draining executors stay in here, because requests still leave them.
        self._migrations: WeakKeyDictionary[ExecutorHandle, Migrations] = WeakKeyDictionary()
        self._fits_everywhere = 0  # tokens of a sequence that any executor could hold
        self.unplaced = Unplaced()
        self._started = clock()
        self._expected_executors = 0  # 0: do not wait
        self._expected_until: float | None = None
        self.look_ups = LookUps(self._looked_up, metrics)
        self.budgets: KeyBudgets | None = None

    @property
    def executors(self) -> list[ExecutorHandle]:
        """Executors that take requests."""
        return list(self._executors.values())

    @property
    def num_staying(self) -> int:
        """Requests that decode where their prompt was computed, because no decode executor has room."""
        return sum(each.num_staying for each in self._migrations.values())

    def set_budgets(
        self,
        gateway: str,
        cache_salt: str | None,
        budgets: tuple[MemoryBudget, ...],
        gateways: Callable[[], Collection[str]],
    ) -> None:
        """Give the owner of a cache salt the budgets of memory that a gateway has reported; see ``KeyBudgets``."""
        if self.budgets is None:
            if not budgets:
                return
            from pagewise_scheduler.server.key_budgets import KeyBudgets

            self.budgets = KeyBudgets(lambda: self.executors, gateways)
        self.budgets.set(gateway, cache_salt, budgets)

    # ---- requests that wait --------------------------------------------------------------------------

    @property
    def waiting(self) -> QueueLoad:
        """The load that waits, here and at the executors."""
        sequences, tokens = self.unplaced.loads.total
        for executor in self._executors.values():
            scheduler = executor.scheduler
            sequences += scheduler.num_waiting
            tokens += scheduler.waiting.num_prompt_tokens
            if scheduler.features.in_use:
                tokens += scheduler.features.kept().tokens
        return QueueLoad(sequences, tokens)

    def _waiting_of(self, key: str) -> QueueLoad:
        load, account = self.unplaced.loads.of(key), None
        for executor in self._executors.values():
            if executor.scheduler.features.in_use:
                load = load.plus(executor.scheduler.features.kept(key))
            account = executor.scheduler.waiting.account(key)  # all executors share the accounts of keys
        return load if account is None else load.plus(QueueLoad(account.num_waiting, account.num_prompt_tokens))

    def observe_backlog(self, now: float) -> None:
        """Measure how fast the queues move, every second or so: Retry-After follows from it."""
        self._backlog.observe(self.waiting, now)

    def admit(self, requests: Sequence[Request], *, resumed: bool) -> None:
        """Admit the prompts of one client's request, all or none. ``resumed``: admit them regardless of the queues.

        Raises:
            AdmissionError: a prompt fits no executor, or too much waits.
        """
        new = QueueLoad(
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
        """Place requests on the executor from now on, and first the unplaced ones."""
        self._executors[executor.view] = executor
        self._update_capacity()
        if len(self._executors) >= self._expected_executors:
            self._expected_executors = 0
            self.place(self.unplaced.take_all(clock()))

    def expect(self, executors: int) -> None:
        """Expect the number of executors that served before the restart, which a gateway knows."""
        now = clock()
        if now >= self._started + STARTING_SECONDS or executors <= len(self._executors):
            return
        if self._expected_until is None:
            self._expected_until = now + REJOIN_SECONDS
            log.info("requests wait up to %g s for %d executors that served before", REJOIN_SECONDS, executors)
        if now < self._expected_until:
            self._expected_executors = max(self._expected_executors, executors)

    def left(self, executor: ExecutorHandle) -> None:
        """Place no more requests on the executor; harmless the second time."""
        if self._executors.pop(executor.view, None) is not None:
            self._update_capacity()
            self.look_ups.give_up(clock(), executor)

    def _update_capacity(self) -> None:
        executors = self.executors
        self._metrics.executors_ready.set(len(executors))
        missing, roles = self._missing_role, {view.role for view in self._executors}
        self._missing_role = _OTHER_ROLE[roles.pop()] if roles in ({"prefill"}, {"decode"}) else None
        if self._missing_role is not None and self._missing_role != missing:
            log.warning("no executor is there for %s: the others do both", self._missing_role)
        if not executors:
            self.capacity = self.capacity._replace(ready_executors=0)
            return
        schedulers = [executor.scheduler for executor in executors]
        lengths = [min(scheduler.max_model_len, scheduler.kv.capacity_tokens) for scheduler in schedulers]
        self._fits_everywhere = min(lengths)
        reasons = [executor.hello.no_grammars for executor in executors]
        no_grammars = reasons[0] if all(reasons) else ""
        vocab_size, snapshots = executors[0].hello.vocab_size, bool(schedulers[0].kv.windows)
        self.capacity = Capacity(len(executors), max(lengths), vocab_size, no_grammars, snapshots)

    # ---- requests ------------------------------------------------------------------------------------

    def place(self, requests: Sequence[ClientRequest]) -> None:
        """Place each request on an executor, or queue it."""
        for live in requests:
            self._place_guarded(live, look_up=True)

    def _place_guarded(self, live: ClientRequest, *, look_up: bool = False) -> None:
        try:
            self._place(live, look_up=look_up)
        except Exception:
            extra = about(live.request_id, live.traceparent)
            log.exception("request %s could not be placed", live.request_id, extra=extra)
            live.report_failure("internal", "it could not be placed", clock())

    def _looked_up(self, live: ClientRequest) -> None:
        """Place a request after its look-ups in storage."""
        if self.unplaced.discard(live, clock()):  # otherwise it has been placed or has ended meanwhile
            self._place_guarded(live)

    def _check(self, request: Request) -> None:
        """Check that some executor could serve a request.

        Raises:
            AdmissionError: none has its grammar, its segments or its adapter, or it is too long.
        """
        executors, params = self.executors, request.params
        if params.sampling.grammar and (reason := self.capacity.no_grammars):
            raise AdmissionError("invalid", f"outputs cannot be structured here: {reason}")
        if request.segments and executors:
            self._check_segments(request, executors)
        if executors and not any(executor.could_adapt(request) for executor in executors):
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
        """``look_up``: ask storage first, and place the request after the answer."""
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
        self._choose(live, able)

    def _choose(self, live: ClientRequest, able: Sequence[ExecutorHandle]) -> None:
        began, now = perf_counter(), clock()
        if live.placement is not None:  # it was elsewhere before
            live.placement.end(now)
        placement = place(self._policy, live, [executor.view for executor in able], now, self._roles)
        executor = self._executors[placement.executor]
        if placement.decoder is not None and executor not in self._migrations:
            self._migrations[executor] = Migrations(placement.executor, self._roles, self._touch)
        if (migrations := self._migrations.get(executor)) is not None:
            migrations.placed(placement)
        if self._missing_role is not None:
            self._metrics.requests_without_role(self._missing_role).inc()
        self._serve(live, placement, began)

    def _touch(self, view: ExecutorView) -> None:
        self._executors[view].touch()

    def _serve(self, live: ClientRequest, placement: Placement, began: float) -> None:
        """``began``: the start of the decision, in seconds of ``perf_counter``."""
        live.placement = placement
        self._metrics.placements(placement.reason).inc()
        self._metrics.placement_predicted_seconds.observe(placement.predicted)
        self._metrics.placement_decision_seconds.observe(perf_counter() - began)
        executor = self._executors[placement.executor]
        with self._guard(executor):
            executor.serve(live)
        for other in self.executors if live.params.reuse.session else ():
            with self._guard(other):
                for feature in other.scheduler.features.in_use if other is not executor else ():
                    feature.placed_elsewhere(live)

    def _able(self, live: ClientRequest) -> list[ExecutorHandle]:
        """Return the executors that could serve a request; with a stuck adapter loader only if there is no other."""
        params, able = live.params, self.executors
        num_tokens = len(live.prompt_token_ids) + live.max_tokens
        if num_tokens > self._fits_everywhere or live.segments or params.sampling.grammar or params.adapter is not None:
            able = [executor for executor in able if executor.could_serve(live)]
            if (adapter := params.adapter) is not None:
                able = [executor for executor in able if executor.scheduler.features.adapters.can_take(adapter)] or able
        live.short_rope_len = min((one.scheduler.short_rope_len for one in able), default=live.short_rope_len)
        return able

    def stepped(self, executor: ExecutorHandle, output: StepOutput) -> None:
        """Apply the output of an executor's step, and place the requests that leave it."""
        for sequence in output.finished:
            self._roles.ended(len(sequence.output_token_ids))
        if (migrations := self._migrations.get(executor)) is None:
            return
        for request, view in migrations.stepped(output, self._executors.keys(), clock()):
            live = executor.release(request)
            request.timeline.left(executor.executor_id, "decode", clock())
            if view is None:
                self.place([live])
                continue
            began, now = perf_counter(), clock()
            assert live.placement is not None
            live.placement.end(now)
            self._serve(live, place_decoding(live, live.placement.executor, view, now), began)

    def abort(self, live: ClientRequest) -> None:
        """Abort a request, wherever it is."""
        while not live.done:  # again if the executor failed inside the guard, and the request has moved on
            if self.unplaced.discard(live, clock()) or live.executor is None:
                live.end(clock())
            else:
                with self._guard(live.executor):
                    live.executor.abort(live)

    def finish(self, live: ClientRequest, index: int) -> None:
        """Finish output ``index`` of a request: its gateway has found a stop string in its text."""
        if live.executor is not None:
            with self._guard(live.executor):
                live.executor.finish(live, index)
        elif index < len(live.sequences) and not live.sequences[index].finished:
            live.sequences[index].end("stop")
            live.take_finish(live.sequences[index], clock(), report=False)
            if live.done:
                self.unplaced.discard(live, clock())

    def tick(self, now: float) -> None:
        """Stop waiting for executors that do not come back; fail the requests that have waited too long."""
        if self._expected_until is not None and self._expected_executors and now >= self._expected_until:
            log.info("only %d of %d executors are back", len(self._executors), self._expected_executors)
            self._expected_executors = 0
            self.place(self.unplaced.take_all(now))
        self.look_ups.give_up(now)
        if self.budgets is not None:
            self.budgets.apply()
        for live in self.unplaced.expired(self.timeout, now):
            self.unplaced.discard(live, now)
            live.report_failure("unavailable", f"no executor could take the request within {self.timeout:g} s", now)

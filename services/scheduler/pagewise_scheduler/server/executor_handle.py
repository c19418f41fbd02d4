"""An executor as the coordinator knows it: its scheduler, which plans at most two steps ahead, and its requests."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from time import monotonic as clock
from typing import cast

from pagewise_shared.errors import ProtocolError
from pagewise_shared.logs import BoundedLog, about, printable
from pagewise_shared.protocol import (
    CancelCopies,
    Copied,
    Hello,
    LookUp,
    Message,
    Role,
    SetStoredBudgets,
    StepResult,
    StoredBudget,
    TokenLogprobs,
    Welcome,
    tier_name,
)

from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.requests.timeline import Reset
from pagewise_scheduler.core.routing.executor_view import ExecutorView
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.scheduling.step import StepMismatchError, StepOutput, failed
from pagewise_scheduler.core.tiers.hashed import HashedTier
from pagewise_scheduler.core.tiers.stored_drops import drop_salt
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.client_request import ClientRequest, OutputBuilder
from pagewise_scheduler.server.executor_stats import ExecutorStats
from pagewise_scheduler.server.sessions import HEARTBEAT_MS, Loss

log = logging.getLogger(__name__)

MAX_STEPS_IN_FLIGHT = 2

_MAX_ERROR_TEXT = 1000


class Life(Enum):
    """SERVING -> DRAINING -> STOPPING -> DRAINED -> LOST; each state may go to LOST at once.

    SERVING: it takes requests. DRAINING: it takes no new requests, and continues with its own. STOPPING: it gets no
    more plans, and steps in flight return. DRAINED: its requests have moved, and others may still read its cache. LOST:
    it is gone.
    """

    SERVING = auto()
    DRAINING = auto()
    STOPPING = auto()
    DRAINED = auto()
    LOST = auto()


class ExecutorLostError(Exception):
    """An executor cannot continue; the text has the reason. It may join again."""


class ExecutorHandle:
    """One executor: its scheduler (memory and queues), its view for routing, its requests, and its steps in flight.

    ``send``: sends it a message. ``next_epoch``: begins a higher epoch, so that earlier messages are dropped.
    ``agenda``: executors to plan for; the handle adds itself. ``oldest_step_time``: when the oldest step in flight
    became the oldest, in seconds of ``clock``. ``num_tasks``: of its event loop; ``counted``: the counters of its last
    heartbeat.
    """

    def __init__(
        self,
        hello: Hello,
        scheduler: Scheduler,
        send: Callable[[Message], None],
        next_epoch: Callable[[], int],
        agenda: dict["ExecutorHandle", None],
        metrics: Metrics,
    ) -> None:
        self.hello = hello
        self.executor_id = hello.executor_id
        self.scheduler = scheduler
        role = cast(Role, hello.role)  # ``hello_error`` has checked it
        self.view = ExecutorView(scheduler, role, grammars=not hello.no_grammars)
        self.life = Life.SERVING
        self.num_tasks, self.counted = 0, Counter[str]()
        self.oldest_step_time: float | None = None
        self._reset: Reset | None = None
        self._send, self._next_epoch = send, next_epoch
        self._agenda = agenda
        self._metrics = metrics
        self._live: dict[str, ClientRequest] = {}
        self._complaints = BoundedLog(log)
        self.stats = ExecutorStats(hello, metrics)
        scheduler.recoveries.emit = self.stats.add_recovery
        for tier in hello.tiers:
            scheduler.costs.tiers[tier.number].load.dtype = tier.dtype

    def touch(self) -> None:
        """Plan for this executor at the end of the round."""
        self._agenda[self] = None

    # ---- requests ------------------------------------------------------------------------------------

    def could_serve(self, request: Request) -> bool:
        """Whether the executor could serve a request if it were idle: its length, segments, grammar and adapter."""
        return (
            self.scheduler.fits(len(request.prompt_token_ids), request.max_tokens, request.segments)
            and not (request.segments and self.hello.no_segments)
            and not (request.params.sampling.grammar and self.hello.no_grammars)
            and self.could_adapt(request)
        )

    def could_adapt(self, request: Request) -> bool:
        """Whether the executor could load the adapter of a request, if it has one."""
        adapter = request.params.adapter
        return adapter is None or self.scheduler.features.adapters.serves(adapter)

    def serve(self, live: ClientRequest) -> None:
        """Add a request."""
        live.executor = self
        live.placed(self.executor_id, clock())
        self._live[live.request_id] = live
        self.touch()
        try:
            self.scheduler.add(live)
        except ValueError as error:
            del self._live[live.request_id]
            live.report_failure("internal", str(error), clock())

    def serves(self, request: Request) -> bool:
        """Whether the request runs or waits here."""
        return self._live.get(request.request_id) is request

    def abort(self, live: ClientRequest) -> None:
        """Abort a request, and free its blocks."""
        if self.serves(live):
            self.scheduler.abort(live.request_id)
            del self._live[live.request_id]
            self.touch()
        live.end(clock())

    def finish(self, live: ClientRequest, index: int) -> None:
        """Finish output ``index`` for its gateway, and drop the tokens that were sampled beyond its end."""
        if not self.serves(live) or live.params.beam is not None or index >= len(live.sequences):
            return
        sequence = live.sequences[index]
        if not sequence.finished:
            self.scheduler.finish(sequence, "stop")
            self._finish(sequence, clock(), report=False)
            self.touch()

    # ---- steps ---------------------------------------------------------------------------------------

    def plan_ahead(self) -> None:
        """Send plans while there is work and fewer than ``MAX_STEPS_IN_FLIGHT`` steps are in flight."""
        if self.life in (Life.SERVING, Life.DRAINING):
            self._send_messages()
            while self.scheduler.num_in_flight < MAX_STEPS_IN_FLIGHT:
                now = clock()
                if (plan := self.scheduler.schedule(now)) is None:
                    break
                if self.scheduler.num_in_flight == 1:
                    self.oldest_step_time = now
                self._send(plan)
            self._send_messages()  # planning may have requested adapters or grammars
        self._cancel_fetches()

    def _send_messages(self) -> None:
        for message in self.scheduler.features.messages(clock()):
            self._send(message)

    def take_result(self, result: StepResult, tokens: Sequence[int]) -> StepOutput | None:
        """Apply the result of the oldest step in flight; return None if the step failed. ``tokens``: of the result.

        Raises:
            ExecutorLostError: the result does not answer that step.
        """
        self.touch()
        if result.error is not None:
            oldest = next(iter(self.scheduler.steps_in_flight), None)
            self._log_step(result.step, oldest.requests if oldest is not None else (), "has failed")
            self._start_over(f"{printable(result.error.kind)}: {printable(result.error.message, _MAX_ERROR_TEXT)}")
            return None
        if result.failures:
            self._fail_outputs(result)
        try:
            output = self.scheduler.update(result, tokens)
        except (StepMismatchError, ProtocolError) as error:
            # The requests are not the cause, so smaller steps would not help: the executor has to join again.
            self._metrics.frames_dropped("out_of_step").inc()
            raise ExecutorLostError(f"it is out of step: {error}") from error
        now = clock()
        self.oldest_step_time = now if self.scheduler.num_in_flight else None
        if self._reset is not None:
            self._reset.ended, self._reset = now, None
        self._metrics.iteration_tokens.observe(output.num_tokens)
        self.stats.num_generated += output.num_sent
        self._take_output(output, now)
        return output

    def _take_output(self, output: StepOutput, now: float) -> None:
        for request, entries in output.prompt_logprobs:
            if (live := self._live.get(request.request_id)) is not None:
                live.take_prompt_logprobs(entries)
        for sequence in output.begun:
            sequence.request.timeline.goes_on(now)
            if sequence.request.params.beam is None:
                self._answered(self._live[sequence.request.request_id], now)
        if output.logprobs:
            self._report_logprobs(output.logprobs)
        for sequence in output.finished:
            if sequence.request.params.beam is not None:
                self._report_beam_output(sequence, now)
            self._finish(sequence, now)

    def _fail_outputs(self, result: StepResult) -> None:
        """Fail the requests of sequences that cannot continue, before their invalid tokens are reported."""
        step = next(iter(self.scheduler.steps_in_flight), None)
        for sequence, failure in failed(step, result, self._live):
            self._metrics.grammar_failures.inc()
            message = printable(failure.message, _MAX_ERROR_TEXT)
            live = self._live[sequence.request.request_id]
            live.log(logging.WARNING, f"fails: {message}")
            self.scheduler.abort(sequence.request.request_id)
            del self._live[live.request_id]
            live.report_failure("invalid" if failure.invalid else "internal", message, clock())

    def take_copied(self, copied: Copied) -> None:
        """Apply a report of copies."""
        self.touch()
        if copied.error is not None:
            message = printable(copied.error.message)
            running = {sequence.request.owner for sequence in self.scheduler.running}
            self._log_step(copied.step, running, "requested copies that failed")
            self._start_over(f"copies of step {copied.step} failed: {message}", shrink_steps=False)
            return
        try:
            self.scheduler.copied(copied)
        except ProtocolError as error:
            self._metrics.frames_dropped("undecodable").inc()
            self._start_over(str(error), shrink_steps=False)

    def take_answer(self, message: Message, error: str = "") -> None:
        """Apply the answer to a feature's message. ``error``: for the requests that fail with it."""
        self.touch()
        for request in self.scheduler.features.take(message, clock()):
            self.fail(request, printable(error, _MAX_ERROR_TEXT))

    def _answered(self, live: ClientRequest, now: float) -> None:
        """Note that a request, or one of its outputs, has its first token here."""
        if (placement := live.placement) is not None and placement.waits:
            self._metrics.placement_answered(placement.predicted, now - placement.time)
        live.started(now)

    def _report_logprobs(self, logprobs: dict[RequestSequence, TokenLogprobs]) -> None:
        by_gateway: dict[OutputBuilder, dict[int, TokenLogprobs]] = {}
        for sequence, entry in logprobs.items():
            live = self._live[sequence.request.request_id]
            by_gateway.setdefault(live.outputs, {})[live.stream + sequence.index] = entry
        for outputs, of_streams in by_gateway.items():
            outputs.add_logprobs(of_streams)

    def _report_beam_output(self, sequence: RequestSequence, now: float) -> None:
        """Report an output of a beam search: all its tokens at once."""
        live, tokens = self._live[sequence.request.request_id], sequence.output_token_ids
        self._answered(live, now)
        live.outputs.streams += [live.stream + sequence.index] * len(tokens)
        live.outputs.tokens += tokens
        self.stats.num_generated += len(tokens)

    def _finish(self, sequence: RequestSequence, now: float, *, report: bool = True) -> None:
        live = self._live[sequence.request.request_id]
        if live.unfinished == 1:
            del self._live[live.request_id]
        live.take_finish(sequence, now, report=report)

    def _start_over(self, reason: str, *, shrink_steps: bool = True) -> None:
        """Reset the executor under a new epoch after a failure, and recompute from the tokens."""
        self._metrics.step_errors.inc()
        log.warning("%s: starting over%s: %s", self.executor_id, " with smaller steps" if shrink_steps else "", reason)
        self.oldest_step_time, now = None, clock()
        self._reset = self._reset or Reset(now, self.executor_id)
        for live in self._live.values():
            live.timeline.interrupted(self._reset, now)
        for request in self.scheduler.fail(self._next_epoch(), shrink_steps=shrink_steps):
            self._live[request.request_id].log(logging.ERROR, f"cannot run even alone: {reason}")
            self.fail(request, f"the executor could not run it: {reason}")
        self._send(self.welcome())

    def _log_step(self, step: int, requests: Iterable[Request], text: str) -> None:
        """Log a step with its requests: the executor's own log has its epoch and number only."""
        epoch, names = self.scheduler.epoch, sorted(request.request_id for request in requests)
        fields = about(executor=self.executor_id, epoch=epoch, step=step, request_ids=names)
        where, of = f"{self.executor_id}: step {step} of epoch {epoch}", ", ".join(names) or "none"
        log.warning("%s %s; its requests: %s", where, text, of, extra=fields)

    def fail(self, request: Request, message: str) -> None:
        """Fail a request that has left the scheduler."""
        live = self._live[request.request_id]
        del self._live[live.request_id]
        live.report_failure("internal", message, clock())

    def welcome(self, *, keeps_blocks: bool = False, hello: int = 0) -> Welcome:
        """Return the message that admits the executor under the scheduler's current epoch."""
        limits = self.scheduler.limits
        return Welcome(
            epoch=self.scheduler.epoch,
            max_num_seqs=limits.configured_num_seqs,
            max_num_batched_tokens=limits.configured_num_batched_tokens,
            heartbeat_ms=HEARTBEAT_MS,
            keeps_blocks=keeps_blocks,
            hello=hello,
        )

    # ---- copies --------------------------------------------------------------------------------------

    def _cancel_fetches(self) -> None:
        for cancelled in self.scheduler.recoveries.transfers.take_cancelled():
            self._send(CancelCopies(self.scheduler.epoch, *cancelled))

    def cancel_late_fetches(self, now: float) -> None:
        """Cancel copies that take too long: the executor reports their blocks as bad, and sequences recompute them."""
        for late in self.scheduler.recoveries.transfers.late(now):
            place = printable(late.peer) if late.peer else tier_name(late.tier)
            self._complaints.warning("%s: copies with %s take too long: cancelled", self.executor_id, place)
            self._send(CancelCopies(self.scheduler.epoch, *late))

    def peer_lost(self, endpoint: str) -> None:
        """Stop fetching from the executor with this block endpoint, which is lost."""
        self.scheduler.peer_lost(endpoint)
        self.touch()

    def look_up(self, number: int, tier: int, cache_salt: str | None, tokens: bytes) -> None:
        """Ask the executor how much of a prefix one of its tiers holds; it answers with ``Found``."""
        root = self.scheduler.kv.pool.tree.root_hash(cache_salt)
        self._send(LookUp(self.scheduler.epoch, number, tier, root, tokens))

    def drop_salt(self, number: int, tier: HashedTier, salt: str) -> None:
        """Have the executor delete the blocks of a cache salt in a tier; it answers with ``StoredDropped``."""
        self._send(drop_salt(self.scheduler, tier, number, salt))

    def set_stored_budgets(self, tier: int, budgets: tuple[StoredBudget, ...]) -> None:
        """Have the executor evict blocks of a tier without ids by these budgets."""
        self._send(SetStoredBudgets(self.scheduler.epoch, tier, budgets))

    # ---- leaving -------------------------------------------------------------------------------------

    def release(self, request: Request) -> ClientRequest:
        """Remove a request that continues on another executor after its prefill."""
        self._metrics.request_moves("decode").inc()
        return self._live.pop(request.request_id)

    def release_all(self) -> list[ClientRequest]:
        """Remove all requests of a drained executor once no step is in flight; its cache stays readable."""
        self.scheduler.release_all()
        self.life = Life.DRAINED
        moved, self._live = list(self._live.values()), {}
        self._metrics.request_moves("left").inc(len(moved))
        return moved

    def lose(self, loss: Loss) -> list[ClientRequest]:
        """Close a lost executor; return its requests, which continue elsewhere from their tokens."""
        self.life = Life.LOST
        self._agenda.pop(self, None)
        try:
            self.stats.record(self.scheduler)
            if not loss.expected:
                self._count_deaths(loss)
            self.scheduler.features.close()
            self.scheduler.release_all()
        except Exception:  # the core itself may have failed: the requests continue from their tokens all the same
            log.exception("the scheduler of %s cannot be closed", self.executor_id)
        self.scheduler.kv.close()
        self._send, self._next_epoch = lambda message: None, lambda: 0  # breaks the cycle through the session
        moved, self._live = list(self._live.values()), {}
        self._metrics.request_moves("left" if loss.expected else "lost").inc(len(moved))
        return moved

    def _count_deaths(self, loss: Loss) -> None:
        """Count the death of an executor for the requests in its last steps, and reject the drafts in these steps.

        If the scheduler itself failed, the cause may be any request.
        """
        suspects = set[Request](self.scheduler.requests if loss is Loss.FAILED else ())
        for step in self.scheduler.steps_in_flight:
            step.give_up_drafts()
            suspects |= step.requests
            self._log_step(step.step, step.requests, "has not come back")
        for live in self._live.values():
            if live in suspects:
                live.count_death()

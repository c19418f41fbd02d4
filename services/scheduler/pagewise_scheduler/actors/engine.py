"""The engine: one executor's scheduler, kept at most two steps ahead of it."""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from pagewise_shared.errors import ProtocolError
from pagewise_shared.logs import BoundedLog, printable
from pagewise_shared.protocol import CancelCopies, Copied, StepResult, Welcome, encode

from pagewise_scheduler.actors.actor import Actor
from pagewise_scheduler.actors.live_request import LiveRequest, clock
from pagewise_scheduler.actors.memory_watch import MemoryWatch
from pagewise_scheduler.core.inspection import MemoryReport, RequestReport, later, memory_report, request_report
from pagewise_scheduler.core.requests.request import Request, Sequence
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.scheduling.step import StepMismatchError
from pagewise_scheduler.metrics import Metrics

log = logging.getLogger(__name__)

MAX_STEPS_IN_FLIGHT = 2
HEARTBEAT_MS = 1000

_RECENT = 256
"""Requests whose memory is remembered after they have ended."""
_RECENT_LIMIT = 64
"""Sequences and events that are remembered of each."""
_MAX_ERROR_TEXT = 1000


@dataclass(slots=True, frozen=True)
class Serve:
    """Take this request on."""

    live: LiveRequest


@dataclass(slots=True, frozen=True)
class Abort:
    """Nobody reads this request any more."""

    live: LiveRequest


@dataclass(slots=True, frozen=True)
class Lost:
    """The executor is gone: hand everything back and end. ``died``: it did not leave by itself."""

    reason: str
    died: bool = True


@dataclass(slots=True, frozen=True)
class PeerLost:
    """The executor with this block endpoint lends no blocks any more."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class GivenBack:
    """Blocks that were lent are back: there may be room again."""


@dataclass(slots=True, frozen=True)
class CopiesLate:
    """Copies should have been confirmed by now: stop fetches that are among them."""


@dataclass(slots=True, frozen=True)
class HandOver:
    """Plan nothing more; once no step is in flight, let all requests go on elsewhere. The cache stays."""


EngineMessage = Serve | Abort | StepResult | Copied | Lost | PeerLost | GivenBack | CopiesLate | HandOver


class ExecutorLink(Protocol):
    """The engine's way to its executor."""

    async def send(self, frame: bytes) -> bool:
        """Send one frame; False if the executor cannot be reached."""
        ...

    def next_epoch(self) -> int:
        """A higher epoch than any before; results of older ones are dropped from now on."""
        ...


class RequestSink(Protocol):
    """Where an engine that ends leaves what it could not finish."""

    def arrived(self, live: LiveRequest) -> None:
        """Told of each request that an engine was given, once it has it."""
        ...

    def give_back(self, requests: list[LiveRequest]) -> None:
        """Let these requests go on elsewhere, from their tokens."""
        ...


class Engine(Actor[EngineMessage]):
    """Owns the scheduler of one executor. Ends when the executor is lost, and gives back what was not finished.

    ``ended``: it takes no requests any more. ``oldest_step_time``: when the oldest step in flight was sent or became
    the oldest, in seconds of ``clock``; None if none is in flight. ``moved``: the requests that it has handed over,
    None before that.
    """

    def __init__(
        self,
        executor_id: str,
        scheduler: Scheduler,
        link: ExecutorLink,
        sink: RequestSink,
        metrics: Metrics,
        bytes_per_block: int = 0,
    ) -> None:
        super().__init__(f"engine {executor_id}")
        self.executor_id = executor_id
        self.scheduler = scheduler
        self.oldest_step_time: float | None = None
        self.ended = False
        self._link = link
        self._sink = sink
        self._metrics = metrics
        self._live: dict[str, LiveRequest] = {}
        self._recent: OrderedDict[str, tuple[RequestReport, float]] = OrderedDict()
        self._complaints = BoundedLog(log)
        self._watch = MemoryWatch(executor_id, scheduler, metrics, bytes_per_block)
        self._lost: str | None = None
        self._leaving = False
        self.moved: list[LiveRequest] | None = None
        self._died = True

    def assign(self, live: LiveRequest) -> None:
        """Let the engine serve this request; called by the router."""
        self.tell(Serve(live))

    @property
    def oldest_copy_time(self) -> float | None:
        """When a copy to or from the host or a peer that has not been confirmed should have been, the first of them;
        None: there is none.

        """
        return self.scheduler.recoveries.transfers.oldest_due

    async def run(self) -> None:
        """Serve until the executor is lost."""
        try:
            while self._lost is None:
                for message in await self.receive():
                    await self._handle(message)
                if self._lost is None:
                    if self._leaving:
                        self._move_all()
                    else:
                        await self._plan_ahead()
                    await self._cancel_fetches()
                self._watch.report()
        except Exception:
            log.exception("%s failed; its requests move on", self.name)
        finally:
            self._hand_over()

    async def _handle(self, message: EngineMessage) -> None:
        match message:
            case Serve(live):
                self._serve(live)
            case Abort(live):
                self._abort(live)
            case StepResult():
                await self._take_result(message)
            case Copied():
                await self._take_copied(message)
            case Lost(reason, died):
                self._lost, self._died = reason, died
            case PeerLost(endpoint):
                self.scheduler.peer_lost(endpoint)
            case CopiesLate():
                await self._cancel_late_fetches()
            case GivenBack():
                pass  # planning follows every round of messages
            case HandOver():
                self._leaving = True

    def _move_all(self) -> None:
        """Let all requests go on elsewhere, once what was computed for them has come back."""
        if self.scheduler.num_in_flight or self.moved is not None:
            return
        self.scheduler.release_all()
        self.moved, self._live = list(self._live.values()), {}
        self._metrics.request_moves("left").inc(len(self.moved))
        self._sink.give_back(self.moved)

    def serves(self, live: LiveRequest) -> bool:
        """Whether the request has arrived here and is being served."""
        return live.request.request_id in self._live

    def _serve(self, live: LiveRequest) -> None:
        if self.moved is not None:
            self._sink.give_back([live])
            return
        self._sink.arrived(live)
        if live.done or live.abandoned:
            live.take_error("aborted", clock())
            return
        self._live[live.request.request_id] = live
        try:
            self.scheduler.add(live.request)
        except ValueError as error:
            self._forget(live)
            live.take_error(str(error), clock())

    def _abort(self, live: LiveRequest) -> None:
        now = clock()
        for sequence in self.scheduler.abort(live.request.request_id):
            live.take_finish(sequence, now)
        if live.request.request_id in self._live:
            self._forget(live)

    async def _plan_ahead(self) -> None:
        """Send plans while there is something to run and room in flight."""
        while self.scheduler.num_in_flight < MAX_STEPS_IN_FLIGHT:
            now = clock()
            plan = self.scheduler.schedule(now)
            if plan is None:
                return
            if self.scheduler.num_in_flight == 1:
                self.oldest_step_time = now
            if not await self._link.send(encode(plan)):
                self._lost = "it cannot be reached"
                return

    async def _cancel_fetches(self) -> None:
        """Tell the executor which fetches nobody waits for any more."""
        for step, peer in self.scheduler.recoveries.take_cancelled():
            await self._link.send(encode(CancelCopies(self.scheduler.epoch, step, peer)))

    async def _cancel_late_fetches(self) -> None:
        """The executor then tells what has not come, and those who wait for it go on without."""
        for step, peer in self.scheduler.recoveries.transfers.late_peers(clock()):
            self._complaints.warning("%s: a fetch from %s takes too long, cancelling it", self.name, printable(peer))
            await self._link.send(encode(CancelCopies(self.scheduler.epoch, step, peer)))

    async def _take_result(self, result: StepResult) -> None:
        if result.epoch != self.scheduler.epoch:
            self._metrics.frames_dropped("stale_epoch").inc()
            return
        if result.error is not None:
            await self._start_over(
                f"{printable(result.error.kind)}: {printable(result.error.message, _MAX_ERROR_TEXT)}"
            )
            return
        try:
            output = self.scheduler.update(result)
        except (StepMismatchError, ProtocolError) as error:
            # Not the request's fault, so it is not tried in smaller steps: the executor may join anew.
            self._metrics.frames_dropped("out_of_step").inc()
            log.warning("%s is out of step: %s", self.name, error)
            self._lost = "it is out of step"
            return
        now = clock()
        self.oldest_step_time = now if self.scheduler.num_in_flight else None
        self._metrics.iteration_tokens.observe(output.num_tokens)
        self._metrics.generation_tokens.inc(len(output.tokens))
        for request, entries in output.prompt_logprobs:
            if (live := self._live.get(request.request_id)) is not None:
                live.take_prompt_logprobs(entries)
        live_requests, logprobs = self._live, output.logprobs
        for sequence, token in zip(output.sequences, output.tokens, strict=True):
            live = live_requests[sequence.request.request_id]
            stop = live.take_token(sequence, token, logprobs.get(sequence), now)
            if stop is not None and not sequence.finished:
                self.scheduler.finish(sequence, "stop", stop)
                output.finished.append(sequence)
        for sequence in output.finished:
            self._finish(sequence, now)

    async def _take_copied(self, message: Copied) -> None:
        if message.epoch != self.scheduler.epoch:
            self._metrics.frames_dropped("stale_epoch").inc()
        elif message.error is not None:
            await self._start_over(
                f"copies of step {message.step} failed: {printable(message.error.message)}", blame_step=False
            )
        else:
            try:
                self.scheduler.copied(message)
            except ProtocolError as error:
                self._metrics.frames_dropped("undecodable").inc()
                await self._start_over(str(error), blame_step=False)

    def _finish(self, sequence: Sequence, now: float) -> None:
        live = self._live[sequence.request.request_id]
        live.take_finish(sequence, now)
        if live.done:
            self._forget(live)

    def memory_report(self, limit: int) -> MemoryReport:
        """What the executor's KV memory holds, lists cut to ``limit``."""
        return memory_report(self.executor_id, self.scheduler, clock(), limit)

    def request_report(self, request_id: str, limit: int) -> RequestReport | None:
        """What a request holds, or held when it ended if it is one of the last; None: it is not known here."""
        live = self._live.get(request_id)
        if live is not None:
            return request_report(live.request, self.scheduler, clock(), limit)
        ended = self._recent.get(request_id)
        return later(ended[0], clock() - ended[1]) if ended is not None else None

    def _forget(self, live: LiveRequest) -> None:
        now = clock()
        self._recent[live.request.request_id] = request_report(live.request, self.scheduler, now, _RECENT_LIMIT), now
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        del self._live[live.request.request_id]

    async def _start_over(self, reason: str, *, blame_step: bool = True) -> None:
        """Something failed or went out of step: reset the executor under a new epoch and recompute from the tokens."""
        self._metrics.step_errors.inc()
        log.warning("%s: starting over%s: %s", self.name, " with smaller steps" if blame_step else "", reason)
        epoch = self._link.next_epoch()
        self.oldest_step_time = None
        failed: list[Request] = self.scheduler.fail(epoch, blame_step=blame_step)
        for request in failed:
            log.error("%s: request %s cannot run even alone: %s", self.name, request.request_id, reason)
            live = self._live[request.request_id]
            self._forget(live)
            live.take_error(f"the executor could not run it: {reason}", clock())
        if not await self._link.send(encode(self.welcome())):
            self._lost = "it cannot be reached"

    def welcome(self, *, keeps_blocks: bool = False, hello: int = 0) -> Welcome:
        """What admits the executor under the scheduler's current epoch."""
        limits = self.scheduler.limits
        return Welcome(
            epoch=self.scheduler.epoch,
            max_num_seqs=limits.configured_num_seqs,
            max_num_batched_tokens=limits.configured_num_batched_tokens,
            heartbeat_ms=HEARTBEAT_MS,
            keeps_blocks=keeps_blocks,
            hello=hello,
        )

    def _hand_over(self) -> None:
        self.ended = True
        try:
            self._blame()
            self.scheduler.release_all()
        except Exception:  # what has failed may be the core itself: its requests go on from their tokens all the same
            log.exception("%s cannot be put away", self.name)
        live, self._live = list(self._live.values()), {}
        live += [message.live for message in self.leftover() if isinstance(message, Serve)]
        self._metrics.request_moves("lost" if self._died else "left").inc(len(live))
        self._sink.give_back(live)

    def _blame(self) -> None:
        """Note who may be why it ended: those in the steps that it died in, all of them if it failed on this side."""
        suspects = set(self.scheduler.requests) if self._lost is None else set()
        if self._lost is not None and self._died:
            suspects = {request for step in self.scheduler.steps_in_flight for request in step.requests}
        for live in self._live.values():
            if live.request in suspects:
                live.blame()

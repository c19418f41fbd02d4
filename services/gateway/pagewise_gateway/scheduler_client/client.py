"""The gateway's client of the scheduler: it submits requests, and submits them again after a scheduler's restart."""

import asyncio
import contextlib
import logging
from time import monotonic
from uuid import uuid4

from msgspec.structs import replace
from pagewise_shared.curve import Keys
from pagewise_shared.logs import about
from pagewise_shared.protocol import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    AdapterAnswer,
    AdapterState,
    Advised,
    FinishStream,
    FleetState,
    GatewayHello,
    MetricsSnapshot,
    Outputs,
    QueryAnswer,
    RegisterAdapter,
    RequestRefused,
    Submit,
    encode,
)
from pagewise_shared.protocol.limits import MAX_SUBMIT_BYTES

from pagewise_gateway.generation import AdmissionError, AnswerOptions, Capacity, GenerationError, Held
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.repeats import RepeatWatch
from pagewise_gateway.scheduler_client.adapters import AdapterTable
from pagewise_gateway.scheduler_client.connection import ForClient, SchedulerConnection
from pagewise_gateway.scheduler_client.live_request import LiveRequest
from pagewise_gateway.scheduler_client.queries import NO_SCHEDULER, Queries
from pagewise_gateway.scheduler_client.stream_table import StreamTable
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

METRICS_SECONDS = 1.0
"""How often this gateway's metrics are sent to the scheduler."""
_LONGEST_RETRY_SECONDS = 5.0
_CLOSING = "the gateway is shutting down"


class SchedulerClient:
    """All live requests of one gateway, and its connection to the scheduler.

    Fields:
        adapters: the LoRA adapters that requests may name.
        queries: for reports, ends of requests, and adapters.
        closing: whether this gateway stops, and so accepts no more requests.

    When the scheduler is lost, no request is lost: each is submitted again to the next scheduler, with its output
    tokens so far. A request that has waited ``timeout`` seconds for a scheduler fails.
    """

    def __init__(
        self,
        endpoint: str,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        gateway_id: str,
        model_name: str,
        timeout: float = 60.0,
        keys: Keys | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        self.adapters = adapters or AdapterTable()
        self.adapters.timeout = timeout
        self._tokenizer = tokenizer
        self._metrics, self._timeout = metrics, timeout
        self._name = gateway_id, model_name, uuid4().hex
        self._rejoins = self._served_by = 0  # the last number of ready executors that was not 0
        self._connection = SchedulerConnection(endpoint, self, metrics, keys)
        self.queries = Queries(self._connection, metrics)
        self._table = StreamTable(metrics)
        self._repeats = RepeatWatch(metrics)
        self._live: dict[LiveRequest, None] = {}
        # Streams that lost their scheduler and have no token since, with their tokens at that time.
        self._interrupted: dict[LiveRequest, int] = {}
        self._interrupted_since = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.closing = False
        self._fleet = FleetState(0)
        self._fleet_known = asyncio.Event()  # the scheduler of this epoch has sent a FleetState
        self._modules: dict[int, str] = {}  # adapters of --lora-modules by the number of their query

    async def run(self) -> None:
        """Stay connected to a scheduler until cancelled.

        Raises:
            RefusedError: the scheduler does not let this gateway join.
            ConfigError: the scheduler asks for a key, and this gateway has none.
        """
        async with asyncio.TaskGroup() as tasks:
            periodic = tasks.create_task(self._tick(), name="scheduler client")
            try:
                await self._connection.run()
            finally:
                periodic.cancel()

    # ---- for HTTP handlers ---------------------------------------------------------------------------

    @property
    def answers(self) -> bool:
        """Whether this gateway is joined to a scheduler that is not silent."""
        return self._connection.answers

    @property
    def ready_executors(self) -> int:
        """How many executors are ready, according to the scheduler; 0 without a scheduler."""
        return self._fleet.ready_executors if self.answers else 0

    @property
    def num_live(self) -> int:
        """Requests that are being served."""
        return len(self._live)

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence for each process of the server that keeps failing."""
        return self._fleet.problems if self.answers else ()

    def capacity(self) -> Capacity | None:
        """Return the limits of the executors, as last reported; None until a first executor has joined."""
        fleet = self._fleet
        if not fleet.max_model_len:
            return None
        return Capacity(fleet.max_model_len, fleet.vocab_size, fleet.no_grammars, fleet.snapshots)

    async def wait_for_capacity(self) -> Capacity:
        """Return the limits of the executors. Before the first report, wait for a scheduler as long as requests do.

        Raises:
            AdmissionError: this gateway stops, no scheduler has answered in time, or no executor has joined yet.
        """
        self._check_open()
        if self.capacity() is None and self._connection.epoch is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout):
                    await self._fleet_known.wait()
        if (capacity := self.capacity()) is not None:
            return capacity
        if self._connection.epoch is None:
            self._metrics.requests_refused("no_scheduler").inc()
            raise AdmissionError("unavailable", NO_SCHEDULER)
        self._metrics.requests_refused("no_executor").inc()
        raise AdmissionError("unavailable", "no executor has joined the scheduler yet")

    def submit(
        self,
        request: Submit,
        options: AnswerOptions = AnswerOptions(),  # noqa: B008 - it is frozen
        counted_as: LiveRequest | None = None,
        held: Held | None = None,
    ) -> LiveRequest:
        """Submit a request, now or as soon as there is a scheduler. ``LiveRequest.next`` raises if it is not accepted.

        ``request``: its epoch and stream are ignored. ``counted_as``: a request without prompts that has held a place
        for this one, and ends when this one is submitted. ``held``: the memory that is reserved for its answer.

        Raises:
            AdmissionError: this gateway accepts no more requests.
        """
        self._check_open()
        live = LiveRequest(
            request,
            options,
            self._tokenizer,
            self._metrics,
            self._table.has_news,
            self._ended,
            held,
            self._repeats.prompt,
        )
        live.counted_as = counted_as
        self._live[live] = None
        self._idle.clear()
        if self._connection.epoch is not None:
            self._submit(live, self._connection.epoch)
        return live

    async def close(self, seconds: float, at_once: asyncio.Event) -> None:
        """Accept no more requests, and wait until all have ended, for ``seconds`` at most or until ``at_once`` is set.

        Then requests whose clients have seen tokens end with these tokens, and the others fail.
        """
        self.closing = self._connection.stopping = True
        if self._live:
            log.info("waiting for %d requests to end, %g s at most", len(self._live), seconds)
            ends = [asyncio.ensure_future(event.wait()) for event in (self._idle, at_once)]
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
        if self._live:
            log.warning("%d requests have not ended in time and are cut off", len(self._live))
        for live in list(self._live):
            live.cut_off(AdmissionError("unavailable", _CLOSING))

    # ---- for the connection --------------------------------------------------------------------------

    def hello(self) -> GatewayHello:
        """Return the Hello of now, which changes with the requests and adapters of this gateway."""
        known = self.adapters
        counts = self._served_by, self._rejoins
        return GatewayHello(PROTOCOL_MAJOR, PROTOCOL_MINOR, *self._name, *counts, known.version, known.all())

    def joined(self, epoch: int) -> None:
        """Submit all live requests, in the order of their arrival, to a scheduler that has accepted this gateway.

        It knows no message of earlier epochs.
        """
        for adapter in self.adapters.wanted.values():
            number = self.queries.new_number()
            self._modules[number] = adapter.name
            self._connection.send(RegisterAdapter(epoch, number, adapter, replace=True, waits=True))
        if self._live:
            log.info("submitting %d requests", len(self._live))
        for live in list(self._live):
            self._submit(live, epoch)

    def lost(self) -> None:
        """Have all live requests wait for the next scheduler: this one is lost, or has forgotten this gateway.

        Its stream numbers are void.
        """
        now = monotonic()
        if not self._interrupted:
            self._interrupted_since = now
        self._interrupted |= {live: live.num_taken for live in self._live}
        self._modules.clear()
        self._rejoins += 1
        self._fleet_known.clear()
        for live in self._live:
            if live.stream is not None:
                live.stream, live.waiting_since, live.refusal = None, now, None
        self._table.clear()
        self.queries.fail()

    def received(self, message: ForClient) -> None:
        """Handle a message of the current epoch.

        Raises:
            ProtocolError: the message contradicts the protocol.
        """
        match message:
            case Outputs():
                applied = self._table.apply(message)
                for stream in applied.stopped:
                    self._connection.send(FinishStream(message.epoch, stream))
                for live, refused in applied.refused:
                    self._refused(live, refused)
            case FleetState():
                self._fleet_known.set()
                self._served_by = message.ready_executors or self._served_by
                if message.max_model_len:
                    self._fleet = message
                else:  # a new scheduler has no executors yet; when they join, their limits are likely to be the same
                    self._fleet = replace(self._fleet, ready_executors=0, problems=message.problems)
            case AdapterState():
                self.adapters.update(message)
            case AdapterAnswer() if (name := self._modules.pop(message.number, None)) is not None:
                self.adapters.module_answered(name, message.message if message.kind else "")
            case QueryAnswer() | AdapterAnswer() | Advised():
                self.queries.answered(message)

    # ---- inside --------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closing:
            self._metrics.requests_refused("shutting_down").inc()
            raise AdmissionError("unavailable", _CLOSING)

    def _submit(self, live: LiveRequest, epoch: int) -> None:
        if not self._table.add(live):
            self._connection.renew("there are no stream numbers left")
            return
        live.submissions += 1
        live.submission_time = now = monotonic()
        frame = encode(live.submission(epoch, now))
        if len(frame) <= MAX_SUBMIT_BYTES:
            self._connection.send_frame(frame)
            if (counted := live.counted_as) is not None:
                live.counted_as = None
                # The scheduler has replaced it by this submission, so it must end without an Abort: without a number.
                self._table.remove(counted)
                counted.abort()
            return
        # The scheduler's socket closes a connection on which a longer message comes. All other requests of this gateway
        # would lose their scheduler with it, and again after every rejoin.
        self._table.remove(live)
        text = f"the request takes {len(frame)} bytes on its way to the scheduler, at most {MAX_SUBMIT_BYTES} may"
        if live.submissions == 1:
            live.refuse(AdmissionError("invalid", text))
        else:
            live.fail(GenerationError(text))

    def _refused(self, live: LiveRequest, refused: RequestRefused) -> None:
        """Handle a refusal: the client gets the error, unless an earlier scheduler has accepted the request.

        Then it is submitted again after a pause, because the executors of a new scheduler may not have joined yet.
        """
        self._table.remove(live)
        kind = "invalid" if refused.invalid else refused.kind
        error = AdmissionError(kind, refused.message, refused.retry_after or None)
        if not live.resumed:
            live.refuse(error)
            return
        extra = about(live.request.request_id, live.request.traceparent)
        log.warning("request %s was submitted again and not accepted: %s", live.request.request_id, error, extra=extra)
        live.refusal = error
        seconds = min(max(1, refused.retry_after), _LONGEST_RETRY_SECONDS)
        asyncio.get_running_loop().call_later(seconds, self._retry, live)

    def _retry(self, live: LiveRequest) -> None:
        epoch = self._connection.epoch
        if epoch is not None and live.stream is None and not live.ended:
            self._submit(live, epoch)

    def _give_up(self, live: LiveRequest) -> None:
        error = live.refusal or AdmissionError("unavailable", NO_SCHEDULER)
        if live.submissions:
            live.fail(error)
        else:
            self._metrics.requests_refused("no_scheduler").inc()
            live.refuse(error)

    def _ended(self, live: LiveRequest) -> None:
        epoch, stream = self._connection.epoch, live.stream
        self._table.remove(live)
        self._live.pop(live, None)
        if not self._live:
            self._idle.set()
        if epoch is not None and stream is not None and live.unfinished:
            self._connection.send(Abort(epoch, stream))

    def _report_resumed(self, now: float) -> None:
        """Log once that the streams which lost their scheduler go on, when none of them is left waiting."""
        if any(live in self._live and live.num_taken <= tokens for live, tokens in self._interrupted.items()):
            return
        if resumed := sum(live.num_taken > tokens for live, tokens in self._interrupted.items()):
            streams, seconds = f"{resumed} stream{'s' * (resumed != 1)}", now - self._interrupted_since
            log.info("%s resumed within %.1f s of the loss of the scheduler", streams, seconds)
        self._interrupted.clear()

    async def _tick(self) -> None:
        """Send metrics to the scheduler, and fail requests that have waited too long for a scheduler."""
        pause = min(METRICS_SECONDS, self._timeout / 4)
        last_sent = float("-inf")
        while True:
            await asyncio.sleep(pause)
            now = monotonic()
            for live in list(self._live):
                if live.stream is None and now - live.waiting_since > self._timeout:
                    self._give_up(live)
            self._report_resumed(now)
            if (epoch := self._connection.epoch) is not None and now - last_sent >= METRICS_SECONDS:
                last_sent = now
                self._connection.send(MetricsSnapshot(epoch, self._metrics.snapshot()))

"""The link to the scheduler: accepts requests from the HTTP surface, and carries them over restarts of schedulers."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import Literal
from uuid import uuid4

from msgspec.structs import replace
from pagewise_shared.curve import Keys
from pagewise_shared.logs import about
from pagewise_shared.protocol import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    AbortRequest,
    AdapterAnswer,
    AdapterState,
    ConsoleView,
    FinishStream,
    FleetState,
    GatewayHello,
    Message,
    MetricsSnapshot,
    Outputs,
    Query,
    QueryAnswer,
    RequestRefused,
    Submit,
    encode,
)
from pagewise_shared.protocol.limits import MAX_SUBMIT_BYTES

from pagewise_gateway.generation import AdmissionError, AnswerOptions, Capacity, GenerationError, Held
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client.adapter_table import AdapterTable
from pagewise_gateway.scheduler_client.connection import SchedulerConnection
from pagewise_gateway.scheduler_client.live_request import LiveRequest
from pagewise_gateway.scheduler_client.repeat_watch import RepeatWatch
from pagewise_gateway.scheduler_client.stream_table import StreamTable
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

METRICS_SECONDS = 1.0
"""How often this gateway's metrics are sent to the scheduler."""
QUERY_SECONDS = 10.0
_LONGEST_RETRY_SECONDS = 5.0
_CLOSING = "the gateway is shutting down"


class SchedulerClient:
    """All live requests of one gateway, and its connection to the scheduler.

    Fields:
        adapters: those that are served.
        closing: whether no more requests are accepted, because this gateway stops.
        on_end: is called with each request when it has ended.

    When the scheduler is lost, no request is: each is submitted again to the next one, with the tokens that it has. A
    request that has waited ``timeout`` seconds for a scheduler fails.
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
        self._rejoins = self._served_by = 0  # by how many executors, the last time that there were any
        self._connection = SchedulerConnection(endpoint, self._hello, self, metrics, keys)
        self._table = StreamTable(metrics)
        self._repeats = RepeatWatch(metrics)
        self._live: dict[LiveRequest, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.closing = False
        self.on_end: Callable[[LiveRequest], None] = lambda live: None
        self._fleet = FleetState(0)
        self._fleet_known = asyncio.Event()  # the scheduler of this epoch has sent a FleetState
        self._queries: dict[int, asyncio.Future[QueryAnswer]] = {}
        self._query_numbers = count(1)

    async def run(self) -> None:
        """Stay linked until cancelled.

        Raises:
            RefusedError: the scheduler does not let this gateway join.
            ConfigError: the scheduler asks for a key, and this gateway has none.
        """
        async with asyncio.TaskGroup() as tasks:
            periodic = tasks.create_task(self._tend(), name="link")
            try:
                await self._connection.run()
            finally:
                periodic.cancel()

    # ---- for the HTTP surface ------------------------------------------------------------------------

    @property
    def answers(self) -> bool:
        """Whether there is a scheduler from which something has been received lately."""
        return self._connection.answers

    @property
    def ready_executors(self) -> int:
        """How many executors are ready, according to the scheduler; 0 without one."""
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
        """Return the limits of the fleet, now or before it was lost; None until a first executor has joined."""
        fleet = self._fleet
        return Capacity(fleet.max_model_len, fleet.vocab_size, fleet.no_grammars) if fleet.max_model_len else None

    async def wait_for_capacity(self) -> Capacity:
        """Return the limits of the fleet. A gateway that has never been told of any waits for a scheduler, as long as
        requests do.

        Raises:
            AdmissionError: this gateway stops, no scheduler has answered in time, or no executor has joined it yet.
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
            raise AdmissionError("unavailable", "no scheduler answers")
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

        ``request``: its epoch and stream are of no interest. ``counted_as``: the request without prompts that it was
        counted as, which ends when this one takes its place.
        ``held``: the memory that is taken for its answer.

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

    async def query(
        self,
        kind: Literal["metrics", "memory", "request", "console"],
        argument: str = "",
        limit: int = 0,
        key: str = "",
        view: ConsoleView | None = None,
        detail: str = "",
    ) -> bytes:
        """Ask the scheduler for a report: Prometheus' text ("metrics"), or JSON about the memory or a request, or lines
        of JSON for consoles (``view``).

        ``key``: name of the API key whose requests the report may show; empty: of all. ``detail``: see ``Query``.

        Raises:
            AdmissionError: no scheduler answers.
            LookupError: the scheduler knows nothing of this name.
        """
        epoch = self._connection.epoch
        if kind == "metrics" and epoch is not None:
            self._connection.send(MetricsSnapshot(epoch, self._metrics.snapshot()))
        told = await self._ask(lambda epoch, number: Query(epoch, number, kind, argument, limit, key, view, detail))
        if not told.found:
            raise LookupError(argument)
        return told.body

    async def end_request(self, name: str) -> bool:
        """Have the scheduler end a request, by our id or its client's, whichever gateway it came from; whether there
        was one.

        Raises:
            AdmissionError: no scheduler answers.
        """
        return (await self._ask(lambda epoch, number: AbortRequest(epoch, number, name))).found

    async def _ask(self, question: Callable[[int, int], Message]) -> QueryAnswer:
        """Send a message that the scheduler answers. ``question``: makes it of the epoch and its number.

        Raises:
            AdmissionError: no scheduler answers.
        """
        epoch = self._connection.epoch
        if epoch is None:
            raise AdmissionError("unavailable", "no scheduler answers")
        number = next(self._query_numbers)
        answer: asyncio.Future[QueryAnswer] = asyncio.get_running_loop().create_future()
        self._queries[number] = answer
        try:
            self._connection.send(question(epoch, number))
            async with asyncio.timeout(QUERY_SECONDS):
                return await answer
        except TimeoutError:
            raise AdmissionError("unavailable", "the scheduler does not answer") from None
        finally:
            del self._queries[number]

    async def close(self, seconds: float, at_once: asyncio.Event) -> None:
        """Accept no more requests, and wait for the live ones to end, for ``seconds`` or until ``at_once`` is set.

        Then those whose clients have seen tokens end there, and the others fail.
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

    def _hello(self) -> GatewayHello:
        known = self.adapters
        return GatewayHello(
            PROTOCOL_MAJOR,
            PROTOCOL_MINOR,
            *self._name,
            self._served_by,
            self._rejoins,
            known.version,
            known.all(),
        )

    def joined(self, epoch: int) -> None:
        """A scheduler is there: submit all live requests, in the order of their arrival."""
        self.adapters.joined(epoch, self._connection.send)
        if self._live:
            log.info("submitting %d requests", len(self._live))
        for live in list(self._live):
            self._submit(live, epoch)

    def lost(self) -> None:
        """The scheduler is gone: all live requests wait for the next one, and their stream numbers are void."""
        now = monotonic()
        self.adapters.lost()
        self._rejoins += 1
        self._fleet_known.clear()
        for live in self._live:
            if live.stream is not None:
                live.stream, live.waiting_since, live.refusal = None, now, None
        self._table.clear()
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(AdmissionError("unavailable", "no scheduler answers"))

    def received(self, message: FleetState | AdapterState | AdapterAnswer | Outputs | QueryAnswer) -> None:
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
                else:  # the scheduler is new, and has no executors yet: their limits are likely to stay the same
                    self._fleet = replace(self._fleet, ready_executors=0, problems=message.problems)
            case AdapterState():
                self.adapters.told(message)
            case AdapterAnswer():
                self.adapters.answered(message)
            case QueryAnswer():
                if (answer := self._queries.get(message.number)) is not None and not answer.done():
                    answer.set_result(message)

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
                self._table.remove(counted)  # without a number it ends without an Abort: the scheduler has replaced it
                counted.abort()
            return
        # The scheduler's socket would cut the connection, under all other requests too, and again with every new one.
        self._table.remove(live)
        text = f"the request takes {len(frame)} bytes on its way to the scheduler, at most {MAX_SUBMIT_BYTES} may"
        if live.submissions == 1:
            live.refuse(AdmissionError("invalid", text))
        else:
            live.fail(GenerationError(text))

    def _refused(self, live: LiveRequest, refused: RequestRefused) -> None:
        """Handle a request that the scheduler did not accept.

        If no scheduler has ever accepted it, its client gets the error. Otherwise it is submitted again after a pause,
        because a scheduler that has just started may not have its executors yet.
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
        error = live.refusal or AdmissionError("unavailable", "no scheduler answers")
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
        self.on_end(live)

    async def _tend(self) -> None:
        """Send metrics to the scheduler, and fail requests that have waited too long for one."""
        pause = min(METRICS_SECONDS, self._timeout / 4)
        told = float("-inf")
        while True:
            await asyncio.sleep(pause)
            now = monotonic()
            for live in list(self._live):
                if live.stream is None and now - live.waiting_since > self._timeout:
                    self._give_up(live)
            if (epoch := self._connection.epoch) is not None and now - told >= METRICS_SECONDS:
                told = now
                self._connection.send(MetricsSnapshot(epoch, self._metrics.snapshot()))

"""The connection to the scheduler: joins it, detects its failure, and joins it or its successor again."""

import asyncio
import contextlib
import logging
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio
from pagewise_shared.connections import Connections
from pagewise_shared.curve import Keys
from pagewise_shared.errors import ProtocolError, RefusedError
from pagewise_shared.failure_detector import FailureDetector
from pagewise_shared.logs import BoundedLog, printable
from pagewise_shared.protocol import (
    AdapterAnswer,
    AdapterState,
    Advised,
    FleetState,
    GatewayWelcome,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Message,
    Outputs,
    QueryAnswer,
    Refused,
    Rejoin,
    decode_to_gateway,
    encode,
)
from pagewise_shared.protocol.limits import MAX_FRAME_FROM_SCHEDULER
from pagewise_shared.scheduler_connection import (
    HELLO_PAUSES,
    LEAST_SILENCE,
    MOST_SILENCE,
    RESTART_HELLOS,
    SchedulerAddress,
    follow_scheduler,
    make_dealer,
    watch_connection,
)

from pagewise_gateway.metrics import Drop, Metrics

if TYPE_CHECKING:
    from pagewise_gateway.scheduler_client.client import SchedulerClient

log = logging.getLogger(__name__)

_LONGEST_HEARTBEAT_MS = 60_000
_LEAST_SESSION_SECONDS = 1.0
_GOODBYE_SECONDS = 0.2
_FRAMES_SECONDS = 0.01
"""How long frames are handled one after the other before other tasks run."""

ForClient = FleetState | AdapterState | AdapterAnswer | Advised | Outputs | QueryAnswer
"""The messages that are handed on to the scheduler client."""


class SchedulerConnection:
    """A gateway's connection: Hello, Welcome and heartbeats, and the same again when it breaks or falls silent.

    Fields:
        epoch: of the last Welcome; None while this gateway is not joined to a scheduler.
        stopping: is set when this gateway stops. A scheduler that stops at the same time is then worth no warning.
    """

    def __init__(self, endpoint: str, client: "SchedulerClient", metrics: Metrics, keys: Keys | None = None) -> None:
        self.epoch: int | None = None
        self.stopping = False
        self._scheduler = SchedulerAddress(endpoint)
        self._keys = keys
        self._client = client
        self._metrics = metrics
        self._heartbeat_seconds = 1.0
        self._detector = FailureDetector(monotonic(), least=LEAST_SILENCE, most=MOST_SILENCE)
        self._joined_at = float("-inf")
        self._complaints = BoundedLog(log)
        self._joined, self._lost = asyncio.Event(), asyncio.Event()
        self._outbox: deque[bytes] = deque()
        self._outgoing = asyncio.Event()

    @property
    def answers(self) -> bool:
        """Whether this gateway is joined to a scheduler that is not silent."""
        return self.epoch is not None and not self._detector.suspects(monotonic())

    def send(self, message: Message) -> None:
        """Send a message of the current epoch. It is dropped if the epoch ends before it has been sent."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message of the current epoch, like ``send``."""
        self._outbox.append(frame)
        self._outgoing.set()

    async def run(self) -> None:
        """Stay connected until cancelled, then say Goodbye.

        Raises:
            RefusedError: the scheduler does not let this gateway join.
            ConfigError: the scheduler asks for a key, and this gateway has none.
        """
        context = zmq.asyncio.Context()
        self._socket = make_dealer(context, self._keys, MAX_FRAME_FROM_SCHEDULER)
        connections = Connections(self._socket)
        self._socket.connect(self._scheduler.endpoint)
        tasks = [
            asyncio.ensure_future(job)
            for job in (
                self._receive(),
                self._greet(),
                self._keep_in_touch(),
                self._send_out(),
                watch_connection(connections, self._socket, self._scheduler, self._keys, self._broke),
                follow_scheduler(self._socket, self._scheduler, self._broke),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # Also before a Welcome: it may be on its way, and the scheduler would take the gateway for lost.
            with contextlib.suppress(zmq.ZMQError, TimeoutError):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    for frame in (*self._outbox, encode(Goodbye(self.epoch or 0, "stopped"))):
                        await self._socket.send(frame)
            self.epoch = None
            connections.close()
            self._socket.close()
            context.term()

    # ---- joining -------------------------------------------------------------------------------------

    async def _greet(self) -> None:
        """Send Hellos until a Welcome comes, and again whenever the scheduler is lost."""
        while True:
            # Every join submits all live requests again, which a scheduler that keeps failing must not cause too often.
            await asyncio.sleep(max(0.0, self._joined_at + _LEAST_SESSION_SECONDS - monotonic()))
            attempt = 0
            while self.epoch is None:
                pause = HELLO_PAUSES[min(attempt, len(HELLO_PAUSES) - 1)]
                # Not wait_for: before Python 3.12 it can swallow a cancellation.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._socket.send(encode(self._client.hello()))
                        await self._joined.wait()
                if self.epoch is None and attempt < len(HELLO_PAUSES):
                    level = logging.INFO if self.stopping or attempt < RESTART_HELLOS else logging.WARNING
                    text = "no answer from the scheduler at %s, trying again every %g s"
                    log.log(level, text, self._scheduler.endpoint, pause)
                attempt += 1
            await self._lost.wait()

    def _join(self, welcome: GatewayWelcome) -> None:
        if welcome.epoch == self.epoch:
            return
        if self.epoch is not None:  # an answer to a second Hello: all messages since the first one were dropped
            self.renew("the scheduler has accepted this gateway once more")
        self.epoch = welcome.epoch
        self._heartbeat_seconds = min(max(1, welcome.heartbeat_ms), _LONGEST_HEARTBEAT_MS) / 1000
        self._joined_at = monotonic()
        self._detector.most = max(MOST_SILENCE, 3 * self._heartbeat_seconds)
        self._detector.beat(self._joined_at)  # so that the silence before this Welcome counts as an ordinary gap
        self._lost.clear()
        self._joined.set()
        log.info("joined the scheduler at %s", self._scheduler.endpoint)
        self._client.joined(welcome.epoch)

    def renew(self, why: str, *, usual: bool = False) -> None:
        """End this epoch, drop its unsent messages, and join again under a new epoch. ``why`` is logged; a restart of
        the scheduler is ``usual``."""
        if self.epoch is not None:
            if self.stopping or usual:
                log.info("%s, saying Hello again", why)
            else:
                self._complaints.warning("%s, saying Hello again", why)
            self._metrics.rejoins.inc()
            self.epoch = None
            self._outbox.clear()
            self._joined.clear()
            self._lost.set()
            self._client.lost()

    def _broke(self) -> None:
        self.renew("the connection to the scheduler broke", usual=True)

    async def _keep_in_touch(self) -> None:
        """Send heartbeats, and end the epoch when nothing has been received from the scheduler for long."""
        while True:
            seconds, began = self._heartbeat_seconds, monotonic()
            await asyncio.sleep(seconds)
            # A process that was stopped or starved has received nothing, which must not count as the peer's silence.
            now = monotonic()
            self._detector.stood_still(max(0.0, now - began - seconds), now)
            if self.epoch is None:
                continue
            if self._detector.suspects(now):
                self.renew(f"nothing received from the scheduler for {self._detector.silence(now):.1f} s")
            else:
                self.send(Heartbeat(self.epoch))

    # ---- frames --------------------------------------------------------------------------------------

    async def _send_out(self) -> None:
        while True:
            await self._outgoing.wait()
            self._outgoing.clear()
            while self._outbox:
                await self._socket.send(self._outbox.popleft())

    async def _receive(self) -> None:
        paused = monotonic()
        while True:
            self.take(await self._socket.recv())
            # ``recv`` returns without yielding while frames wait, so a backlog of them would block all other tasks.
            if monotonic() - paused > _FRAMES_SECONDS:
                await asyncio.sleep(0)
                paused = monotonic()

    def take(self, frame: bytes) -> None:
        """Handle a frame from the scheduler.

        Raises:
            RefusedError: the scheduler does not let this gateway join.
        """
        try:
            message = decode_to_gateway(frame)
        except ProtocolError as error:
            self._drop("undecodable", str(error))
            return
        self._detector.heard(monotonic())
        match message:
            case Outputs() | FleetState() | AdapterState() if message.epoch != self.epoch:
                self._metrics.frames_dropped("stale_epoch").inc()
            case Outputs() | FleetState() | AdapterState() | AdapterAnswer() | Advised() | QueryAnswer():
                self._hand_on(message)
            case GatewayWelcome():
                self._join(message)
            case HeartbeatAck(epoch):
                self._detector.beat(monotonic())
                if epoch != self.epoch:
                    self.renew("the scheduler knows this gateway under another epoch")
            case Rejoin():
                self.renew("the scheduler does not know this gateway")
            case Refused(reason):
                raise RefusedError(
                    f"the scheduler at {self._scheduler.endpoint} refused this gateway: {printable(reason, 1000)}"
                )

    def _hand_on(self, message: ForClient) -> None:
        try:
            self._client.received(message)
        except ProtocolError as error:
            self._drop("impossible", str(error))
        except Exception:
            log.exception("a frame from the scheduler could not be applied")
            self._drop("impossible", "it could not be applied")

    def _drop(self, reason: Drop, detail: str) -> None:
        """Drop a frame, count it, and join again: only a new epoch brings back the tokens that it may have carried."""
        self._metrics.frames_dropped(reason).inc()
        self._complaints.warning("dropped a frame from the scheduler (%s): %s", reason, printable(detail))
        self.renew("a frame from the scheduler was lost")

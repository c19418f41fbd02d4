"""The executor service: joins a scheduler, passes its plans to the worker thread, and sends the results."""

import asyncio
import contextlib
import logging
import signal
from time import monotonic

import msgspec
import zmq
import zmq.asyncio
from pagewise_shared.connections import Connections
from pagewise_shared.curve import Keys
from pagewise_shared.errors import ProtocolError, RefusedError
from pagewise_shared.failure_detector import FailureDetector
from pagewise_shared.logs import about, printable
from pagewise_shared.protocol import (
    AdapterLoaded,
    CancelCopies,
    CompileGrammar,
    Copied,
    Drain,
    DropStored,
    Found,
    Goodbye,
    GrammarCompiled,
    Heartbeat,
    HeartbeatAck,
    Leaving,
    LoadAdapter,
    LookUp,
    Message,
    Refused,
    Rejoin,
    Role,
    SetStoredBudgets,
    StepError,
    StepPlan,
    StepResult,
    StoredDropped,
    StoredGone,
    Welcome,
    decode_from_scheduler,
    encode,
)
from pagewise_shared.protocol.limits import MAX_FRAME_FROM_SCHEDULER, MAX_STEP_RESULT_BYTES
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
from pagewise_shared.service_process import num_tasks

from pagewise_executor.runner import Counted
from pagewise_executor.worker import Worker

log = logging.getLogger(__name__)

_SILENCE_WHILE_LEAVING = 3.0
_LONGEST_HEARTBEAT_MS = 60_000
_GOODBYE_SECONDS = 0.2


class ExecutorService:
    """The connection of one executor with the scheduler: Hello, Welcome, plans and heartbeats, until it is stopped.

    The constructor starts the worker and waits for its runner. It raises the exceptions of building the runner.
    """

    def __init__(
        self,
        worker: Worker,
        endpoint: str,
        executor_id: str,
        *,
        role: Role = "both",
        drain_timeout: float = 30.0,
        keys: Keys | None = None,
    ) -> None:
        self._hello = msgspec.structs.replace(worker.start(), executor_id=executor_id, role=role)
        self._worker = worker
        self._scheduler = SchedulerAddress(endpoint)
        self._keys = keys
        self._welcome: Welcome | None = None
        self._detector = FailureDetector(monotonic(), least=LEAST_SILENCE, most=MOST_SILENCE)
        self._stop: asyncio.Event = asyncio.Event()
        self._stop_reason = ""
        self._leaving = asyncio.Event()
        self._drain_timeout = drain_timeout
        self._welcomed = asyncio.Event()
        self._hello_wanted = asyncio.Event()
        self._hello_number = 0
        self.bad_frames = 0
        # As last reported, and as reported before the current Welcome.
        self._counted = self._counted_before = Counted()

    async def run(self) -> None:
        """Serve until SIGINT, or until SIGTERM and the Drain that follows.

        Raises:
            RefusedError: the scheduler does not let this executor join.
            ConfigError: the scheduler asks for a key, and this executor has none.
            Exception: the worker has failed, for example by a broken device. Only a new process can help.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = self.leave if number == signal.SIGTERM else self.stop
            with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, handler, signal.Signals(number).name)
        context = zmq.asyncio.Context()
        self._socket = make_dealer(context, self._keys, MAX_FRAME_FROM_SCHEDULER)
        connections = Connections(self._socket)
        self._socket.connect(self._scheduler.endpoint)
        worker = self._worker
        worker.answer_to(lambda result: self._post(loop, result))
        try:
            tasks = [
                asyncio.ensure_future(job)
                for job in (
                    self._receive(worker),
                    self._keep_in_touch(),
                    self._greet(worker),
                    watch_connection(connections, self._socket, self._scheduler, self._keys, self._reconnected),
                    follow_scheduler(self._socket, self._scheduler, self._reconnected),
                    self._stop.wait(),
                    self._leave(),
                    asyncio.wrap_future(worker.failed),
                )
            ]
            done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for task in done:
                task.result()
        finally:
            await asyncio.to_thread(worker.stop)
            await asyncio.sleep(0)  # sends the last results, which the worker's thread has posted
            if self._welcome is not None:
                with contextlib.suppress(zmq.ZMQError, TimeoutError):
                    async with asyncio.timeout(_GOODBYE_SECONDS):
                        await self._send(Goodbye(self._welcome.epoch, self._stop_reason))
            connections.close()
            self._socket.close()
            context.term()

    def stop(self, reason: str) -> None:
        """Send the result of the step in progress, say Goodbye, and end ``run``."""
        self._stop_reason = reason
        self._stop.set()

    def leave(self, reason: str) -> None:
        """Ask to be drained, then ``stop``. At the second call, or without a scheduler, stop at once."""
        if self._welcome is None or self._leaving.is_set():
            self.stop(reason)
        else:
            log.info("asking to be drained (%s)", reason)
            self._leaving.set()

    async def _leave(self) -> None:
        """After ``leave``, wait until the scheduler has drained this executor, falls silent, or takes too long."""
        await self._leaving.wait()
        until = monotonic() + self._drain_timeout
        asked: Welcome | None = None
        while (now := monotonic()) < until and self._detector.silence(now) < _SILENCE_WHILE_LEAVING:
            # Asked once per Welcome: a scheduler that it has joined since does not know that it leaves.
            if self._welcome is not None and self._welcome is not asked:
                asked, left = self._welcome, until - monotonic()
                with contextlib.suppress(zmq.ZMQError, TimeoutError):
                    async with asyncio.timeout(_GOODBYE_SECONDS):
                        await self._send(Leaving(asked.epoch, max(0, int(left * 1000))))
            await asyncio.sleep(0.1)
        self.stop("it was not drained in time")
        await asyncio.Event().wait()

    # ---- talking to the scheduler --------------------------------------------------------------------

    async def _send(self, message: Message) -> None:
        await self._socket.send(encode(message))

    def _post(
        self,
        loop: asyncio.AbstractEventLoop,
        result: StepResult | Copied | Found | StoredDropped | StoredGone | AdapterLoaded | GrammarCompiled,
    ) -> None:
        """Send a result. Called on other threads, where it is encoded, so that the event loop stays free."""
        frame = encode(result)
        if len(frame) > MAX_STEP_RESULT_BYTES and isinstance(result, StepResult):
            # The scheduler would drop it, and wait for the step until ``--step-timeout``.
            text = f"the result of step {result.step} takes {len(frame)} bytes, at most {MAX_STEP_RESULT_BYTES} may"
            log.error("%s", text, extra=about(epoch=result.epoch, step=result.step))
            frame = encode(StepResult(result.epoch, result.step, error=StepError("internal", text)))
        with contextlib.suppress(RuntimeError):  # a copy may end after the event loop, when no task waits for it
            loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._socket.send(frame)))

    async def _greet(self, worker: Worker) -> None:
        """Send Hellos until a Welcome comes, and again whenever the scheduler is lost or does not know us."""
        while True:
            attempt = 0
            # The scheduler may have dropped this executor because a step takes too long: no new work before that step
            # has ended.
            while not worker.idle:  # noqa: ASYNC110 - another thread's state
                await asyncio.sleep(0.05)
            self._hello_wanted.clear()
            self._hello_number += 1
            inventory = await asyncio.wrap_future(worker.inventory())
            # The first plan after a Welcome makes the inventory stale, so a rejoin since then needs a new one.
            while self._welcome is None and not self._hello_wanted.is_set():
                pause = HELLO_PAUSES[min(attempt, len(HELLO_PAUSES) - 1)]
                # Not wait_for: before Python 3.12 it can swallow a cancellation.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        hello = msgspec.structs.replace(self._hello, inventory=inventory, number=self._hello_number)
                        await self._send(hello)
                        await self._welcomed.wait()
                if self._welcome is None and attempt < len(HELLO_PAUSES):
                    text = "no answer from the scheduler at %s, trying again every %g s"
                    level = logging.INFO if attempt < RESTART_HELLOS else self._level
                    log.log(level, text, self._scheduler.endpoint, pause)
                attempt += 1
            await self._hello_wanted.wait()

    async def _keep_in_touch(self) -> None:
        """Send heartbeats, and a new Hello when nothing has been received from the scheduler for long."""
        while True:
            welcome, began = self._welcome, monotonic()
            seconds = welcome.heartbeat_ms / 1000 if welcome else 0.2
            await asyncio.sleep(seconds)
            # While this process itself was stopped it received nothing: that time is not the scheduler's silence.
            now = monotonic()
            self._detector.stood_still(max(0.0, now - began - seconds), now)
            if (welcome := self._welcome) is None:
                continue
            if self._detector.suspects(now):
                silence = self._detector.silence(now)
                log.warning("nothing received from the scheduler for %.1f s, saying Hello again", silence)
                self._rejoin()
            else:
                self._counted, before = self._worker.counted, self._counted_before
                refused = self._counted.num_refused - before.num_refused
                _, *others = msgspec.structs.astuple(self._counted)  # the heartbeat has them in the same order
                await self._send(Heartbeat(welcome.epoch, refused, num_tasks(), *others))

    def _within_limits(self, welcome: Welcome) -> bool:
        hello = self._hello
        return (
            1 <= welcome.max_num_seqs <= hello.max_num_seqs
            and 1 <= welcome.max_num_batched_tokens <= hello.max_num_batched_tokens
            and 1 <= welcome.heartbeat_ms <= _LONGEST_HEARTBEAT_MS
        )

    @property
    def _level(self) -> int:
        """The log level for a missing scheduler, which may end before this executor when all processes stop."""
        return logging.INFO if self._leaving.is_set() else logging.WARNING

    def _reconnected(self) -> None:
        """Send a new Hello after the connection has broken, because frames may have been lost with it."""
        if self._welcome is not None:
            log.info("the connection to the scheduler broke, saying Hello again")
            self._rejoin()

    def _rejoin(self) -> None:
        # Plans that arrive before the next Welcome are dropped: the inventory of the Hello must stay true.
        self._welcome = None
        self._welcomed.clear()
        self._hello_wanted.set()

    async def _receive(self, worker: Worker) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                message = decode_from_scheduler(frame)
            except ProtocolError as error:
                self.bad_frames += 1
                if self.bad_frames == 1:
                    log.warning("dropped a frame from the scheduler: %s", error)
                continue
            self._detector.heard(monotonic())
            match message:
                case StepPlan():
                    # Without a Welcome its epoch is over, and an inventory lists its blocks: they must not change.
                    if self._welcome is not None:
                        worker.put(message)
                case Welcome() if not self._within_limits(message):
                    self.bad_frames += 1
                    log.error("dropped a Welcome that asks for more than this executor offers: %r", message)
                case Welcome(keeps_blocks=True, hello=number) if number != self._hello_number:
                    log.warning("dropped a Welcome that answers an earlier Hello, whose inventory is out of date")
                case Welcome(keeps_blocks=True) if self._welcome is not None:
                    log.warning("welcomed twice for one inventory, which is out of date by now: saying Hello again")
                    self._rejoin()
                case Welcome():
                    first = self._welcome is None
                    self._welcome = message
                    self._detector.most = max(MOST_SILENCE, 3 * message.heartbeat_ms / 1000)
                    self._detector.beat(monotonic())  # a silence that has led to this one is a gap to expect
                    self._welcomed.set()
                    worker.put(message)
                    if first:
                        self._counted_before = self._counted
                        log.info("joined the scheduler at %s", self._scheduler.endpoint)
                        # The process that has started this one reads it at any --log-level, as ``listening`` of others.
                        print(f"joined {self._scheduler.endpoint}", flush=True)
                case Refused(reason):
                    raise RefusedError(
                        f"the scheduler at {self._scheduler.endpoint} refused this executor: {printable(reason, 1000)}"
                    )
                case Rejoin():
                    if self._welcome is not None:
                        log.warning("the scheduler does not know this executor, saying Hello again")
                        self._rejoin()
                case HeartbeatAck():
                    self._detector.beat(monotonic())
                case CancelCopies() | LookUp() | DropStored() | SetStoredBudgets() | LoadAdapter() | CompileGrammar():
                    worker.handle(message)
                case Drain():
                    self.stop("drained")

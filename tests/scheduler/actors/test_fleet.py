"""Fleet, engines and router over a real socket: who is let in, what is dropped, and that requests survive."""

import asyncio
import threading
import uuid
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import zmq
import zmq.asyncio
from pagewise_executor.service import ExecutorService
from pagewise_executor.simulated import SimulatedRunner
from pagewise_executor.worker import Worker
from pagewise_scheduler.actors.fleet import MAX_BAD_FRAMES, Fleet
from pagewise_scheduler.actors.router import Router
from pagewise_scheduler.core.recovery.recovery_plan import RecoveryMode
from pagewise_scheduler.core.routing.policies import RoutingName
from pagewise_scheduler.generation import AdmissionError, GenerationError, GenerationRequest, NoExecutorError
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.text.tokenizer import Tokenizer
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.curve import Keys
from pagewise_shared.model_files import resolve_model
from pagewise_shared.protocol import (
    DEVICE,
    HOST,
    PROTOCOL_MAJOR,
    BlockCopies,
    CancelCopies,
    Copied,
    FromScheduler,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Rejoin,
    RemoteTier,
    StepError,
    StepPlan,
    StepResult,
    Welcome,
    decode_from_scheduler,
    encode,
)
from pagewise_shared.sampling import BeamParams, SamplingParams

TOKENIZER = Tokenizer.load(resolve_model("pagewise-demo"))


class Stack:
    """A fleet and a router, and what a test wants to know of them."""

    def __init__(
        self,
        path: Path,
        patience: float = 5.0,
        keys: Keys | None = None,
        *,
        routing: RoutingName = "ttft",
        recovery: RecoveryMode = "auto",
        executor_timeout: float = 1.0,
        step_timeout: float = 1.5,
    ) -> None:
        self.metrics = Metrics("m")
        self.router = Router(
            TOKENIZER, self.metrics, max_waiting=8, max_waiting_tokens=1000, patience=patience, routing=routing
        )
        self.fleet = Fleet(
            f"ipc://{path}/wire",
            self.router,
            self.metrics,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=None,
            executor_timeout=executor_timeout,
            step_timeout=step_timeout,
            recovery=recovery,
            keys=keys,
        )

    def dropped(self, reason: str) -> float:
        return float(self.metrics.frames_dropped(reason)._value.get())

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series; NaN: there is none."""
        value = self.metrics.registry.get_sample_value(f"pagewise_{name}", {"model_name": "m"} | labels)
        return float("nan") if value is None else value

    async def ready(self, count: int) -> None:
        async with asyncio.timeout(10):
            while (c := self.router.capacity()) is None or c.ready_executors != count:
                await asyncio.sleep(0.01)

    async def generate(
        self, prompt: list[int], max_tokens: int = 8, *, beam: BeamParams | None = None, best_of: int = 0
    ) -> list[int]:
        stream = self.router.submit(
            GenerationRequest(
                uuid.uuid4().hex,
                array("i", prompt),
                max_tokens,
                SamplingParams(temperature=0),
                arrival_time=monotonic(),
                beam=beam,
                best_of=best_of,
            )
        )
        return [token async for deltas in stream for delta in deltas for token in delta.token_ids]


@asynccontextmanager
async def running(path: Path, patience: float = 5.0, keys: Keys | None = None, **options: Any) -> AsyncIterator[Stack]:
    stack = Stack(path, patience, keys, **options)
    tasks = [asyncio.create_task(stack.fleet.run()), asyncio.create_task(stack.router.run())]
    try:
        yield stack
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def executor(
    path: Path,
    name: str = "e",
    step_seconds: float = 0.0,
    keys: Keys | None = None,
    *,
    runner: SimulatedRunner | None = None,
) -> AsyncIterator["asyncio.Task[None]"]:
    runner = runner or SimulatedRunner(ExecutorConfig(num_blocks=64, block_size=4), step_seconds)
    service = ExecutorService(
        Worker(lambda: runner), f"ipc://{path}/wire", name, max_num_seqs=4, max_num_batched_tokens=64, keys=keys
    )
    task = asyncio.create_task(service.run())
    try:
        yield task
    finally:
        service.stop("test over")
        with suppress(asyncio.CancelledError):
            await asyncio.gather(task, return_exceptions=True)


class RawExecutor:
    """A socket that says whatever a test wants."""

    def __init__(self, path: Path, keys: Keys | None = None, identity: bytes = b"") -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        if keys is not None:
            keys.secure_client(self.socket)
        self.socket.connect(f"ipc://{path}/wire")

    async def send(self, message: Message | bytes) -> None:
        await self.socket.send(message if isinstance(message, bytes) else encode(message))

    async def receive(self) -> FromScheduler:
        async with asyncio.timeout(10):
            return decode_from_scheduler(await self.socket.recv())

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def hello(**fields: object) -> Hello:
    given = {
        "protocol_major": PROTOCOL_MAJOR,
        "protocol_minor": 0,
        "executor_id": "raw",
        "model_fingerprint": "simulated",
        "vocab_size": 100,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 16,
    }
    return Hello(**(given | fields))  # type: ignore[arg-type]


async def joined(path: Path, **fields: object) -> tuple[RawExecutor, Welcome]:
    raw = RawExecutor(path)
    await raw.send(hello(vocab_size=4096, **fields))
    welcome = await raw.receive()
    assert isinstance(welcome, Welcome)
    return raw, welcome


async def test_requests_are_served_and_blocks_come_back(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        first = await stack.generate([1, 2, 3])
        assert len(first) == 8
        assert await stack.generate([1, 2, 3]) == first
        (engine,) = stack.router.engines
        assert stack.router.placing.load(engine) == 0
        async with asyncio.timeout(5):
            while engine.scheduler.kv.num_available != 64:
                await asyncio.sleep(0.01)


async def test_requests_of_an_executor_that_leaves_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        async with executor(tmp_path, "one", step_seconds=0.01):
            await stack.ready(1)
            expected = await stack.generate([5, 6, 7], max_tokens=60)
            moving = asyncio.create_task(stack.generate([5, 6, 7], max_tokens=60))
            await asyncio.sleep(0.2)
        assert not moving.done()
        async with executor(tmp_path, "two"):
            assert await moving == expected


async def test_an_executor_that_vanishes_without_a_word_loses_no_request(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        await raw.send(hello(vocab_size=4096))
        assert isinstance(await raw.receive(), Welcome)
        await stack.ready(1)
        raw.close()
        await asyncio.sleep(0.1)  # the socket notices; the next plan cannot be sent
        moving = asyncio.create_task(stack.generate([1, 2, 3]))
        await stack.ready(0)
        async with executor(tmp_path):
            async with asyncio.timeout(10):
                assert len(await moving) == 8


async def test_a_step_that_does_not_return_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path, patience=20.0) as stack, executor(tmp_path, "stuck", step_seconds=3.0):
        await stack.ready(1)
        moving = asyncio.create_task(stack.generate([1, 2, 3]))
        await stack.ready(0)
        async with executor(tmp_path, "quick"):
            async with asyncio.timeout(20):
                assert len(await moving) == 8


FROM_PEER = BlockCopies(DEVICE, DEVICE, b"12345678", RemoteTier("ipc://peer", 1))


async def test_copies_that_fail_start_over_and_fail_nobody(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw, welcome = await joined(tmp_path)
        await stack.ready(1)
        moving = asyncio.create_task(stack.generate([1, 2, 3]))
        assert isinstance(await raw.receive(), StepPlan)
        await raw.send(Copied(welcome.epoch, 1, DEVICE, HOST, error=StepError("internal", "the link is broken")))
        while not isinstance(answer := await raw.receive(), Welcome):
            assert isinstance(answer, StepPlan)
        assert answer.epoch > welcome.epoch
        await raw.send(Goodbye(answer.epoch, ""))
        async with executor(tmp_path):
            assert len(await moving) == 8
        raw.close()


async def test_a_copy_that_is_never_confirmed_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw, welcome = await joined(tmp_path)
        await stack.ready(1)
        (engine,) = stack.router.engines
        engine.scheduler.recoveries.transfers.asked(1, [FROM_PEER], {}, monotonic() - 60)
        async with asyncio.timeout(10):
            while stack.router.engines:
                await raw.send(Heartbeat(welcome.epoch))
                await asyncio.sleep(0.05)
        raw.close()


@pytest.mark.parametrize("confirms", [True, False])
async def test_a_fetch_that_takes_too_long_is_cancelled(tmp_path: Path, confirms: bool) -> None:
    async with running(tmp_path) as stack:
        raw, welcome = await joined(tmp_path)
        await stack.ready(1)
        (engine,) = stack.router.engines
        began = monotonic()
        engine.scheduler.recoveries.transfers.asked(7, [FROM_PEER], {}, began - 4.5)
        async with asyncio.timeout(10):
            while not isinstance(message := await raw.receive(), CancelCopies):
                await raw.send(Heartbeat(welcome.epoch))
            assert (message.step, message.peer, monotonic() - began > 0.5) == (7, "ipc://peer", True)
            if confirms:
                await raw.send(Copied(welcome.epoch, 7, DEVICE, DEVICE, bad=b"1234", peer="ipc://peer"))
                while engine.oldest_copy_time is not None:
                    await asyncio.sleep(0.01)
            began = monotonic()
            while stack.router.engines and monotonic() - began < 2.5:
                await raw.send(Heartbeat(welcome.epoch))
                await asyncio.sleep(0.05)
        assert len(stack.router.engines) == confirms
        raw.close()


async def test_executors_that_come_and_go_do_not_make_a_request_wait_longer(tmp_path: Path) -> None:
    async with running(tmp_path, patience=1.0) as stack:
        async with executor(tmp_path):
            await stack.ready(1)
        await stack.ready(0)
        waiting = asyncio.create_task(stack.generate(list(range(200))))
        began = monotonic()
        while not waiting.done():
            small = SimulatedRunner(ExecutorConfig(num_blocks=8, block_size=4))
            async with executor(tmp_path, "small", runner=small):
                await stack.ready(1)
            await stack.ready(0)
        with pytest.raises(NoExecutorError):
            await waiting
        assert monotonic() - began < 5


async def test_a_sender_that_never_ends_leaves_time_for_the_others(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        flooding = threading.Event()
        flooding.set()

        def flood() -> None:
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.connect(f"ipc://{tmp_path}/wire")
                while flooding.is_set():
                    socket.send(b"x")

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            most, before, until = 0.0, 0.0, monotonic() + 2
            while monotonic() < until:
                await asyncio.sleep(0)
                dropped = stack.dropped("undecodable")
                most, before = max(most, dropped - before), dropped
            assert before > 1000
            assert most <= 64, "frames that are looked at before anybody else has a turn"
        finally:
            flooding.clear()
            thread.join()


async def test_simulated_executors_search_beams_too(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        assert len(await stack.generate([1, 2, 3], beam=BeamParams(2))) == 8


async def test_sequences_that_only_one_will_be_chosen_of_count_too(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        with pytest.raises(AdmissionError, match="waiting already"):
            await stack.generate([1, 2, 3], best_of=9)


async def test_an_executor_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        await raw.send(hello())
        assert isinstance(await raw.receive(), Welcome)
        await stack.ready(1)
        moving = asyncio.create_task(stack.generate([1, 2, 3]))
        assert isinstance(await raw.receive(), StepPlan)
        await stack.ready(0)
        async with executor(tmp_path):
            assert len(await moving) == 8
        await raw.send(StepResult(1, 1))
        while not isinstance(answer := await raw.receive(), Rejoin):
            assert isinstance(answer, StepPlan), "plans that were sent before it was given up"
        assert stack.dropped("unknown_sender") == 1
        raw.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"protocol_major": PROTOCOL_MAJOR + 1}, "speaks protocol"),
        ({"num_blocks": 0}, "offers no blocks"),
        ({"model_fingerprint": "other"}, "is not the fleet's model"),
    ],
)
async def test_who_does_not_fit_is_refused_with_a_reason(
    tmp_path: Path, fields: dict[str, object], reason: str
) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        raw = RawExecutor(tmp_path)
        await raw.send(hello(**fields))
        answer = await raw.receive()
        assert isinstance(answer, Refused)
        assert reason in answer.reason
        raw.close()


async def test_garbage_and_stale_epochs_are_dropped_and_counted(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        await raw.send(hello())
        welcome = await raw.receive()
        assert isinstance(welcome, Welcome)
        await stack.ready(1)
        for junk in (b"", b"\xc1garbage", encode(Welcome(1, 1, 1))):
            await raw.send(junk)
        await raw.send(StepResult(welcome.epoch - 1, 1))
        await raw.send(Heartbeat(welcome.epoch))
        await raw.receive()
        async with asyncio.timeout(5):
            while stack.dropped("stale_epoch") < 1:
                await asyncio.sleep(0.01)
        assert stack.dropped("undecodable") == 3
        await stack.ready(1)
        for _ in range(MAX_BAD_FRAMES):
            await raw.send(b"\xc1")
        await stack.ready(0)
        raw.close()


async def test_a_failed_step_starts_over_under_a_new_epoch_and_fails_only_what_cannot_run_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        await raw.send(hello())
        await raw.receive()
        await stack.ready(1)
        doomed = asyncio.create_task(stack.generate([1, 2, 3]))
        while not doomed.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    message = decode_from_scheduler(await raw.socket.recv())
                    if isinstance(message, StepPlan):
                        await raw.send(StepResult(message.epoch, message.step, error=StepError("internal", "broken")))
        with pytest.raises(GenerationError, match="broken"):
            await doomed
        raw.close()


async def test_admission(tmp_path: Path) -> None:
    async with running(tmp_path, patience=0.3) as stack:
        with pytest.raises(AdmissionError) as error:
            await stack.generate([1])
        assert error.value.kind == "unavailable"
        async with executor(tmp_path):
            await stack.ready(1)
            with pytest.raises(AdmissionError) as error:
                await stack.generate([1, 2], max_tokens=10_000)
            assert error.value.kind == "never_fits"
        await stack.ready(0)
        with pytest.raises(NoExecutorError, match="no executor could take the request"):
            await stack.generate([1])
        waiting = [asyncio.create_task(stack.generate([1])) for _ in range(8)]
        await asyncio.sleep(0.05)
        with pytest.raises(AdmissionError) as error:
            await stack.generate([1])
        assert error.value.kind == "unavailable"
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_one_that_comes_back_on_another_connection_is_the_same_and_lends_on(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        offer = hello(block_endpoint="ipc:///blocks", block_format="x")
        first, second = RawExecutor(tmp_path), RawExecutor(tmp_path)
        for raw in (first, second):
            await raw.send(offer)
            assert isinstance(await raw.receive(), Welcome)
        await stack.ready(1)
        async with asyncio.timeout(5):
            while len(stack.router.engines) != 1:
                await asyncio.sleep(0.01)
        (engine,) = stack.router.engines
        assert stack.fleet._lending.directory.peers["ipc:///blocks"].scheduler is engine.scheduler
        assert engine.scheduler.recoveries.endpoint == "ipc:///blocks"
        first.close()
        second.close()


async def test_a_request_goes_to_an_executor_that_takes_its_length(tmp_path: Path) -> None:
    short = SimulatedRunner(ExecutorConfig(num_blocks=64, block_size=4, max_model_len=16))
    async with running(tmp_path) as stack, executor(tmp_path, "short", runner=short), executor(tmp_path, "long"):
        await stack.ready(2)
        for _ in range(6):
            assert len(await stack.generate(list(range(40)))) == 8
        assert {engine.scheduler.max_model_len for engine in stack.router.engines} == {16, 8192}


async def test_a_core_that_fails_takes_nobody_along(tmp_path: Path) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("broken")

    async with running(tmp_path) as stack, executor(tmp_path, "one", 0.05):
        await stack.ready(1)
        expected = await stack.generate([1, 2, 3])
        (engine,) = stack.router.engines
        serving = asyncio.create_task(stack.generate([1, 2, 3]))
        await asyncio.sleep(0.1)
        engine.scheduler.schedule = engine.scheduler.release_all = broken  # type: ignore[method-assign, assignment]
        assert await serving == expected, "it goes on when the executor has joined again"

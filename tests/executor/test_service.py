"""The executor service over a real ROUTER socket, with the simulated runner behind it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from pagewise_executor.runner import Counted
from pagewise_executor.service import ExecutorService
from pagewise_executor.simulated import SimulatedRunner
from pagewise_executor.worker import Worker
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import RefusedError
from pagewise_shared.protocol import (
    DEVICE,
    HOST,
    BlockCopies,
    Drain,
    FromExecutor,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leaving,
    Message,
    NewSequence,
    Refused,
    Rejoin,
    RemoteTier,
    StepPlan,
    StepResult,
    Welcome,
    decode_from_executor,
    encode,
    pack_int32s,
)
from pagewise_shared.sampling import SamplingParams, TokenConstraints


class Scheduler:
    """The other end of the wire: sends messages for a test, and returns incoming ones."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.identity = b""

    async def receive(self, kind: type[FromExecutor], seconds: float = 10.0) -> FromExecutor:
        async with asyncio.timeout(seconds):
            while True:
                self.identity, frame = await self.socket.recv_multipart()
                message = decode_from_executor(frame)
                if isinstance(message, Heartbeat) and kind is not Heartbeat:
                    await self.send(HeartbeatAck(message.epoch))
                elif isinstance(message, kind):
                    return message

    async def send(self, message: Message | bytes) -> None:
        frame = message if isinstance(message, bytes) else encode(message)
        await self.socket.send_multipart([self.identity, frame])

    async def welcome(self, epoch: int) -> int:
        """Answer the next Hello, as if its inventory were used; returns the Hello's number."""
        hello = await self.receive(Hello)
        assert isinstance(hello, Hello)
        await self.send(Welcome(epoch, 4, 16, keeps_blocks=True, hello=hello.number))
        return hello.number

    async def result(self) -> StepResult:
        message = await self.receive(StepResult)
        assert isinstance(message, StepResult)
        return message


@asynccontextmanager
async def joined(
    path: Path, step_seconds: float = 0.0, heartbeat_ms: int = 200
) -> AsyncIterator[tuple[Scheduler, "asyncio.Task[None]", ExecutorService]]:
    endpoint = f"ipc://{path}/wire"
    runner = SimulatedRunner(
        ExecutorConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=16), step_seconds
    )
    service = ExecutorService(Worker(lambda: runner), endpoint, "e")
    running = asyncio.create_task(service.run())
    scheduler = Scheduler(endpoint)
    try:
        await scheduler.receive(Hello)
        await scheduler.send(Welcome(5, 4, 16, heartbeat_ms))
        yield scheduler, running, service
    finally:
        service.stop("test over")
        await asyncio.gather(running, return_exceptions=True)
        scheduler.socket.close()
        scheduler.context.term()


def plan(step: int, epoch: int = 5, **fields: object) -> StepPlan:
    return StepPlan(epoch=epoch, step=step, **fields)  # type: ignore[arg-type]


def new(row: int = 0, blocks: tuple[int, ...] = (3,), prompt: int = 3, **sampling: object) -> NewSequence:
    params = SamplingParams(**({"temperature": 0} | sampling))  # type: ignore[arg-type]
    return NewSequence(row, pack_int32s([1, 2, 3]), prompt, 0, pack_int32s(blocks), params)


NOBODY = RemoteTier("ipc:///nobody", 1, 1)

FIRST = {"joined": (new(),), "chunks": ((0, 3),)}


async def test_plans_are_answered_in_order(tmp_path: Path) -> None:
    async with joined(tmp_path) as (scheduler, _, _):
        await scheduler.send(plan(1, **FIRST))
        await scheduler.send(plan(2))
        first, second = await scheduler.result(), await scheduler.result()
        assert (first.step, second.step) == (1, 2)
        assert len(first.tokens) == len(second.tokens) == 4
        assert first.error is None


async def test_a_result_that_no_frame_holds_is_told_as_a_failed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewise_executor.service.MAX_STEP_RESULT_BYTES", 8)
    async with joined(tmp_path) as (scheduler, _, _):
        await scheduler.send(plan(1, **FIRST))
        result = await scheduler.result()
        assert (result.step, result.tokens) == (1, b"")
        assert result.error is not None
        assert "at most 8 may" in result.error.message


async def test_garbage_stale_epochs_and_wrong_steps_are_dropped(tmp_path: Path) -> None:
    async with joined(tmp_path) as (scheduler, _, service):
        for junk in (b"", b"\xff\x00junk", encode(Heartbeat(5)), encode(plan(1, epoch=4)), encode(plan(2))):
            await scheduler.send(junk)
        await scheduler.send(plan(1, **FIRST))
        result = await scheduler.result()
        assert (result.epoch, result.step, result.error) == (5, 1, None)
        assert service.bad_frames == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"left": (2,)},
        {"joined": (new(row=4),)},
        {"joined": (new(), new())},
        {"joined": (new(blocks=(8,)),)},
        {"joined": (new(blocks=(-1,)),)},
        {"tables": pack_int32s([1, 0, 1])},
        {"tables": pack_int32s([0, 9, 1])},
        {"tables": pack_int32s([0, 0, 99999])},
        {"tables": pack_int32s([1, 1])},
        {"tables": b"abc"},
        {"copies": (BlockCopies(DEVICE, DEVICE, pack_int32s([0, 99])),)},
        {"copies": (BlockCopies(DEVICE, DEVICE, pack_int32s([0])),)},
        {"copies": (BlockCopies(DEVICE, DEVICE, pack_int32s([0, 8]), NOBODY),)},
        {"copies": (BlockCopies(DEVICE, DEVICE, pack_int32s([0, 0, 1]), NOBODY),)},
        {"copies": (BlockCopies(2**40, DEVICE, pack_int32s([0, 0]), NOBODY),)},
        {"copies": (BlockCopies(DEVICE, HOST, pack_int32s([0, 0]), NOBODY),)},
        {"copies": (BlockCopies(DEVICE, 2, pack_int32s([0, 0])),)},
        {"copies": (BlockCopies(-1, DEVICE, pack_int32s([0, 0])),)},
        {"computed": ((0, 1),)},
        {"chunks": ((0, 1),)},
        {"joined": (new(),), "chunks": ((0, 4),)},
        {"joined": (new(blocks=()),), "chunks": ((0, 3),)},
        {"joined": (new(),), "chunks": ((0, 1), (0, 1))},
        {"joined": (new(prompt=0),)},
        {"joined": (new(prompt=4),)},
        {"joined": (new(temperature=float("nan")),)},
        {"joined": (new(repetition_penalty=0.0),)},
        {"joined": (new(top_k=-1),)},
        {"joined": (new(logprobs=2**40),)},
        {"constraints": (TokenConstraints(bad_words=(b"",)),)},
        {"constraints": (TokenConstraints(bad_words=(b"abc",)),)},
        {"constraints": (TokenConstraints(allowed=bytes(2**19)),)},
        {"constraints": (TokenConstraints(biased=pack_int32s([-1]), biases=bytes(4)),)},
        {"constraints": (TokenConstraints(biased=pack_int32s([1]), biases=b"\0\0\xc0\x7f"),)},
        {"constraints": (TokenConstraints(biased=pack_int32s([1]), biases=b""),)},
        {"joined": (msgspec.structs.replace(new(), constraints=0),)},
        {"joined": (msgspec.structs.replace(new(), constraints=-2),)},
        {"joined": (new(constraints=TokenConstraints()),)},
        {"joined": (new(stop_token_ids=(-1,)),)},
    ],
)
async def test_an_invalid_plan_fails_its_epoch_until_the_next_welcome(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    async with joined(tmp_path) as (scheduler, _, _):
        await scheduler.send(plan(1, **fields))
        await scheduler.send(plan(2, **FIRST))
        for step in (1, 2):
            result = await scheduler.result()
            assert result.step == step
            assert result.error is not None
            assert result.error.kind == "invalid_plan"
        await scheduler.send(Welcome(6, 4, 16))
        await scheduler.send(plan(1, epoch=6, **FIRST))
        assert (await scheduler.result()).error is None


@pytest.mark.parametrize("welcome", [Welcome(6, 5, 16), Welcome(6, -1, 16), Welcome(6, 4, 17), Welcome(6, 4, 16, 0)])
async def test_a_welcome_that_asks_for_more_than_there_is_is_dropped(tmp_path: Path, welcome: Welcome) -> None:
    async with joined(tmp_path) as (scheduler, _, service):
        await scheduler.send(welcome)
        await scheduler.send(plan(1, **FIRST))
        assert (await scheduler.result()).epoch == 5
        assert service.bad_frames == 1


async def test_heartbeats_go_on_while_a_step_runs(tmp_path: Path) -> None:
    async with joined(tmp_path, step_seconds=1.0, heartbeat_ms=100) as (scheduler, _, _):
        await scheduler.send(plan(1, **FIRST))
        for _ in range(3):
            await scheduler.receive(Heartbeat, seconds=0.8)
        assert (await scheduler.result()).step == 1


async def test_it_says_hello_again_when_it_is_forgotten(tmp_path: Path) -> None:
    async with joined(tmp_path) as (scheduler, _, _):
        await scheduler.send(plan(1, **FIRST))
        await scheduler.result()
        await scheduler.send(Rejoin())
        await scheduler.receive(Hello)
        await scheduler.send(Welcome(9, 4, 16))
        await scheduler.send(plan(1, epoch=9, **FIRST))
        assert (await scheduler.result()).epoch == 9


async def test_plans_of_a_life_whose_blocks_were_offered_are_not_run(tmp_path: Path) -> None:
    async with joined(tmp_path) as (scheduler, _, _):
        await scheduler.send(plan(1, **FIRST))
        await scheduler.result()
        await scheduler.send(Rejoin())
        await scheduler.send(plan(2))
        await scheduler.welcome(9)
        await scheduler.send(plan(1, epoch=9, **FIRST))
        assert (await scheduler.result()).epoch == 9, "and not the result of step 2"


async def test_one_inventory_is_good_for_one_welcome(tmp_path: Path) -> None:
    async with joined(tmp_path) as (scheduler, _, _):
        await scheduler.send(Rejoin())
        first = await scheduler.welcome(6)
        await scheduler.send(Welcome(7, 4, 16, keeps_blocks=True, hello=first))
        assert await scheduler.welcome(8) > first
        await scheduler.send(plan(1, epoch=8, **FIRST))
        assert (await scheduler.result()).epoch == 8


async def test_a_late_welcome_for_an_inventory_of_before_is_not_taken(tmp_path: Path) -> None:
    async with joined(tmp_path) as (scheduler, _, _):
        await scheduler.send(Rejoin())
        hello = await scheduler.receive(Hello)
        assert isinstance(hello, Hello)
        first = hello.number
        # The answers to two Hellos arrive together, with a plan between them; then a third one for the same inventory.
        await scheduler.send(Welcome(6, 4, 16, keeps_blocks=True, hello=first))
        await scheduler.send(plan(1, epoch=6, **FIRST))
        await scheduler.send(Welcome(7, 4, 16, keeps_blocks=True, hello=first))
        hello = await scheduler.receive(Hello)
        assert isinstance(hello, Hello)
        assert hello.number == first + 1, "counted anew, after the plan"
        await scheduler.send(Welcome(8, 4, 16, keeps_blocks=True, hello=first))
        await scheduler.send(plan(1, epoch=8, **FIRST))
        await scheduler.send(Welcome(9, 4, 16, keeps_blocks=True, hello=first + 1))
        await scheduler.send(plan(1, epoch=9, **FIRST))
        assert (await scheduler.result()).epoch == 9


async def test_it_asks_to_be_drained_and_asks_again_when_it_is_let_in_anew(tmp_path: Path) -> None:
    async with joined(tmp_path) as (scheduler, running, service):
        await scheduler.receive(Heartbeat)  # it is in
        service.leave("SIGTERM")
        first = await scheduler.receive(Leaving)
        assert first.epoch == 5
        assert 29_000 < first.timeout_ms <= 30_000
        await scheduler.send(Rejoin())
        await scheduler.receive(Hello)
        await scheduler.send(Welcome(6, 4, 16))
        again = await scheduler.receive(Leaving)
        assert again.epoch == 6
        assert again.timeout_ms < 30_000
        await scheduler.send(Drain(6))
        await scheduler.receive(Goodbye)
        await running


async def test_heartbeats_tell_each_scheduler_of_refused_and_closed_connections_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path, heartbeat_ms=50) as (scheduler, _, service):
        runner = service._worker._runner

        async def told() -> tuple[int, int]:
            heartbeat = await scheduler.receive(Heartbeat)
            assert 5 <= heartbeat.tasks < 30
            return heartbeat.epoch, heartbeat.refused

        assert await told() == (5, 0)
        for total in (2, 5):
            monkeypatch.setattr(runner, "counted", Counted(num_refused=total))
            async with asyncio.timeout(10):
                while await told() != (5, total):
                    pass  # was on its way
        await scheduler.send(Rejoin())
        await scheduler.receive(Hello)
        await scheduler.send(Welcome(6, 4, 16, 50))
        assert await told() == (6, 0)
        monkeypatch.setattr(runner, "counted", Counted(num_refused=6))
        async with asyncio.timeout(10):
            while await told() != (6, 1):
                pass


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with joined(tmp_path) as (scheduler, running, service):
        await scheduler.receive(Heartbeat)
        service.leave("SIGTERM")
        await scheduler.receive(Leaving)
        service.leave("SIGTERM")
        await scheduler.receive(Goodbye)
        await running


async def test_it_leaves_when_told_to(tmp_path: Path) -> None:
    async with joined(tmp_path) as (scheduler, running, _):
        await scheduler.send(Drain(5))
        await scheduler.receive(Goodbye)
        await asyncio.wait_for(running, 5)


async def test_a_refusal_ends_it_with_the_reason(tmp_path: Path) -> None:
    async with joined(tmp_path) as (scheduler, running, _):
        await scheduler.send(Refused("wrong model"))
        with pytest.raises(RefusedError, match="wrong model"):
            await asyncio.wait_for(running, 5)


async def test_a_worker_that_breaks_ends_the_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with joined(tmp_path) as (scheduler, running, _):
        await scheduler.send(plan(1, **FIRST))
        await scheduler.result()

        def broken(*_: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(SimulatedRunner, "reset", broken)
        await scheduler.send(Welcome(6, 4, 16))
        with pytest.raises(RuntimeError, match="the device is gone"):
            await asyncio.wait_for(running, 10)

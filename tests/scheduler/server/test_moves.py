"""Requests that move: which one is blamed for dead executors, how soon a death is noticed, how long requests wait."""

import asyncio
from pathlib import Path
from time import monotonic

import pytest
from pagewise_executor.service import ExecutorService
from pagewise_executor.simulated import SimulatedRunner
from pagewise_executor.worker import Worker
from pagewise_scheduler.server.router import MAX_DEATHS
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import Goodbye, HeartbeatAck, StepPlan, StepResult, encode, pack_int32s

from tests.scheduler.server.played_gateway import FailedPromptError
from tests.scheduler.server.stack import RawExecutor, executor, executors_of, joined, running


async def next_plan(raw: RawExecutor) -> StepPlan:
    while isinstance(message := await raw.receive(), HeartbeatAck):  # another connection broke: are you there?
        pass
    assert isinstance(message, StepPlan)
    return message


async def test_a_connection_that_breaks_is_noticed_before_heartbeats_are_missed(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=20.0) as stack:
        stack.registry.timeout = 30.0
        raw, _ = await joined(tmp_path)
        await stack.ready(1)
        moving = asyncio.create_task(stack.generate([1, 2, 3]))
        await next_plan(raw)
        await next_plan(raw)  # the second of two steps in flight: no more is sent until one is answered
        began = monotonic()
        raw.close()
        await stack.ready(0)
        assert monotonic() - began < 15.0
        async with executor(tmp_path):
            assert len(await moving) == 8
        assert stack.metrics.request_moves("lost")._value.get() == 1


@pytest.mark.parametrize("full", [True, False])
async def test_what_the_others_have_no_room_for_goes_on_where_it_is(tmp_path: Path, full: bool) -> None:
    runner = SimulatedRunner(
        ExecutorConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=64), 0.05
    )
    leaving = ExecutorService(Worker(lambda: runner), executors_of(tmp_path), "leaves")
    # The executor that stays is slower, so that it has no room before the leaving one has ended its work.
    async with running(tmp_path) as stack, executor(tmp_path, "stays", step_seconds=0.15 if full else 0.05):
        served = asyncio.create_task(leaving.run())
        await stack.ready(2)
        number = 8 if full else 2
        requests = [asyncio.create_task(stack.generate([n, 2, 3], max_tokens=25)) for n in range(number)]
        async with asyncio.timeout(10):
            while {handle.scheduler.num_running for handle in stack.executors} != {number // 2}:
                await asyncio.sleep(0.005)
        leaving.leave("the test says so")
        async with asyncio.timeout(40):
            assert [len(tokens) for tokens in await asyncio.gather(*requests)] == [25] * number
            await served
        assert stack.metrics.request_moves("left")._value.get() == (0 if full else 1)


async def test_what_fits_nowhere_else_goes_on_to_its_end_where_it_is(tmp_path: Path) -> None:
    """Longer than the time for work that the others merely have no room for now, which is half of all."""
    runner = SimulatedRunner(
        ExecutorConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=64), 0.1
    )
    leaving = ExecutorService(Worker(lambda: runner), executors_of(tmp_path), "leaves", drain_timeout=13.0)
    smaller = SimulatedRunner(ExecutorConfig(num_blocks=16, block_size=4), 0.01)
    async with running(tmp_path, placement_timeout=5.0) as stack, executor(tmp_path, "stays", runner=smaller):
        stack.registry.timeout = 30.0
        served = asyncio.create_task(leaving.run())
        await stack.ready(2)
        large = asyncio.create_task(stack.generate([1, 2, 3], max_tokens=70))
        async with asyncio.timeout(10):
            while not any(handle.scheduler.num_running for handle in stack.executors):
                await asyncio.sleep(0.005)
        leaving.leave("the test says so")
        async with asyncio.timeout(40):
            assert len(await large) == 70
            await served


async def test_executors_that_leave_or_die_while_a_request_gets_on_do_not_count_against_it(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=20.0) as stack:
        moving: asyncio.Task[list[int]] | None = None
        for life in range(2 * (MAX_DEATHS + 2)):
            raw, welcome = await joined(tmp_path)
            await stack.ready(1)
            moving = moving or asyncio.create_task(stack.generate([1, 2, 3], max_tokens=40))
            plan = await next_plan(raw)
            if life % 2:
                await raw.send(Goodbye(welcome.epoch, "stopped"))
            else:
                await raw.send(StepResult(welcome.epoch, plan.step, pack_int32s([7])))
                while (await next_plan(raw)).step < 3:  # it was sent after that token had been taken
                    pass
            raw.close()
            await stack.ready(0)
        assert moving is not None
        async with executor(tmp_path):
            tokens = await moving
        assert len(tokens) == 40
        assert tokens[: MAX_DEATHS + 2] == [7] * (MAX_DEATHS + 2)


async def test_a_request_in_whose_steps_executors_die_is_given_up_and_those_that_wait_are_not(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=30.0) as stack:
        doomed: asyncio.Task[list[int]] | None = None
        for _ in range(MAX_DEATHS + 1):
            raw, _ = await joined(tmp_path, max_num_seqs=1)
            await stack.ready(1)
            if doomed is None:
                doomed = asyncio.create_task(stack.generate([1, 2, 3]))
                await asyncio.sleep(0)
                waiting = asyncio.create_task(stack.generate([4, 5, 6]))
            await next_plan(raw)
            assert not doomed.done()
            raw.close()
            await stack.ready(0)
        assert doomed is not None
        with pytest.raises(FailedPromptError, match=f"{MAX_DEATHS + 1} executors in a row died"):
            await doomed
        async with executor(tmp_path):
            assert len(await waiting) == 8


async def test_who_has_to_wait_for_an_executor_again_may_wait_as_long_again(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=4.0) as stack:
        async with executor(tmp_path):
            await stack.ready(1)
        await stack.ready(0)
        moving = asyncio.create_task(stack.generate([1, 2, 3]))
        await asyncio.sleep(2.0)
        raw, welcome = await joined(tmp_path)
        await next_plan(raw)
        await raw.socket.send(encode(Goodbye(welcome.epoch, "stopped")))
        await asyncio.sleep(2.4)
        assert not moving.done()
        async with executor(tmp_path):
            assert len(await moving) == 8
        raw.close()

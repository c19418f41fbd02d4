"""The limits of an executor's steps: by its device, and by the scheduler's options."""

import asyncio
from pathlib import Path

import pytest
from pagewise_executor.service import ExecutorService
from pagewise_executor.simulated import SimulatedRunner
from pagewise_executor.worker import Worker
from pagewise_scheduler.server.executor_handle import ExecutorHandle
from pagewise_shared.config import ExecutorConfig

from tests.scheduler.server.stack import executor, executors_of, joined, running


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        ({"max_num_seqs": None, "max_num_batched_tokens": None}, {"large": (1024, 8192), "small": (4, 64)}),
        ({"max_num_seqs": 8, "max_num_batched_tokens": None}, {"large": (8, 8192), "small": (4, 64)}),
        ({"max_num_seqs": None, "max_num_batched_tokens": 32}, {"large": (32, 32), "small": (4, 32)}),
    ],
)
async def test_each_executor_has_the_limits_of_its_device_unless_others_are_asked_for(
    asked: dict[str, int | None], limits: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    async with running(tmp_path, **asked) as stack, executor(tmp_path, "small"):
        runner = SimulatedRunner(
            ExecutorConfig(num_blocks=64, block_size=4, max_num_seqs=1024, max_num_batched_tokens=8192)
        )
        service = ExecutorService(Worker(lambda: runner), executors_of(tmp_path), "large")
        task = asyncio.create_task(service.run())
        await stack.ready(2)
        assert {handle.executor_id: _limits(handle) for handle in stack.executors} == limits
        service.stop("test over")
        await task


async def test_executors_and_schedulers_that_leave_it_to_each_other_have_moderate_limits(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_seqs=None, max_num_batched_tokens=None) as stack:
        raw, welcome = await joined(tmp_path, max_num_seqs=0, max_num_batched_tokens=0)
        assert (welcome.max_num_seqs, welcome.max_num_batched_tokens) == (256, 2048)
        assert [_limits(handle) for handle in stack.executors] == [(256, 2048)]
        raw.close()


def _limits(handle: ExecutorHandle) -> tuple[int, int]:
    return handle.scheduler.limits.max_num_seqs, handle.scheduler.limits.max_num_batched_tokens

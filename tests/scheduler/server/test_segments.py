"""Requests with segments between a gateway and executors: the executors that can serve them, and the answers."""

from pathlib import Path

import msgspec
import pytest
from pagewise_executor.simulated import SimulatedRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import Prompt, PromptSegments, RequestParams, Submit, pack_int32s

from tests.scheduler.server.played_gateway import GREEDY, RefusedRequestError
from tests.scheduler.server.stack import executor, int32s, running

PROMPT = [7, *range(10, 30), 8, *range(40, 60), 9]
SEGMENTS = PromptSegments(int32s(1, 21, 22, 42))


def submit(prompt: list[int], segments: PromptSegments | None, n: int = 1) -> Submit:
    return Submit(0, 0, "r", (Prompt(pack_int32s(prompt), 8, segments=segments),), RequestParams(GREEDY, n=n))


def simulated(num_blocks: int, no_segments: str = "") -> SimulatedRunner:
    runner = SimulatedRunner(ExecutorConfig(num_blocks=num_blocks, block_size=4))
    runner.info = msgspec.structs.replace(runner.info, no_segments=no_segments)
    return runner


async def test_what_computes_segments_is_not_told_of(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        plain = (await (await stack.gateway.submit_as(submit(PROMPT, None))).result())[0]
        for _ in range(2):
            request = await stack.gateway.submit_as(submit(PROMPT, SEGMENTS, n=2))
            assert await request.result() == [plain, plain], "the simulated executor goes by tokens alone"
        assert stack.metric("segment_tokens_total", outcome="computed") == 40
        assert stack.metric("segment_moved_tokens_total") == 40
        await stack.all_free()


async def test_too_little_memory_for_segments_is_told_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, runner=simulated(22)):
        await stack.ready(1)
        with pytest.raises(RefusedRequestError, match="does not fit beside what its segments are moved from"):
            await (await stack.gateway.submit_as(submit(PROMPT, SEGMENTS))).result()
        await (await stack.gateway.submit_as(submit(PROMPT, None))).result()


async def test_a_model_without_segments_says_why(tmp_path: Path) -> None:
    runner = simulated(64, "its keys are not rotated")
    async with running(tmp_path) as stack, executor(tmp_path, runner=runner):
        await stack.ready(1)
        with pytest.raises(RefusedRequestError, match="the model cannot have segments: its keys are not rotated"):
            await (await stack.gateway.submit_as(submit(PROMPT, SEGMENTS))).result()

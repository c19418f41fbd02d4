"""The router places by cached prefixes, over a real socket, and counts its decisions."""

import asyncio
from pathlib import Path

import pytest
from pagewise_shared.protocol import KeyLimits, RequestParams, ReuseHints, Submit

from tests.scheduler.server.played_gateway import GREEDY, PlayedRequest, prompts_of
from tests.scheduler.server.stack import Stack, executor, running


def count(stack: Stack, reason: str) -> float:
    return float(stack.metrics.placements(reason)._value.get())


async def test_a_session_stays_where_its_prefix_is(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, "one"), executor(tmp_path, "two"):
        await stack.ready(2)
        prompts = [list(range(10 * session, 10 * session + 40)) for session in (1, 50)]
        for _ in range(4):
            for prompt in prompts:
                prompt += await stack.generate(prompt, max_tokens=4)
        assert count(stack, "load") == 2, "each session's first turn"
        assert count(stack, "cached") == 6
        hits = [handle.scheduler.prefix_hits[1] for handle in stack.executors]
        assert sum(hits) >= 2 * (40 + 44 + 48)
        ratios = stack.metrics.placement_actual_ratio
        assert sum(bucket.get() for bucket in ratios._buckets) == 8, "each prediction was compared with what it took"


async def test_requests_that_move_are_placed_anew_and_leave_nothing_behind(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        async with executor(tmp_path, "one", step_seconds=0.01):
            await stack.ready(1)
            moving = [asyncio.create_task(stack.generate([5, 6, number], max_tokens=40)) for number in range(3)]
            await asyncio.sleep(0.1)
        async with executor(tmp_path, "two"):
            assert [len(tokens) for tokens in await asyncio.gather(*moving)] == [40, 40, 40]
            (handle,) = stack.executors
            assert handle.view.load == 0
        assert count(stack, "only") == 6


async def test_if_nobody_is_left_for_a_role_the_others_do_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, "p", role="prefill"):
        # Two that connect at once may join in either order, and the first finds a role without anybody.
        await stack.ready(1)
        async with executor(tmp_path, "d", role="decode"):
            await stack.ready(2)
            assert len(await stack.generate([1, 2, 3])) == 8
            assert stack.metric("requests_without_role_total", role="decode") == 0
        await stack.ready(1)
        for first in range(3):
            assert len(await stack.generate([first, 2, 3])) == 8
        assert stack.metric("requests_without_role_total", role="decode") == 3
        assert stack.metric("requests_without_role_total", role="prefill") == 0
    # Once when `p` joined alone, once when `d` left it.
    assert caplog.text.count("no executor is there for decode: the others do both") == 2


async def test_what_cannot_be_fetched_stays_where_its_prompt_was_computed(tmp_path: Path) -> None:
    """Executors that invent tokens lend no blocks."""
    async with (
        running(tmp_path) as stack,
        executor(tmp_path, "p", role="prefill"),
        executor(tmp_path, "d", role="decode"),
    ):
        await stack.ready(2)
        assert len(await stack.generate(list(range(50)))) == 8
        assert stack.metric("request_moves_total", reason="decode") == 0


async def test_a_session_that_returns_at_another_executor_has_kept_its_hint(tmp_path: Path) -> None:
    async def turn(first: int) -> PlayedRequest:
        reuse = ReuseHints(session="s", returns_in=60.0)
        params = RequestParams(GREEDY, 1, None, 0, None, "", "", reuse=reuse)
        prompts = prompts_of([[first, 2, 3, 4, 5]], 4)
        return await stack.gateway.submit_as(Submit(0, 0, f"turn {first}", prompts, params, KeyLimits()))

    async with running(tmp_path) as stack, executor(tmp_path, "one", step_seconds=0.01):
        await stack.ready(1)
        (one,) = stack.executors
        await (await turn(1)).result()
        busy = await stack.gateway.submit([9] * 40, max_tokens=200)
        await busy.until_tokens(1)
        async with executor(tmp_path, "two"):
            await stack.ready(2)
            await (await turn(2)).result()
            counts = [handle.scheduler.features.advice.counts() for handle in stack.executors]
        assert [(each["hints_kept"], each["hints_broken"]) for each in counts] == [(1, 0), (0, 0)]
        assert one.scheduler.features.counts()["hints_kept"] == 1
        await stack.gateway.abort(busy)

"""A process of ``pagewise serve`` that cannot start again, while the others serve."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import httpx
import openai
import pytest

from benchmarks.processes import EXECUTOR, Served, serving


def executor_1(server: Served) -> int | None:
    """Its process id, if it runs."""
    for pid in server.pids(EXECUTOR):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            if b"--executor-id=executor-1" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


async def stream(client: openai.AsyncOpenAI, number: int, ended: asyncio.Event) -> None:
    """One stream after the other until ``ended``; each is complete."""
    more = {"ignore_eos": True}
    while not ended.is_set():
        answer = await client.completions.create(
            model="pagewise-demo", prompt=f"{number}", max_tokens=300, stream=True, extra_body=more
        )
        assert [chunk async for chunk in answer][-1].choices[0].finish_reason == "length"


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_an_executor_that_cannot_start_again_ends_nobody_s_streams() -> None:
    """It is killed before it is ready, more often than a start may fail; then it is left alone, and is ready again."""
    with serving("--executors=2", "--num-blocks=600") as server:
        server.wait_for_metric("executors_ready", 2)
        ended = asyncio.Event()

        async def kill() -> None:
            for _ in range(6):
                async with asyncio.timeout(60):
                    while (pid := executor_1(server)) is None:
                        await asyncio.sleep(0.02)
                os.kill(pid, signal.SIGKILL)
                async with asyncio.timeout(10):
                    while executor_1(server) == pid:
                        await asyncio.sleep(0.02)

        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
            httpx.AsyncClient() as http,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(20):
                tasks.create_task(stream(client, number, ended))
            await asyncio.sleep(1)
            await kill()
            await asyncio.sleep(2)
            health = await http.get(f"{server.url}/health")
            assert (health.status_code, health.json()["status"]) == (200, "degraded")
            (problem,) = health.json()["problems"]
            assert problem.startswith("executor-1: ended 6 times in a row right after its start")
            assert server.metric("service_restarts_total", service="executor-1") == 6
            assert server.metric("service_failing", service="executor-1") == 1
            await asyncio.to_thread(server.wait_for_metric, "executors_ready", 2, 90)
            await asyncio.to_thread(server.wait_for_metric, "service_failing", 0)
            health = await http.get(f"{server.url}/health")
            assert (health.json()["status"], health.json()["problems"]) == ("ok", [])
            ended.set()
        assert server.process.poll() is None

"""The scheduler is killed under load and started again: executors are back in seconds, clients' retries succeed."""

import asyncio
import signal
import statistics
import urllib.error
from pathlib import Path
from time import monotonic
from typing import Any

import openai
import pytest

from tests.chaos.processes import SLOW_SIMULATED, Cluster, running
from tests.chaos.workload import client_of

OPTIONS = ("--executor-timeout=3", "--step-timeout=10")
REJOIN_SECONDS = 5.0


async def ask(client: openai.AsyncOpenAI, number: int, max_tokens: int = 60) -> str:
    answer = await client.completions.create(
        model="pagewise-demo",
        prompt=f"def method_{number}(self):",
        max_tokens=max_tokens,
        temperature=0.9,
        seed=number,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].text


def rejoin_seconds(cluster: Cluster, down: float, count: int) -> float:
    """Kill the scheduler, start it again after ``down`` seconds; how long executors take once it answers."""
    cluster.scheduler.signal(signal.SIGKILL)
    cluster.scheduler.wait()
    deadline = monotonic() + down
    while monotonic() < deadline:
        assert all(process.exit_code is None for process in cluster.executors)
        asyncio.run(asyncio.sleep(0.1))
    cluster.start_scheduler()
    return cluster.wait_ready(count)


async def test_executors_are_back_within_seconds_and_retries_succeed(tmp_path: Path) -> None:
    with running(Cluster(tmp_path, scheduler_options=OPTIONS, executor=SLOW_SIMULATED), 3) as cluster:
        async with client_of(cluster.url, retries=12) as client:
            expected = await asyncio.gather(*(ask(client, number) for number in range(40)))
            # Killed once at once, once after executors have found out: they go on asking, ever more slowly.
            for down in (0.0, 9.0):
                asking = [asyncio.create_task(ask(client, number)) for number in range(40)]
                await asyncio.sleep(0.4)
                taken = await asyncio.to_thread(rejoin_seconds, cluster, down, 3)
                print(f"executors were back {taken:.2f} s after a scheduler that was down for {down:g} s")
                assert taken < REJOIN_SECONDS
                assert await asyncio.gather(*asking) == expected
            log = cluster.scheduler.output()
            assert log.count(" joined: ") == 9, "each executor joins each scheduler once"
            assert "said Hello again" not in log


async def test_without_executors_health_says_so_and_requests_wait_for_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, scheduler_options=OPTIONS, executor=SLOW_SIMULATED)
    try:
        cluster.start_scheduler()
        async with client_of(cluster.url) as client:
            assert await asyncio.to_thread(status, cluster) == 503
            with pytest.raises(openai.InternalServerError) as error:
                await ask(client, 1)
            assert error.value.status_code == 503
            assert int(error.value.response.headers["Retry-After"]) >= 1
            only = cluster.start_executor("only")
            await asyncio.to_thread(cluster.wait_ready, 1)
            expected = await ask(client, 1)
            asking = asyncio.create_task(ask(client, 1))
            await asyncio.sleep(0.3)
            only.signal(signal.SIGKILL)
            only.wait()
            while await asyncio.to_thread(status, cluster) == 200:
                await asyncio.sleep(0.1)
            late = asyncio.create_task(ask(client, 1))
            await asyncio.sleep(0.5)
            assert not asking.done()
            assert not late.done()
            cluster.start_executor("another")
            assert await asyncio.gather(asking, late) == [expected] * 2
    finally:
        cluster.close()


def status(cluster: Cluster) -> int:
    """What ``/health`` answers."""
    try:
        cluster.get("/health")
    except urllib.error.HTTPError as error:
        return error.code
    return 200


async def hit_rate(client: openai.AsyncOpenAI) -> float:
    """Ask for the next token of twenty conversations: the share of their prompts that was cached."""

    async def one(number: int) -> Any:
        prompt = f"class Account{number}:\n" + f"    def method_{number}(self):\n        return {number}\n" * 12
        answer = await client.completions.create(model="pagewise-demo", prompt=prompt, max_tokens=4, temperature=0)
        return answer.usage

    usages = [await one(number) for number in range(20)]
    return statistics.fmean(usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens for usage in usages)


async def test_the_cache_is_warm_after_a_restart(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, scheduler_options=OPTIONS, executor_options=("--num-blocks=800",))
    with running(cluster, 2):
        async with client_of(cluster.url, retries=12) as client:
            await hit_rate(client)
            before = await hit_rate(client)
            assert before > 0.8
            await asyncio.to_thread(rejoin_seconds, cluster, 0.0, 2)
            after = await hit_rate(client)
        print(f"of the prompts {before:.0%} was cached before the restart, {after:.0%} after it")
        assert after >= 0.9 * before

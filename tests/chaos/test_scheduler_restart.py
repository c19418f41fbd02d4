"""The scheduler is killed under load and started again: executors are back in seconds, with their caches, and what
clients ask again succeeds."""

import asyncio
import signal
import urllib.error
from pathlib import Path

import openai
import pytest

from tests.chaos.processes import SLOW_SIMULATED, Cluster, running
from tests.chaos.restart import restart, restarts_under_load
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


async def test_executors_are_back_within_seconds_and_retries_succeed(tmp_path: Path) -> None:
    with running(Cluster(tmp_path, scheduler_options=OPTIONS, executor=SLOW_SIMULATED), 3) as cluster:
        async with client_of(cluster.url, retries=12) as client:
            expected = await asyncio.gather(*(ask(client, number) for number in range(40)))
            # Killed once at once, once after executors have found out: they go on asking, ever more slowly.
            for down in (0.0, 9.0):
                asking = [asyncio.create_task(ask(client, number)) for number in range(40)]
                await asyncio.sleep(0.4)
                back = await asyncio.to_thread(restart, cluster, down)
                print(f"executors were back {back.rejoined:.2f} s after a scheduler that was down for {down:g} s")
                assert back.rejoined < REJOIN_SECONDS
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


@pytest.mark.parametrize(
    ("count", "as_shipped"), [(1, False), pytest.param(2, True, marks=pytest.mark.chaos)], ids=["once", "as shipped"]
)
async def test_the_cache_is_warm_after_a_restart_under_load(tmp_path: Path, count: int, as_shipped: bool) -> None:
    options = ("--num-blocks=800",)
    cluster = Cluster(tmp_path, scheduler_options=OPTIONS, executor_options=options, as_shipped=as_shipped)
    with running(cluster, 2):
        cold, restarts = await restarts_under_load(cluster, count)
    for one in restarts:
        print(f"of the first prompts {cold:.0%} was cached; {one.numbers()}")
        assert not one.failures
        assert one.broken >= 8, "it was not killed under load"
        assert one.back.rejoined < REJOIN_SECONDS
        assert cold < 0.8 * one.before, "a cache that was lost could not be told from one that was kept"
        assert one.retried >= 0.9 * one.before
        assert one.after >= 0.9 * one.before

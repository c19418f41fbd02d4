"""The scheduler is killed under load and started again: executors are back in seconds, with their caches, and streams
go on as if nothing had happened."""

import asyncio
import signal
import statistics
import time
import urllib.error
from pathlib import Path

import httpx
import openai
import pytest

from benchmarks.chaos.restarts import restart, restarts_under_load
from benchmarks.chaos.workload import Outcome, client_of, make_cases, references, stream
from benchmarks.processes import Cluster, running
from tests.free_cores import FreeCores

OPTIONS = ("--executor-timeout=3", "--step-timeout=10", "--gateway-timeout=3")
REJOIN_SECONDS = 5.0
STEP_SECONDS = 0.02


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


async def test_streams_of_every_kind_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    with running(Cluster(tmp_path, gateways=2, scheduler_options=OPTIONS, simulate=STEP_SECONDS), 3) as cluster:
        cases = make_cases(40, 100)
        expected = await references(cluster.url, cases)
        clients = [client_of(url) for url in cluster.urls.values()]
        # Killed once at once, once after gateways and executors have found out: they go on asking, ever more slowly.
        for down in (0.0, 6.0):
            outcomes = [Outcome(case) for case in cases]
            streams = [
                asyncio.create_task(stream(clients[number % 2], outcome.case, outcome))
                for number, outcome in enumerate(outcomes)
            ]
            while not any(outcome.choices for outcome in outcomes):
                await asyncio.sleep(0.01)
            assert not all(task.done() for task in streams)
            cores = FreeCores()
            back = await asyncio.to_thread(restart, cluster, down)
            print(f"executors were back {back.rejoined:.2f} s after a scheduler that was down for {down:g} s")
            assert back.rejoined * cores.share() < REJOIN_SECONDS
            await asyncio.gather(*streams)
            for outcome, right in zip(outcomes, expected, strict=True):
                assert not outcome.differences(right)
        await asyncio.gather(*(client.close() for client in clients))
        log = cluster.scheduler.output()
        assert log.count(" joined: ") == 9, "each executor joins each scheduler once"
        assert "said Hello again" not in log


async def test_requests_that_come_while_there_is_no_scheduler_wait_for_a_bounded_time(tmp_path: Path) -> None:
    options = ("--scheduler-timeout=4",)
    cluster = Cluster(tmp_path, scheduler_options=OPTIONS, gateway_options=options, simulate=STEP_SECONDS)
    with running(cluster, 1):
        async with client_of(cluster.url) as client:
            expected = await ask(client, 1)
            cluster.scheduler.signal(signal.SIGKILL)
            cluster.scheduler.wait()
            began = time.monotonic()
            with pytest.raises(openai.InternalServerError) as error:
                await ask(client, 1)
            assert 3.0 < time.monotonic() - began < 30.0
            assert error.value.status_code == 503
            assert int(error.value.response.headers["Retry-After"]) >= 1
            assert await asyncio.to_thread(status, cluster) == 503
            assert (await asyncio.to_thread(httpx.get, f"{cluster.url}/metrics")).status_code == 503
            waiting = asyncio.create_task(ask(client, 1))
            await asyncio.sleep(1.0)
            await asyncio.to_thread(cluster.start_scheduler)
            assert await waiting == expected


@pytest.mark.chaos
async def test_a_gateway_that_dies_takes_its_own_streams_and_nobody_else_s(tmp_path: Path) -> None:
    with running(Cluster(tmp_path, gateways=2, scheduler_options=OPTIONS, simulate=STEP_SECONDS), 2) as cluster:
        async with client_of(cluster.urls["gateway-0"]) as one, client_of(cluster.urls["gateway-1"]) as other:
            expected = await asyncio.gather(*(ask(one, number, 150) for number in range(20)))
            staying = [asyncio.create_task(ask(one, number, 150)) for number in range(20)]
            leaving = [asyncio.create_task(ask(other, number, 2000)) for number in range(20, 40)]
            await asyncio.sleep(0.8)
            cluster.gateways["gateway-1"].signal(signal.SIGKILL)
            for task in leaving:
                with pytest.raises(openai.APIConnectionError):
                    await task
            killed = time.monotonic()
            assert await asyncio.gather(*staying) == expected
            while await asyncio.to_thread(cluster.metric, "num_requests_running"):
                assert time.monotonic() < killed + 90
            reports = (await asyncio.to_thread(cluster.members)).values()
            assert [report["device"]["in_use"] for report in reports] == [0, 0]


async def test_a_gateway_that_is_told_to_leave_lets_its_streams_end(tmp_path: Path) -> None:
    options = ("--shutdown-timeout=20",)
    cluster = Cluster(tmp_path, scheduler_options=OPTIONS, gateway_options=options, simulate=STEP_SECONDS)
    with running(cluster, 1):
        async with client_of(cluster.url) as client:
            expected = await ask(client, 1, 100)
            asking = asyncio.create_task(ask(client, 1, 100))
            await asyncio.sleep(0.5)
            gateway = cluster.gateways["gateway-0"]
            gateway.signal(signal.SIGTERM)
            assert await asking == expected
            assert await asyncio.to_thread(gateway.wait, 20) == 0


async def test_without_executors_health_says_so_and_requests_wait_for_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, scheduler_options=OPTIONS, simulate=STEP_SECONDS)
    try:
        cluster.start()
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
    """The status code of ``/health``."""
    try:
        cluster.get("/health")
    except urllib.error.HTTPError as error:
        return error.code
    return 200


@pytest.mark.parametrize(
    ("count", "as_shipped"),
    [pytest.param(1, False), pytest.param(2, True, marks=pytest.mark.chaos)],
    ids=["once", "as shipped"],
)
async def test_the_cache_is_warm_after_a_restart_under_load(tmp_path: Path, count: int, as_shipped: bool) -> None:
    options = ("--num-blocks=800",)
    cluster = Cluster(tmp_path, scheduler_options=OPTIONS, executor_options=options, as_shipped=as_shipped)
    with running(cluster, 2):
        cores = FreeCores()
        cold, restarts = await restarts_under_load(cluster, count)
        share = cores.share()
    for one in restarts:
        print(f"of the first prompts {cold:.0%} was cached; {one.numbers()}")
        assert not one.failures
        assert len(one.pauses) >= 8, "it was not killed under load"
        assert statistics.median(one.pauses) * share < 3.0
        assert one.back.rejoined * share < REJOIN_SECONDS
        assert cold < 0.8 * one.before, "a cache that was lost could not be told from one that was kept"
        assert one.resumed >= 0.9 * one.before
        assert one.after >= 0.9 * one.before

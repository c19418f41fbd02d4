"""Cached blocks survive a scheduler, an executor's drain, and on the host an executor: by real processes."""

import asyncio
import signal
from pathlib import Path

from benchmarks.chaos.workload import client_of
from benchmarks.processes import Cluster, running
from tests.chaos.prompts import complete, prompt

OPTIONS = ("--executor-timeout=3", "--step-timeout=10")
BLOCKS = ("--num-blocks=400",)


async def test_an_executor_that_is_drained_leaves_its_work_and_its_cache_to_others(tmp_path: Path) -> None:
    with running(Cluster(tmp_path, scheduler_options=OPTIONS, executor_options=BLOCKS), 1) as cluster:
        first = cluster.executors[0]
        async with client_of(cluster.url) as client:
            expected = [await complete(client, prompt(number)) for number in range(6)]
            long, *_ = await complete(client, prompt(7), 400)
            cluster.start_executor("second")
            await asyncio.to_thread(cluster.wait_ready, 2)
            running_on = asyncio.create_task(complete(client, prompt(7), 400))
            while not await asyncio.to_thread(cluster.metric, "num_requests_running"):
                assert not running_on.done()
            first.signal(signal.SIGTERM)
            assert await asyncio.to_thread(first.wait, 40) == 0
            assert "drained" in cluster.scheduler.output()
            assert (await running_on)[0] == long
            for number in range(6):
                text, tokens, cached = await complete(client, prompt(number))
                assert text == expected[number][0]
                assert cached >= tokens - 16, "it was copied before the first one left"
        assert cluster.metric("kv_block_events_total", event="fetched") > 0
        assert cluster.metric("executors_drained_total") == 1
        assert cluster.metric("request_success_total", finished_reason="error") == 0


async def test_a_second_executor_fetches_what_the_first_has_computed(tmp_path: Path) -> None:
    options = ("--routing=round-robin", "--recovery=swap", *OPTIONS)
    with running(Cluster(tmp_path, scheduler_options=options, executor_options=BLOCKS), 2) as cluster:
        async with client_of(cluster.url) as client:
            first = await complete(client, prompt(1))
            second = await complete(client, prompt(1))
        assert first[0] == second[0]
        assert second[2] >= second[1] - 16
        assert cluster.metric("cached_tokens_total", source="peer") == second[2]
        reports = cluster.members().values()
        assert sorted(report["counters"]["fetched"] for report in reports) == [0, second[2] // 16]


async def test_an_executor_that_was_killed_comes_back_with_its_host_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    # Few blocks on the device, so that most computed blocks are on the host when it dies.
    options = ("--num-blocks=20", "--host-memory=40MiB", f"--host-memory-dir={folder}")
    cluster = Cluster(
        tmp_path, scheduler_options=("--recovery=swap", "--eviction=lru", *OPTIONS), executor_options=options
    )
    with running(cluster, 1):
        async with client_of(cluster.url, retries=12) as client:
            expected = [await complete(client, prompt(number)) for number in range(8)]
            cluster.executors[0].signal(signal.SIGKILL)
            cluster.executors[0].wait()
            while cluster.metric("executors_ready"):
                await asyncio.sleep(0.1)
            again = cluster.start_executor("again")
            await asyncio.to_thread(cluster.wait_ready, 1)
            assert "took over" in again.output()
            loaded = 0
            for number in range(8):
                text, _, cached = await complete(client, prompt(number))
                assert text == expected[number][0]
                loaded += cached
        assert loaded > 0.5 * sum(tokens for _, tokens, _ in expected[:4])
        assert cluster.metric("kv_block_events_total", event="corrupt") == 0
        again.signal(signal.SIGINT)
        again.wait()
        assert not list(folder.iterdir()), "one that ends in order leaves no memory behind"

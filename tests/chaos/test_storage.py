"""KV on a disk or in a store outlives all that computed it, and its loss costs time only: real processes."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from benchmarks.chaos.workload import Outcome, client_of, make_cases, references, stream
from benchmarks.processes import Cluster, free_port, running
from tests.chaos.prompts import complete, prompt
from tests.redis_servers import REAL, start_fake, start_real

BLOCKS = ("--num-blocks=400",)
SWAP = ("--recovery=swap",)
NUM_PROMPTS = 8


async def serve_all(cluster: Cluster) -> list[tuple[str, int, int]]:
    async with client_of(cluster.url) as client:
        return [await complete(client, prompt(number)) for number in range(NUM_PROMPTS)]


async def written(cluster: Cluster, blocks: int) -> None:
    """Wait until so many blocks have gone to storage."""
    async with asyncio.timeout(90):
        while cluster.metric("kv_block_events_total", event="written") < blocks:
            await asyncio.sleep(0.05)


def kill_all(cluster: Cluster) -> None:
    for process in (cluster.scheduler, *cluster.gateways.values(), *cluster.executors):
        process.signal(signal.SIGKILL)
        process.wait()


async def test_everything_is_killed_and_what_was_computed_is_found_again(tmp_path: Path) -> None:
    options = (*BLOCKS, f"--disk-cache={tmp_path / 'cache'}")
    with running(Cluster(tmp_path / "one", scheduler_options=SWAP, executor_options=options), 2) as cluster:
        expected = await serve_all(cluster)
        again = await serve_all(cluster)
        await written(cluster, sum(tokens // 16 for _, tokens, _ in expected))
        kill_all(cluster)
    with running(Cluster(tmp_path / "two", scheduler_options=SWAP, executor_options=options), 2) as cluster:
        found = await serve_all(cluster)
        assert [text for text, *_ in found] == [text for text, *_ in expected]
        assert sum(cached for *_, cached in found) >= 0.95 * sum(cached for *_, cached in again) > 0
        assert cluster.metric("cached_tokens_total", source="disk") > 0
        assert cluster.metric("kv_block_events_total", event="recall_failed") == 0
        for salt, there in (("all", True), ("", False)):
            body = {"reset_external": True} | ({"salt": salt} if salt else {})
            answer = await asyncio.to_thread(httpx.post, f"{cluster.url}/reset_prefix_cache", json=body, timeout=60)
            assert sum(one["released"]["disk"] for one in answer.json()["executors"]) > 0 or there
            assert not any(one["failed"] for one in answer.json()["executors"])
            assert (len([*(tmp_path / "cache").glob("*/??/*")]) > 20) == there, "the salts are none"
        kill_all(cluster)
    other = ("--block-size=32", *options)
    with running(Cluster(tmp_path / "three", scheduler_options=SWAP, executor_options=other), 1) as cluster:
        found = await serve_all(cluster)
        assert [text for text, *_ in found] == [text for text, *_ in expected]
        assert cluster.metric("cached_tokens_total", source="disk") == 0, "its blocks are others"


def damage(folder: Path) -> None:
    """Change a byte of every third block, cut every third, and leave the others."""
    for number, path in enumerate(sorted(folder.glob("*/??/*.*"))):
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif number % 3 == 1:
            path.write_bytes(data[: len(data) // 2])


def make_unusable(folder: Path) -> None:
    """Nothing can be read or written: there are files where folders should be. Root may write to read-only folders."""
    for path in folder.glob("*/??"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
        path.write_text("")


@pytest.mark.parametrize("harm", [damage, pytest.param(make_unusable, marks=pytest.mark.chaos)])
async def test_a_disk_that_is_damaged_costs_time_only(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    options = (*BLOCKS, f"--disk-cache={tmp_path / 'cache'}")
    with running(Cluster(tmp_path / "one", scheduler_options=SWAP, executor_options=options), 1) as cluster:
        expected = await serve_all(cluster)
        await written(cluster, sum(tokens // 16 for _, tokens, _ in expected))
    with running(Cluster(tmp_path / "two", scheduler_options=SWAP, executor_options=options), 1) as cluster:
        harm(tmp_path / "cache")
        found = await serve_all(cluster)
        assert [text for text, *_ in found] == [text for text, *_ in expected]
        async with asyncio.timeout(60):
            while not cluster.metric("storage_errors_total"):
                await asyncio.sleep(0.1)
        assert cluster.metric("request_success_total", finished_reason="error") == 0


SLOW_DISK = """
import os
import time

def _slowly(call):
    def slow(*arguments):
        if os.path.exists({flag!r}):
            time.sleep(0.5)
        return call(*arguments)
    return slow

os.preadv, os.writev = _slowly(os.preadv), _slowly(os.writev)
"""
"""Run by every process that has it on its path when it starts. Each block of the disk cache is one call."""


@pytest.mark.timeout(600)
@pytest.mark.chaos
async def test_a_disk_that_becomes_slow_costs_time_only_and_is_left_alone(tmp_path: Path) -> None:
    options = (*BLOCKS, f"--disk-cache={tmp_path / 'cache'}")
    with running(Cluster(tmp_path / "one", scheduler_options=SWAP, executor_options=options), 1) as cluster:
        expected = await serve_all(cluster)
        await written(cluster, sum(tokens // 16 for _, tokens, _ in expected))
    flag = tmp_path / "slow"
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK.format(flag=str(flag)))
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    with running(Cluster(tmp_path / "two", executor_options=options), 0) as cluster:
        cluster.start_executor("slow", environment={"PYTHONPATH": path})
        await asyncio.to_thread(cluster.wait_ready, 1)  # it has measured the disk
        flag.touch()
        found = await serve_all(cluster)
        assert [text for text, *_ in found] == [text for text, *_ in expected]
        assert cluster.metric("request_success_total", finished_reason="error") == 0
        assert cluster.metric("recoveries_total", method="load", source="disk") > 0, "nobody knew yet"
        assert cluster.metric("recoveries_total", method="recompute", source="disk") > 0, "what is slow is computed"


@pytest.mark.timeout(600)
@pytest.mark.chaos
async def test_a_store_dies_and_comes_back_under_load(tmp_path: Path) -> None:
    port, start = free_port(), start_real if REAL is not None else start_fake
    stop = start(tmp_path, port)
    cases = make_cases(20, 40)
    few = ("--num-blocks=120", f"--store=redis://127.0.0.1:{port}/0")
    cluster = Cluster(tmp_path, scheduler_options=SWAP, executor_options=few)

    async def streams(client: openai.AsyncOpenAI, expected: list[Outcome]) -> None:
        running = [asyncio.create_task(stream(client, case, Outcome(case))) for case in cases]
        for task, right in zip(running, expected, strict=True):
            assert not (await task).differences(right)

    with running(cluster, 2):
        expected = await references(cluster.url, cases)
        async with client_of(cluster.url) as client:
            await streams(client, expected)
            assert cluster.metric("kv_block_events_total", event="written") > 0
            under_load = asyncio.create_task(streams(client, expected))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(stop)
            await under_load
            await streams(client, expected)
            stop = await asyncio.to_thread(start, tmp_path, port)
            before = cluster.metric("kv_block_events_total", event="written")
            async with asyncio.timeout(90):
                while cluster.metric("kv_block_events_total", event="written") <= before:
                    await streams(client, expected)
        assert cluster.metric("request_success_total", finished_reason="error") == 0
    await asyncio.to_thread(stop)

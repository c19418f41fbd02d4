"""Executors with each kind of kernels that is here, and one with blocks of another size, with host memory that outlives
them and measured costs: they serve side by side and take over each other's requests. Real processes."""

import asyncio
import signal
from pathlib import Path

import openai
import pytest

from benchmarks.chaos.workload import Outcome, client_of, make_cases, references, stream
from benchmarks.processes import Cluster, Process, wait_until
from tests.cpu_kernels import auto_kernels

KERNELS = {"torch": "torch", auto_kernels(): auto_kernels(), "large": "torch"}
"""The kernels of each executor, by its name."""
EXECUTORS = list(KERNELS)
BLOCK_SIZES = {"torch": 16, "cpu": 16, "large": 32}
"""Blocks of equal size are alike."""
TOKENS = 960
"""Of each pool: less than it serves, so that blocks go to host memory."""


@pytest.mark.timeout(900)
@pytest.mark.chaos
async def test_requests_move_between_executors_and_blocks_do_where_they_are_alike(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, as_shipped=True, scheduler_options=("--executor-timeout=3",))
    cases = make_cases(30, 60)

    def start(name: str) -> Process:
        size = BLOCK_SIZES[name]
        return cluster.start_executor(
            name, f"--kernels={KERNELS[name]}", f"--block-size={size}", f"--num-blocks={TOKENS // size}"
        )

    def is_back(name: str) -> None:
        def joined_twice() -> bool:
            return cluster.scheduler.output().count(f"executor {name} joined: ") == 2

        wait_until(joined_twice, 300.0, f"{name} is back", cluster.scheduler)

    def all_work() -> bool:
        return [bool(report["requests"]) for report in cluster.members().values()] == [True] * len(EXECUTORS)

    async def streams_on_all(client: openai.AsyncOpenAI) -> list[asyncio.Task[Outcome]]:
        # An executor that has just come back may be given nothing before all are served: then they are sent again.
        while True:
            streams = [asyncio.create_task(stream(client, case, Outcome(case))) for case in cases]
            while not all(task.done() for task in streams):
                if await asyncio.to_thread(all_work):
                    return streams
            for task, right in zip(streams, expected, strict=True):
                assert not (await task).differences(right)

    try:
        cluster.start()
        executors = {name: start(name) for name in EXECUTORS}
        await asyncio.to_thread(cluster.wait_ready, len(EXECUTORS), 300.0)
        assert {name: report["block_size"] for name, report in cluster.members().items()} == {
            name: BLOCK_SIZES[name] for name in EXECUTORS
        }
        expected = await references(cluster.url, cases)
        for victim in EXECUTORS:
            async with client_of(cluster.url) as client:
                for _ in range(6 if victim == EXECUTORS[-1] else 1):  # it may have been given little before
                    if stored := cluster.members()[victim]["tiers"]["host"]["used"]:
                        break
                    await asyncio.gather(*await streams_on_all(client))
                streams = await streams_on_all(client)
                executors[victim].signal(signal.SIGKILL)
                for task, right in zip(streams, expected, strict=True):
                    assert not (await task).differences(right)
            fetched = {name: report["counters"]["fetched"] for name, report in cluster.members().items()}
            assert not fetched.get("large"), "no other executor has blocks like these"
            executors[victim] = start(victim)
            await asyncio.to_thread(is_back, victim)
            assert not stored or f"{victim} holds blocks: " in cluster.scheduler.output(), "its host memory is there"
        assert stored, "the last one had some"
        assert cluster.metric("request_moves_total", reason="lost") > 0
        if "cpu" not in EXECUTORS:
            assert cluster.metric("block_transfer_bytes_total") == 0
    finally:
        cluster.close()

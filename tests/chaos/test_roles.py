"""Prefill and decode apart, and executors of either role are killed or leave under load: every output equals the output
of one executor for both. Real processes."""

import asyncio
import signal
from pathlib import Path

import openai
import pytest

from benchmarks.chaos.workload import Outcome, client_of, make_cases, references, stream
from benchmarks.processes import Cluster, Process, wait_until

ROLES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}


@pytest.mark.timeout(900)
@pytest.mark.chaos
async def test_executors_of_either_role_are_killed_under_load(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, scheduler_options=("--executor-timeout=3",), executor_options=("--num-blocks=400",))
    cases = make_cases(16, 60)

    def start(name: str) -> Process:
        return cluster.start_executor(name, f"--role={ROLES[name]}")

    def has_joined(name: str, times: int) -> None:
        def joined() -> bool:
            return cluster.scheduler.output().count(f"executor {name} joined") == times

        wait_until(joined, 240.0, f"{name} joins", cluster.scheduler)

    def moved() -> float:
        return cluster.metric("request_moves_total", reason="decode")

    async def all_right(streams: list[asyncio.Task[Outcome]]) -> None:
        for task, right in zip(streams, expected, strict=True):
            assert not (await task).differences(right)

    async def streams_that_run_on(client: openai.AsyncOpenAI, name: str) -> list[asyncio.Task[Outcome]]:
        """Streams of all cases, once some of them have moved and this executor has work."""
        while True:
            before = moved()
            streams = [asyncio.create_task(stream(client, case, Outcome(case))) for case in cases]
            while not all(task.done() for task in streams):
                members = await asyncio.to_thread(cluster.members)
                if members[name]["requests"] and moved() > before:
                    return streams
            await all_right(streams)

    try:
        cluster.start()
        both = cluster.start_executor("both")
        await asyncio.to_thread(cluster.wait_ready, 1)
        expected = await references(cluster.url, cases)
        executors = {name: start(name) for name in ROLES}
        await asyncio.to_thread(cluster.wait_ready, 5)
        both.signal(signal.SIGTERM)
        both.wait()
        async with client_of(cluster.url) as client:
            for victim, how in (
                ("prefill-0", signal.SIGKILL),
                ("decode-0", signal.SIGKILL),
                ("prefill-1", signal.SIGTERM),
            ):
                streams = await streams_that_run_on(client, victim)
                executors[victim].signal(how)
                await all_right(streams)
                await asyncio.to_thread(executors[victim].wait)
                executors[victim] = start(victim)
                await asyncio.to_thread(has_joined, victim, 2)
            assert cluster.metric("requests_without_role_total", role="decode") == 0
            assert cluster.metric("kv_block_events_total", event="fetched") > 0
            streams = await streams_that_run_on(client, "decode-1")
            for victim in ("decode-0", "decode-1"):
                executors[victim].signal(signal.SIGKILL)
            await all_right(streams)
            await all_right([asyncio.create_task(stream(client, case, Outcome(case))) for case in cases])
        assert cluster.metric("requests_without_role_total", role="decode") >= len(cases)
        assert cluster.scheduler.output().count("no executor is there for decode: the others do both") == 1
        assert cluster.metric("request_success_total", finished_reason="error") == 0
    finally:
        cluster.close()

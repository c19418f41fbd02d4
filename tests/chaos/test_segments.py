"""Segments through real processes: the same tokens on any executor, found or computed, while executors die."""

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.chaos.workload import client_of
from benchmarks.processes import Cluster, running
from tests.chaos.prompts import prompt

DOCUMENTS = [prompt(number) for number in range(6)]
FEW = ("--num-blocks=160",)


def orders(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [rng.sample(range(len(DOCUMENTS)), 3) for _ in range(count)]


async def ask(client: openai.AsyncOpenAI, order: list[int], boundary: int) -> tuple[str, int]:
    """The output for some documents in this order, and how many tokens of the prompt were cached."""
    texts = [DOCUMENTS[number] for number in order]
    answer = await client.completions.create(
        model="pagewise-demo",
        prompt="# files\n" + "\n".join(texts) + "\nclass Account",
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True, "segments": {"texts": texts, "root": "# files\n", "boundary": boundary}},
    )
    usage: Any = answer.usage
    return answer.choices[0].text, usage.prompt_tokens_details.cached_tokens


@pytest.mark.timeout(600)
@pytest.mark.chaos
async def test_executors_die_and_the_tokens_stay_the_same(tmp_path: Path) -> None:
    asked = [(order, boundary) for order in orders(12) for boundary in (0, 8)]
    with running(Cluster(tmp_path / "alone", executor_options=FEW), 1) as cluster:
        async with client_of(cluster.url) as client:
            expected = [await ask(client, *one) for one in asked]
        assert any(cached > 300 for _, cached in expected), "documents that were computed for others are found"
    with running(Cluster(tmp_path / "fleet", executor_options=FEW), 2) as cluster:
        async with client_of(cluster.url) as client:
            found = [asyncio.create_task(ask(client, *one)) for one in asked]
            for number, victim in enumerate(list(cluster.executors)):
                await asyncio.wait(found, timeout=0.4)
                victim.signal(signal.SIGKILL)
                victim.wait()
                cluster.start_executor(f"late-{number}")
            assert [(await task)[0] for task in found] == [text for text, _ in expected]
        assert cluster.metric("request_success_total", finished_reason="error") == 0


async def test_documents_are_found_on_the_disk_after_everything_was_killed(tmp_path: Path) -> None:
    options = ("--num-blocks=400", f"--disk-cache={tmp_path / 'cache'}")
    swap = ("--recovery=swap",)
    with running(Cluster(tmp_path / "one", scheduler_options=swap, executor_options=options), 1) as cluster:
        async with client_of(cluster.url) as client:
            before = [await ask(client, order, 0) for order in ([0, 1, 2], [3, 4, 5], [2, 1, 0])]
        async with asyncio.timeout(90):
            while cluster.metric("kv_block_events_total", event="written") < 60:
                await asyncio.sleep(0.05)
        for process in (cluster.scheduler, *cluster.gateways.values(), *cluster.executors):
            process.signal(signal.SIGKILL)
            process.wait()
    with running(Cluster(tmp_path / "two", scheduler_options=swap, executor_options=options), 1) as cluster:
        async with client_of(cluster.url) as client:
            again = await ask(client, [2, 1, 0], 0)
            assert again[0] == before[2][0]
            await ask(client, [5, 0, 4], 0)
        assert cluster.metric("kv_block_events_total", event="recalled") > 0

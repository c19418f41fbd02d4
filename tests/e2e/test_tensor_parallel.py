"""Executors of several ranks behind real processes: the same texts, also when ranks and their tiers come and go."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from pagewise_shared.service_process import CANNOT_START

from benchmarks.chaos.workload import Outcome, client_of, make_cases, references, stream
from benchmarks.processes import EXECUTOR, Cluster, Process, Served, alive, children, running, serving
from tests.chaos.prompts import complete, prompt
from tests.executor.ranks.one_rank import texts_of_one_rank

FOLLOWER = b"pagewise_executor.follower"


def followers(executor: int) -> list[int]:
    return [pid for pid, command in children(executor) if FOLLOWER in command]


def wait_until(condition: object, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def ask(server: Served, ids: list[int]) -> str:
    body = {"prompt": ids, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=90)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_group_serves_what_one_rank_does_and_is_started_anew_when_a_rank_dies() -> None:
    prompts = [[11 + number, *range(40, 70 + 9 * number)] for number in range(3)]
    expected = texts_of_one_rank(prompts, 12)
    with serving("--tensor-parallel-size", "2", "--threads", "1", "--num-blocks", "200", "--no-profile") as server:
        assert [ask(server, ids) for ids in prompts] == expected
        (executor,) = server.pids(EXECUTOR)
        (follower,) = followers(executor)
        os.kill(follower, signal.SIGKILL)
        wait_until(lambda: not alive(executor), "the executor ends with its rank")
        server.wait_for_line("this executor ends: rank 1 has ended")
        wait_until(lambda: server.pids(EXECUTOR) not in ([], [executor]), "it is started anew")
        assert [ask(server, ids) for ids in prompts] == expected
        (executor,) = server.pids(EXECUTOR)
        (follower,) = followers(executor)
        os.kill(executor, signal.SIGKILL)
        wait_until(lambda: not alive(follower), "no rank is left behind")


@pytest.mark.long
def test_a_number_of_ranks_that_does_not_divide_the_model_ends_the_start() -> None:
    command = [sys.executable, "-m", EXECUTOR, "--tensor-parallel", "3", "--device", "cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == CANNOT_START, ended.stderr
    assert "num_attention_heads is 4; numbers of ranks that work: 1, 2, 4" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_a_rank_is_killed_under_load_and_no_stream_notices(tmp_path: Path) -> None:
    cases = make_cases(20, 40)
    (tmp_path / "host").mkdir()
    blocks = ("--num-blocks=160", "--host-memory=32MiB", f"--host-memory-dir={tmp_path / 'host'}", "--verify-copies")
    with running(Cluster(tmp_path / "one", executor_options=blocks), 1) as cluster:
        expected = await references(cluster.url, cases)
    cluster = Cluster(tmp_path / "two", executor_options=(*blocks, "--tensor-parallel=2"))
    with running(cluster, 2):
        async with client_of(cluster.url) as client:
            for _ in range(2):
                streams = [asyncio.create_task(stream(client, case, Outcome(case))) for case in cases]
                await asyncio.sleep(1.0)
                victim: Process = cluster.executors.pop(0)
                (follower,) = followers(victim.pid)
                os.kill(follower, signal.SIGKILL)
                assert await asyncio.to_thread(victim.wait) == 1
                differences = [
                    difference
                    for task, right in zip(streams, expected, strict=True)
                    for difference in (await task).differences(right)
                ]
                assert not differences
                cluster.start_executor(f"another-{victim.pid}")
                await asyncio.to_thread(cluster.wait_ready, 2, 90.0)
        assert cluster.metric("request_success_total", finished_reason="error") == 0


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_ranks_fetch_from_the_same_ranks_of_another_executor(tmp_path: Path) -> None:
    options = ("--num-blocks=400", "--tensor-parallel=2")
    swap = ("--recovery=swap", "--routing=round-robin")
    with running(Cluster(tmp_path, scheduler_options=swap, executor_options=options, as_shipped=True), 2) as cluster:
        async with client_of(cluster.url) as client:
            first = [await complete(client, prompt(number)) for number in range(3)]
            again = [await complete(client, prompt(number)) for number in range(3)]
        assert [text for text, *_ in again] == [text for text, *_ in first]
        assert cluster.metric("kv_block_events_total", event="fetched") > 0
        assert cluster.metric("kv_block_events_total", event="fetch_failed") == 0


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_blocks_of_all_ranks_outlive_the_processes(tmp_path: Path) -> None:
    options = ("--num-blocks=400", "--tensor-parallel=2", f"--disk-cache={tmp_path / 'cache'}")
    swap = ("--recovery=swap",)
    with running(Cluster(tmp_path / "one", scheduler_options=swap, executor_options=options), 1) as cluster:
        async with client_of(cluster.url) as client:
            first = [await complete(client, prompt(number)) for number in range(4)]
        blocks = sum(tokens // 16 for _, tokens, _ in first)
        async with asyncio.timeout(30):
            while cluster.metric("kv_block_events_total", event="written") < blocks:
                await asyncio.sleep(0.05)
    with running(Cluster(tmp_path / "two", scheduler_options=swap, executor_options=options), 1) as cluster:
        async with client_of(cluster.url) as client:
            again = [await complete(client, prompt(number)) for number in range(4)]
        assert [text for text, *_ in again] == [text for text, *_ in first]
        assert cluster.metric("cached_tokens_total", source="disk") > 0
        assert cluster.metric("kv_block_events_total", event="recall_failed") == 0

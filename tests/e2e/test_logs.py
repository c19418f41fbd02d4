"""From the id of a request to the lines that an executor logs about its steps, through real processes."""

import json
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import Cluster, Process, wait_until


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, scheduler_options=("--log-format=json",), simulate=0.02)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def generate(cluster: Cluster, num_tokens: int, max_tokens: int = 8) -> str:
    """Ask for an answer to a prompt of so many tokens, and return the request's id, as its lines have it."""
    body = {"model": "pagewise-demo", "prompt": [num_tokens] * num_tokens, "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{cluster.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["id"]).removeprefix("cmpl-")


def lines(process: Process) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.log.read_text().splitlines() if line.startswith("{")]


def steps_of(cluster: Cluster, request_id: str) -> list[dict[str, Any]]:
    """The scheduler's lines about steps of a request that did not come back well."""
    return [line for line in lines(cluster.scheduler) if request_id in line.get("request_ids", ())]


def test_the_id_of_a_request_leads_to_the_executors_line_about_its_step(cluster: Cluster) -> None:
    options = [f"--scheduler={cluster.endpoint}", "--executor-id=executor-0", "--simulate", "--no-profile"]
    options += ["--plaintext", "--log-format=json"]
    command = [sys.executable, "-m", "tests.e2e.failing_executor", "33", "pagewise-demo", *options]
    executor = Process("executor-0", command, cluster.folder)
    cluster.executors.append(executor)
    cluster.wait_ready(1)
    before, failed = generate(cluster, 32), generate(cluster, 33)
    (told,) = steps_of(cluster, failed)
    assert told["executor"] == "executor-0"
    assert failed in told["message"], "without JSON it is found as well"
    step = told["epoch"], told["step"]
    (own,) = [line for line in lines(executor) if (line.get("epoch"), line.get("step")) == step]
    assert "the device is on fire" in own["exception"]
    assert f"step {told['step']} of epoch {told['epoch']}" in own["message"]
    assert steps_of(cluster, before) == [], "it ended before"


def test_steps_that_an_executor_died_in_are_told_with_their_requests(cluster: Cluster) -> None:
    first = cluster.start_executor("executor-0")
    cluster.wait_ready(1)
    with ThreadPoolExecutor() as clients:
        answer = clients.submit(generate, cluster, 20, max_tokens=400)
        wait_until(lambda: cluster.metric("num_requests_running") == 1, 30, "it runs", first)
        first.signal(signal.SIGKILL)
        cluster.start_executor("executor-1")
        request_id = answer.result()
    told = steps_of(cluster, request_id)
    assert told
    assert {line["executor"] for line in told} == {"executor-0"}
    assert all(re.search(r"step \d+ of epoch \d+ has not come back", line["message"]) for line in told)

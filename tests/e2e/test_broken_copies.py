"""An executor whose copies have broken ends, and the scheduler serves its requests elsewhere. Real processes."""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.processes import Cluster, Process


def generate(cluster: Cluster, number: int) -> int:
    """Ask for an answer to a prompt of 200 tokens; return the number of its tokens."""
    body = {"model": "pagewise-demo", "prompt": [number + 3] * 200, "max_tokens": 60, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{cluster.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def test_requests_go_on_elsewhere_when_a_thread_that_copies_has_ended(tmp_path: Path) -> None:
    small = ("--kernels=torch", "--num-blocks=40", "--host-memory=4MiB", "--host-memory-dir=none")
    cluster = Cluster(tmp_path, executor_options=small)
    try:
        cluster.start()
        options = [f"--scheduler={cluster.endpoint}", "--executor-id=broken", "--threads=1", "--no-profile", *small]
        command = [sys.executable, "-m", "tests.e2e.broken_host_tier", "pagewise-demo", *options]
        broken = Process("broken", command, tmp_path)
        cluster.executors.append(broken)
        sound = cluster.start_executor("sound")
        cluster.wait_ready(2)
        with ThreadPoolExecutor(8) as clients:
            assert list(clients.map(lambda number: generate(cluster, number), range(12))) == [60] * 12
        assert broken.wait() == 1, broken.tail()
        assert broken.output().endswith("this executor ends: its thread 'store' failed: _Fault: the link is broken\n")
        assert sound.exit_code is None
        assert set(cluster.members()) == {"sound"}
        assert cluster.metric("request_moves_total", reason="lost") > 0
        assert generate(cluster, 99) == 60
    finally:
        cluster.close()

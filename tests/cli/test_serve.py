"""``pagewise serve`` and its processes, with executors that invent their tokens."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagewise.serve import StartError, gpu_variables, visible_gpus
from pagewise_shared.config import ServeConfig

from tests.e2e.server import Server, alive, serving


def wait_for_another(server: Server, module: str, old: int, seconds: float = 30) -> int:
    deadline = time.monotonic() + seconds
    while (found := server.pids(module)) in ([], [old]):
        assert time.monotonic() < deadline, f"no other {module} was started"
        time.sleep(0.1)
    return found[0]


@pytest.mark.parametrize(
    ("options", "gpus", "expected"),
    [
        ({"executors": 3}, ["0", "1", "2", "3"], ["0", "1", "2"]),
        ({"executors": 3}, [], [None] * 3),
        ({"executors": 1}, ["0", "1"], [None]),
        ({"executors": 2, "device": "cpu"}, ["0", "1"], [None] * 2),
        ({"executors": 2, "simulate": True}, ["0", "1"], [None] * 2),
        ({"executors": 4, "kv_memory": "8GiB"}, ["2", "GPU-5f"], ["2", "GPU-5f", "2", "GPU-5f"]),
        ({"executors": 2}, ["0"], ["0", "0"]),
    ],
)
def test_executors_get_a_gpu_each(options: dict[str, Any], gpus: list[str], expected: list[str | None]) -> None:
    found = gpu_variables(ServeConfig(**options), gpus)
    assert [variables.get("CUDA_VISIBLE_DEVICES") for variables in found] == expected


def test_executors_that_would_take_each_other_s_memory_do_not_start() -> None:
    with pytest.raises(StartError, match=r"3 executors share 2 GPUs: .*--kv-memory"):
        gpu_variables(ServeConfig(executors=3, device="cuda"), ["0", "1"])


def test_the_gpus_are_those_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5f")
    assert visible_gpus() == ["3", "GPU-5f"]
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert visible_gpus() == []


def test_an_executor_that_is_killed_is_started_again() -> None:
    with serving("--simulate", "--executor-timeout", "3") as server:
        (old,) = server.pids("pagewise_executor.main")
        os.kill(old, signal.SIGKILL)
        wait_for_another(server, "pagewise_executor.main", old)
        server.wait_for_metric("executors_ready", 1)
        body = {"model": "pagewise-demo", "prompt": "import", "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
        assert any("executor-0 ended with code -9, starting it again" in line for line in server.output)


def test_the_line_it_prints_works() -> None:
    with serving("--simulate") as server:
        deadline = time.monotonic() + 10
        while not (lines := [line for line in server.output if "curl -N" in line]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        done = subprocess.run(["bash", "-c", lines[0]], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert done.stdout.rstrip().endswith("data: [DONE]")


def test_everything_ends_with_a_scheduler_that_dies() -> None:
    with serving("--simulate", "--executors", "2") as server:
        (scheduler,) = server.pids("pagewise_scheduler.main")
        executors = server.pids("pagewise_executor.main")
        os.kill(scheduler, signal.SIGKILL)
        assert server.process.wait(timeout=30) == 1
        assert not any(alive(pid) for pid in executors)


def test_executors_from_elsewhere_can_join(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/scheduler"
    command = [sys.executable, "-m", "pagewise_executor.main", "--simulate", f"--scheduler={endpoint}"]
    with subprocess.Popen([*command, "--executor-id=guest"], stderr=subprocess.DEVNULL) as executor:
        try:
            with serving("--executors", "0", f"--listen={endpoint}") as server:
                assert any("executor guest joined" in line for line in server.output)
        finally:
            executor.terminate()
    assert executor.returncode == 0


def test_a_port_that_is_taken_ends_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "pagewise.main", "serve", "--simulate", "--port", port],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr

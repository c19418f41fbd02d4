"""``pagewise serve`` and its processes, with executors that invent their tokens."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pagewise.serve import StartError, _groups, gpu_variables, visible_gpus
from pagewise_shared.config import ExecutorConfig, ServeConfig

from benchmarks.processes import EXECUTOR, GATEWAY, SCHEDULER, Served, serving


def wait_for_another(server: Served, module: str, old: int, seconds: float = 30) -> int:
    deadline = time.monotonic() + seconds
    while not (found := [pid for pid in server.pids(module) if pid != old]):
        assert time.monotonic() < deadline, f"no other {module} was started"
        time.sleep(0.1)
    return found[0]


def complete(server: Served, **fields: Any) -> str:
    body = {"prompt": "import", "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize(
    ("options", "gpus", "expected"),
    [
        ({"executors": 3}, ["0", "1", "2", "3"], ["0", "1", "2"]),
        ({"executors": 3}, [], [None] * 3),
        ({"executors": 1}, ["0", "1"], [None]),
        ({"executors": 2, "executor": ExecutorConfig(device="cpu")}, ["0", "1"], [None] * 2),
        ({"executors": 2, "executor": ExecutorConfig(simulate=True)}, ["0", "1"], [None] * 2),
        (
            {"executors": 4, "executor": ExecutorConfig(kv_memory="8GiB")},
            ["2", "GPU-5f"],
            ["2", "GPU-5f", "2", "GPU-5f"],
        ),
        ({"executors": 2}, ["0"], ["0", "0"]),
        (
            {"executors": 3, "executor": ExecutorConfig(device="cuda", gpu_memory_utilization=0.5)},
            ["0", "1"],
            ["0", "1", "0"],
        ),
        ({"executors": 2, "executor": ExecutorConfig(tensor_parallel=2)}, ["0", "1", "5", "6"], ["0,1", "5,6"]),
        ({"executors": 1, "executor": ExecutorConfig(tensor_parallel=2)}, ["0", "1"], [None]),
    ],
)
def test_executors_get_a_gpu_each(options: dict[str, Any], gpus: list[str], expected: list[str | None]) -> None:
    found = gpu_variables(ServeConfig(**options), gpus)
    assert [variables.get("CUDA_VISIBLE_DEVICES") for variables in found] == expected


@pytest.mark.parametrize(
    ("threads", "openmp", "given"),
    [("auto", None, ["--threads=1"]), ("auto", "3", []), (2, None, ["--threads=2"]), (2, "3", ["--threads=2"])],
)
def test_executors_share_the_cores_unless_somebody_has_chosen(
    threads: Any, openmp: str | None, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if openmp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", openmp)
    config = ServeConfig(executors=1000, executor=ExecutorConfig(threads=threads))
    _, executors, _ = _groups(config, [{}, {}])
    for service in executors.services:
        assert [argument for argument in service._command if argument.startswith("--threads")] == given


def test_executors_that_would_take_each_other_s_memory_do_not_start() -> None:
    with pytest.raises(StartError, match=r"3 executors share 2 GPUs, and each may take 0\.9 of one: .*--kv-memory"):
        gpu_variables(ServeConfig(executors=3, executor=ExecutorConfig(device="cuda")), ["0", "1"])
    half = ExecutorConfig(device="cuda", gpu_memory_utilization=0.5)
    with pytest.raises(StartError, match=r"may take 0\.5 of one: give each less with --gpu-memory-utilization"):
        gpu_variables(ServeConfig(executors=3, executor=half), ["0"])
    groups = ExecutorConfig(device="cuda", tensor_parallel=2, gpu_memory_utilization=0.5)
    assert len(gpu_variables(ServeConfig(executors=2, executor=groups), ["0", "1", "2"])) == 2
    with pytest.raises(StartError, match=r"3 executors of 2 ranks each share 3 GPUs, and each may take 0\.5 of one"):
        gpu_variables(ServeConfig(executors=3, executor=groups), ["0", "1", "2"])


def test_an_executor_needs_as_many_gpus_as_it_has_ranks() -> None:
    with pytest.raises(StartError, match="each executor needs 4 GPUs, and there are 2"):
        gpu_variables(ServeConfig(executor=ExecutorConfig(tensor_parallel=4)), ["0", "1"])


def test_the_gpus_are_those_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5f")
    assert visible_gpus() == ["3", "GPU-5f"]
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert visible_gpus() == []


def test_sequences_may_be_as_long_as_the_pool() -> None:
    with serving("--simulate", "--num-blocks=20", "--max-model-len=auto") as server:
        (model,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
        assert model["max_model_len"] == 20 * 16
        body = {"prompt": [3] * 300, "max_tokens": 21}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert "maximum context length is 320 tokens" in answer.text


def test_an_executor_that_is_killed_is_started_again() -> None:
    with serving("--simulate", "--executor-timeout", "3") as server:
        (old,) = server.pids(EXECUTOR)
        os.kill(old, signal.SIGKILL)
        wait_for_another(server, EXECUTOR, old)
        server.wait_for_metric("executors_ready", 1)
        assert complete(server)
        assert any("executor-0 ended with exit code -9, starting it again" in line for line in server.output)


def test_a_scheduler_that_is_killed_is_started_again_and_streams_go_on() -> None:
    with serving("--simulate", "--simulate-step=0.02", "--executors", "2") as server:
        server.wait_for_metric("executors_ready", 2)
        expected = complete(server, max_tokens=200)
        (old,) = server.pids(SCHEDULER)
        server.wait_for_metric("num_requests_running", 0)
        executors = server.pids(EXECUTOR)
        with ThreadPoolExecutor() as pool:
            stream = pool.submit(complete, server, max_tokens=200)
            server.wait_for_metric("num_requests_running", 1)
            assert not stream.done()
            os.kill(old, signal.SIGKILL)
            assert stream.result(60) == expected
        assert wait_for_another(server, SCHEDULER, old)
        assert server.pids(EXECUTOR) == executors, "they have stayed"
        server.wait_for_line("gateway pagewise_gateway.scheduler_client.client: 1 stream resumed within ")


def test_a_line_says_that_streams_go_on_after_their_executor_was_killed() -> None:
    with serving("--simulate", "--simulate-step=0.02", "--executors", "2") as server:
        server.wait_for_metric("executors_ready", 2)
        with ThreadPoolExecutor() as pool:
            streams = [pool.submit(complete, server, max_tokens=200) for _ in range(4)]
            server.wait_for_metric("num_requests_running", 4)
            os.kill(server.pids(EXECUTOR)[0], signal.SIGKILL)
            assert len({stream.result(60) for stream in streams}) == 1
        server.wait_for_line(" resumed within ")


def test_gateways_share_a_port_and_one_that_is_killed_comes_back() -> None:
    with serving("--simulate", "--gateways", "2") as server:
        gateways = server.pids(GATEWAY)
        assert len(gateways) == 2
        # Connections of their own, which the kernel spreads over the gateways.
        assert len({complete(server) for _ in range(16)}) == 1
        os.kill(gateways[0], signal.SIGKILL)
        wait_for_another(server, GATEWAY, gateways[0])
        deadline = time.monotonic() + 30
        while len(server.pids(GATEWAY)) < 2 or not all(listens(pid, server.url) for pid in server.pids(GATEWAY)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert complete(server)


def listens(pid: int, url: str) -> bool:
    """Whether a process listens on the port of ``url``."""
    port = int(url.rsplit(":", 1)[1])
    return any(one.laddr.port == port and one.status == "LISTEN" for one in psutil.Process(pid).net_connections())


def test_the_line_it_prints_works() -> None:
    with serving("--simulate") as server:
        deadline = time.monotonic() + 10
        while not (lines := [line for line in server.output if "curl -N" in line]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        done = subprocess.run(["bash", "-c", lines[0]], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert done.stdout.rstrip().endswith("data: [DONE]")


def test_a_key_on_the_command_line_stays_out_of_those_of_the_services() -> None:
    key = "sk-of-this-test"
    with serving("--simulate", "--api-key", key) as server:
        body = {"prompt": "import", "max_tokens": 1}
        headers = {"Authorization": f"Bearer {key}"}
        for sent, status in (({}, 401), (headers, 200)):
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=sent, timeout=60).status_code == status
        services = psutil.Process(server.process.pid).children(recursive=True)
        assert len(services) == 3
        assert not any(key in " ".join(service.cmdline()) for service in services)


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


@pytest.mark.parametrize("told", ["pagewise serve", "all processes at once"])
def test_stopping_is_no_reason_for_a_warning(told: str) -> None:
    with serving("--simulate", "--executors", "2", "--gateways", "2") as server:
        server.wait_for_metric("executors_ready", 2)
        server.wait_for_metric("gateways_ready", 2)  # one that has no Welcome yet cannot say Goodbye
        assert complete(server)
        before = len(server.output)  # on a busy machine the scheduler may be late when all of them start
        if told == "pagewise serve":
            assert server.interrupt() == 0
        else:  # as a service manager does; on a busy machine the first would end before the last gets its signal
            services = [pid for module in (GATEWAY, EXECUTOR, SCHEDULER) for pid in server.pids(module)]
            for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
                for pid in (server.process.pid, *services):
                    with contextlib.suppress(ProcessLookupError):  # it has ended already
                        os.kill(pid, number)
            assert server.process.wait(timeout=60) == 0
    said = server.output[before:]
    assert any("stopping" in line for line in said)
    assert not [line for line in said if any(word in line for word in ("WARNING", "ERROR", "Traceback"))]

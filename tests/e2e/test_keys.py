"""Keys through real processes: served with them, refused without, and nothing leaves the host unasked."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from pagewise.keys import keys

from benchmarks.processes import EXECUTOR, GATEWAY, SCHEDULER, answers, free_port, serving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert keys(["--keys", str(tmp_path / "keys"), "init"]) == 0
    return tmp_path / "keys"


def test_executors_join_with_a_key_and_not_without(folder: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    shutil.copytree(folder, stranger)
    assert keys(["--keys", str(stranger), "add", "guest"]) == 0
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "pagewise_executor.main", "--simulate", f"--scheduler={endpoint}"]
    with serving("--simulate", f"--keys={folder}", f"--listen={endpoint}") as server:
        body = {"model": "pagewise-demo", "prompt": "import", "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4
        plain = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert plain.returncode == 2
        assert "asks for a key and there is none: give --keys" in plain.stderr
        with subprocess.Popen([*command, f"--keys={stranger}", "--key-name=guest"], stderr=subprocess.DEVNULL) as guest:
            try:
                while not any("refused a connection from 127.0.0.1: unknown key" in line for line in server.output):
                    assert guest.poll() is None
                    time.sleep(0.05)
                assert server.metric("executors_ready") == 1
                # Let in, without a restart of any process.
                shutil.copy(stranger / "public" / "guest.key", folder / "public" / "guest.key")
                server.wait_for_metric("executors_ready", 2)
                assert keys(["--keys", str(folder), "revoke", "guest"]) == 0
                server.wait_for_metric("executors_ready", 1)
            finally:
                guest.terminate()
        assert server.metric("wire_connections_refused_total") >= 2
        server.wait_for_line("its key was revoked")


@pytest.mark.parametrize(
    ("module", "option"),
    [
        (SCHEDULER, "--listen=tcp://0.0.0.0:5757"),
        (SCHEDULER, "--listen-gateways=tcp://0.0.0.0:5758"),
        (EXECUTOR, "--scheduler=tcp://scheduler.invalid:5757"),
        (GATEWAY, "--scheduler=tcp://scheduler.invalid:5758"),
    ],
)
def test_nothing_leaves_the_host_in_plain_text_unasked(module: str, option: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, option], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "leaves this machine and there are no keys" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--listen", "--listen-gateways"])
def test_a_port_that_is_taken_ends_a_scheduler_with_keys_too(folder: Path, option: str) -> None:
    anywhere = ["--listen=tcp://127.0.0.1:*", "--listen-gateways=tcp://127.0.0.1:*"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", SCHEDULER, f"--keys={folder}", *anywhere]
        command.append(f"{option}=tcp://127.0.0.1:{taken.getsockname()[1]}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "in use" in done.stderr


def test_gateways_join_with_a_key_of_their_own_kind_and_not_with_an_executor_s(folder: Path) -> None:
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    options = ["--simulate", f"--keys={folder}", f"--listen={endpoints[0]}", f"--listen-gateways={endpoints[1]}"]
    with serving(*options) as server:
        port = free_port()
        command = [sys.executable, "-m", GATEWAY, f"--port={port}", f"--keys={folder}", f"--scheduler={endpoints[1]}"]
        for key, let_in in (("executor", False), ("gateway", True)):
            with subprocess.Popen([*command, f"--key-name={key}"], stderr=subprocess.DEVNULL) as other:
                try:
                    deadline = time.monotonic() + 20
                    refused = "wrong kind (executor, not gateway)"
                    while not (
                        answers(f"http://127.0.0.1:{port}/health")
                        if let_in
                        else any(refused in line for line in server.output)
                    ):
                        assert time.monotonic() < deadline
                        time.sleep(0.1)
                    assert answers(f"http://127.0.0.1:{port}/health") is let_in
                finally:
                    other.terminate()

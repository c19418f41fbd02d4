"""``docker compose up`` as a user runs it: build, scale, stream, lose an executor, tear down."""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PORT = 18080

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]


def compose(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(
        ["docker", "compose", "-p", "pagewise-test", *arguments],
        cwd=ROOT,
        env=os.environ | {"PAGEWISE_HTTP_PORT": str(PORT), "PAGEWISE_KV_MEMORY": "64MiB"},
        capture_output=True,
        text=True,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def stack() -> Iterator[None]:
    try:
        compose("up", "--build", "--detach", "--scale", "executor=3")
        yield
    finally:
        print(compose("logs", "--tail", "40", check=False))
        compose("down", "--volumes", check=False)


def inspect(container: str, template: str) -> str:
    command = ["docker", "inspect", "--format", template, container]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def executors_ready() -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as answer:
            return int(json.load(answer)["executors"])
    except OSError:
        return 0


def wait_for_executors(count: int, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while (ready := executors_ready()) != count:
        assert time.monotonic() < deadline, f"{ready} executors are ready, not {count}"
        time.sleep(0.5)


def stream() -> list[str]:
    body = {"model": "pagewise-demo", "prompt": "import os", "max_tokens": 16, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [line.decode().strip() for line in answer if line.strip()]


def test_three_executors_serve_and_one_that_is_killed_returns(stack: None) -> None:
    wait_for_executors(3)
    first = stream()
    assert first[-1] == "data: [DONE]"
    texts = "".join(json.loads(line[6:])["choices"][0]["text"] for line in first[:-1])
    assert texts
    victim = compose("ps", "--quiet", "executor").split()[0]
    pid = inspect(victim, "{{.State.Pid}}")
    os.kill(int(pid), 9)
    deadline = time.monotonic() + 60
    while inspect(victim, "{{.RestartCount}}") == "0":
        assert time.monotonic() < deadline, "the executor was not started again"
        time.sleep(0.2)
    again = "".join(json.loads(line[6:])["choices"][0]["text"] for line in stream()[:-1])
    assert again == texts
    wait_for_executors(3)


def test_images_run_as_an_ordinary_user_and_the_scheduler_has_no_torch(stack: None) -> None:
    for service in ("scheduler", "executor"):
        assert compose("exec", "-T", service, "id", "-u").strip() == "10001"
    code = "import importlib.util as u; print(u.find_spec('torch'))"
    assert compose("exec", "-T", "scheduler", "python", "-c", code).strip() == "None"

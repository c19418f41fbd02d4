"""Ctrl-C at ``pagewise serve`` with streams open: real processes, executors that invent their tokens."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.processes import EXECUTOR, GATEWAY, SCHEDULER, Served, alive, children, serving, spawn
from tests.free_cores import FreeCores


class Stream(threading.Thread):
    """A client that reads a stream to its end, whatever that is.

    Fields:
        events: the data of its events. longest_gap: seconds between two of them. broken: how the transfer broke, if so.
    """

    def __init__(self, url: str, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.events: list[str] = []
        self.longest_gap = 0.0
        self.broken: Exception | None = None
        self._url = url
        body = {"prompt": "import", "ignore_eos": True, "stream": True, "max_tokens": 4000}
        self._body = body | {"stream_options": {"include_usage": True}} | fields

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as answer:
                last = time.monotonic()
                for line in answer.iter_lines():
                    if line:
                        now = time.monotonic()
                        self.longest_gap = max(self.longest_gap, now - last)
                        last = now
                        self.events.append(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.broken = error

    def flow(self) -> None:
        """Wait for its first events."""
        self.start()
        deadline = time.monotonic() + 20
        while len(self.events) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[Served]:
    options = ("--simulate", "--simulate-step=0.02", "--max-model-len=8000", "--executors=2", "--gateways=2")
    with serving(*options, "--shutdown-timeout=3") as running:
        yield running


def pids(server: Served) -> list[int]:
    return [pid for module in (EXECUTOR, SCHEDULER, GATEWAY) for pid in server.pids(module)]


def complete(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "import", "max_tokens": 4}, timeout=10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_streams_go_on_and_then_end_properly(server: Served, number: signal.Signals) -> None:
    streams = [Stream(server.url, n=2), Stream(server.url), Stream(server.url, max_tokens=60)]
    for stream in streams:
        stream.flow()
    processes = pids(server)
    began, cores = time.monotonic(), FreeCores()
    if number == signal.SIGINT:
        server.press_ctrl_c()
    else:
        server.process.send_signal(number)
    while (refused := complete(server.url)).status_code == 200:  # the gateways have not been told
        time.sleep(0.02)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "2")
    before = [len(stream.events) for stream in streams[:2]]
    for stream in streams:
        stream.join(20)
    assert server.process.wait(20) == 0
    took, share = time.monotonic() - began, cores.share()
    assert took >= 3.0
    assert took * share < 8.0
    assert not any(alive(pid) for pid in processes)
    for stream, reason in zip(streams, ("abort", "abort", "length"), strict=True):
        assert stream.broken is None
        assert stream.longest_gap * share < 1.0
        *_, last, usage, done = stream.events
        assert done == "[DONE]"
        assert json.loads(last)["choices"][0]["finish_reason"] == reason
        assert json.loads(usage)["usage"]["completion_tokens"] >= 60
    for stream, count in zip(streams, before, strict=False):
        assert len(stream.events) > count + 50, "tokens came until the end"
    assert not [line for line in server.output if "Traceback" in line or " ERROR " in line]


def test_a_second_ctrl_c_ends_everything_at_once(server: Served) -> None:
    stream = Stream(server.url)
    stream.flow()
    processes = pids(server)
    server.press_ctrl_c()
    server.wait_for_line("stopping")  # two signals that come before the first is handled are one
    began, cores = time.monotonic(), FreeCores()
    assert server.interrupt() == 130
    assert (time.monotonic() - began) * cores.share() < 2.0
    stream.join(5)
    assert not stream.is_alive()
    assert stream.broken is not None
    assert not any(alive(pid) for pid in processes)


@pytest.mark.parametrize("seconds", [0.2, 0.6, 1.0, 1.5, 2.5])
def test_ctrl_c_while_services_start_leaves_no_traceback(seconds: float) -> None:
    command = [sys.executable, "-m", "pagewise.main", "serve", "--simulate", "--port=0", "--gateways=2"]
    process = spawn(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    deadline = time.monotonic() + 20
    while not (started := [pid for pid, argv in children(process.pid) if GATEWAY.encode() in argv]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(seconds)
    began, cores = time.monotonic(), FreeCores()
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert (time.monotonic() - began) * cores.share() < 8.0
    assert "Traceback" not in output
    assert not any(alive(pid) for pid in started)

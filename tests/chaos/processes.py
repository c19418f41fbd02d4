"""A scheduler and its executors as processes of their own, to be killed, frozen, drained and cut off."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pagewise.keys import keys
from pagewise.process import _die_with_parent

SLOW_SIMULATED = str(Path(__file__).parent / "slow_simulated.py")
"""A script in the place of the executor's module: simulated, and each step takes a while."""

HOST_MEMORY = "16MiB"
"""Of each executor that is started as shipped: 256 blocks of the demo model, less than the pools, so that it fills."""


class Process:
    """One process; what it prints goes to a file under ``folder``."""

    def __init__(self, name: str, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | (environment or {}) | {"PYTHONUNBUFFERED": "1"},
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._popen.poll()

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self, seconds: float = 30.0) -> int:
        """Its exit code; fails if it does not end in time."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end:\n{self.tail()}") from None

    def close(self) -> None:
        """No process is left behind, frozen ones neither."""
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.output().splitlines()[-lines:])


class Cluster:
    """A scheduler on fixed ports, and executors that come and go.

    ``executor``: the module or script that executors run. ``address``: where the scheduler listens for executors.
    ``as_shipped``: what compose and the manifests start: connections encrypted with keys (made here), costs measured at
    the start, and room for blocks on the host, whose copies are verified here.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "pagewise-demo",
        scheduler_options: tuple[str, ...] = (),
        executor: str = "pagewise_executor.main",
        executor_options: tuple[str, ...] = (),
        address: str = "127.0.0.1",
        as_shipped: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port, self.wire_port = free_port("127.0.0.1"), free_port(address)
        self.url = f"http://127.0.0.1:{self.port}"
        self.endpoint = f"tcp://{address}:{self.wire_port}"
        self.scheduler: Process
        self.executors: list[Process] = []
        self._model = model
        # Network namespaces of its own: nobody else can reach them.
        plaintext = () if address == "127.0.0.1" else ("--plaintext",)
        security, costs = (self._make_keys(), self._host_memory()) if as_shipped else (plaintext, ("--no-profile",))
        self._scheduler_options = (*security, *scheduler_options)
        self._executor, self._executor_options = executor, (*security, *costs, *executor_options)

    def start_scheduler(self, seconds: float = 60.0) -> None:
        """Start it, under the same ports each time, and wait until HTTP answers."""
        options = [
            self._model,
            f"--port={self.port}",
            f"--listen={self.endpoint}",
            *self._scheduler_options,
        ]
        self.scheduler = Process("scheduler", [sys.executable, "-m", "pagewise_scheduler.main", *options], self.folder)
        wait_until(lambda: self._answers("/version"), seconds, "the scheduler answers", self.scheduler)

    def start_executor(
        self, name: str, *options: str, prefix: tuple[str, ...] = (), environment: dict[str, str] | None = None
    ) -> Process:
        """Start one; ``prefix``: what goes in front of its command."""
        run = [self._executor] if self._executor.endswith(".py") else ["-m", self._executor]
        own = [self._model, f"--scheduler={self.endpoint}", f"--executor-id={name}", "--threads=1"]
        command = [*prefix, sys.executable, *run, *own, *self._executor_options, *options]
        process = Process(name, command, self.folder, environment)
        self.executors.append(process)
        return process

    def get(self, path: str) -> Any:
        """A JSON answer of the scheduler."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples, of those that have these labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == f"pagewise_{name}" and all(label in line for label in wanted)
        )

    def members(self) -> dict[str, dict[str, Any]]:
        """Memory reports of the executors that are in, by name."""
        return {report["executor_id"]: report for report in self.get("/debug/memory?limit=1000")["executors"]}

    def wait_ready(self, count: int, seconds: float = 60.0) -> float:
        """Wait for that many executors; returns how long it took, in seconds."""
        began = time.monotonic()
        wait_until(lambda: self.metric("executors_ready") >= count, seconds, f"{count} executors", self.scheduler)
        return time.monotonic() - began

    def close(self) -> None:
        for process in [*self.executors, *([self.scheduler] if hasattr(self, "scheduler") else [])]:
            process.close()

    def _make_keys(self) -> tuple[str, ...]:
        folder = self.folder / "keys"
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the numbers
            assert keys(["--keys", str(folder), "init"]) == 0
        return (f"--keys={folder}",)

    def _host_memory(self) -> tuple[str, ...]:
        # Not /dev/shm: what executors that are killed leave there would stay.
        folder = self.folder / "memory"
        folder.mkdir(exist_ok=True)
        return f"--host-memory={HOST_MEMORY}", f"--host-memory-dir={folder}", "--verify-copies"

    def _answers(self, path: str) -> bool:
        try:
            self.get(path)
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running(cluster: Cluster, executors: int) -> Iterator[Cluster]:
    """The cluster with its scheduler and so many executors, all ready."""
    try:
        cluster.start_scheduler()
        for number in range(executors):
            cluster.start_executor(f"first-{number}")
        cluster.wait_ready(executors, 90.0)
        yield cluster
    finally:
        cluster.close()


def wait_until(condition: Callable[[], bool], seconds: float, what: str, process: Process) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.exit_code is None, f"{process.name} ended with {process.exit_code}:\n{process.tail()}"
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}\n{process.tail()}"
        time.sleep(0.05)


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])

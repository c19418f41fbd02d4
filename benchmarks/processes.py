"""Pagewise's processes for tests and benchmarks: a ``Cluster`` of single ones, or all that ``pagewise serve`` starts.

Real processes and real sockets on free ports of this machine. Every process that is started ends with the process that
started it, also after errors.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pagewise.keys import keys
from pagewise_shared.service_process import die_with_parent

from benchmarks.scrape import Sample, scrape, total

SCHEDULER, GATEWAY, EXECUTOR = (f"pagewise_{name}.main" for name in ("scheduler", "gateway", "executor"))
"""The modules of the three kinds of process."""

HOST_MEMORY = "16MiB"
"""Of each executor that is started as shipped: 256 blocks of the demo model, less than the pools, so that it fills."""

_LOOPBACK, _PORTS = "127.0.0.1", range(16_384, 32_768)  # below Linux's ports for sockets that ask for any port


def get(url: str, seconds: float = 10.0, key: str = "") -> Any:
    """A JSON answer. ``key``: an API key, if the server has any."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=seconds) as answer:
        return json.load(answer)


def answers(url: str) -> bool:
    """Whether a GET brings a 200 now."""
    try:
        get(url)
    except OSError:
        return False
    return True


def free_port(address: str = _LOOPBACK) -> int:
    """A TCP port on which no process listens, and which the kernel assigns to no other one while its process
    restarts."""
    while True:
        port = secrets.choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            return port


_SPAWNER = ThreadPoolExecutor(1, "spawner")
"""Starts all processes: the kernel ends a child with the thread that has started it, and this one lives to the end."""


def spawn(command: list[str], **options: Any) -> "subprocess.Popen[Any]":
    """A process that cannot outlive this one, whichever thread asks for it."""
    return _SPAWNER.submit(lambda: subprocess.Popen(command, preexec_fn=_prepare, **options)).result()


def _prepare() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets the jobs of its background ignore it


class Process:
    """One process; its output is appended to a file under ``folder``, behind the output of its predecessors."""

    def __init__(self, name: str, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.frozen = False
        with self.log.open("ab") as log:
            self._begin = log.tell()
            self._popen = spawn(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | (environment or {}) | {"PYTHONUNBUFFERED": "1"},
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._popen.poll()

    def signal(self, number: signal.Signals) -> None:
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self.frozen = number == signal.SIGSTOP
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

    def listening(self) -> list[str]:
        """The addresses that it has printed once it could be reached; none before that."""
        own = self.log.read_bytes()[self._begin :].decode(errors="replace")
        found = re.search(r"^listening (.+)\n", own, re.MULTILINE)
        return found[1].split() if found else []

    def is_ready(self) -> bool:
        """Whether it has printed that it can be reached, or, an executor, that it has joined a scheduler."""
        own = self.log.read_bytes()[self._begin :].decode(errors="replace")
        return re.search(r"^listening .+\n|joined the scheduler", own, re.MULTILINE) is not None

    def output(self) -> str:
        """The output of it and its predecessors."""
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.output().splitlines()[-40:])


class Cluster:
    """A scheduler, gateways and executors, each of which starts and ends by itself, on ports that stay.

    ``gateways``: how many there may be, each on a port of its own, so that it is known which one a client talks to.
    ``..._options``: of every process of a kind. ``simulate``: executors invent their tokens, and a step takes so many
    seconds. ``address``: where the scheduler listens for executors. ``as_shipped``: the processes of compose and the
    manifests: connections encrypted with keys (made here), costs measured at the start, and room for blocks on the
    host, whose copies are verified here. ``api_key``: an operator's, where gateways are given API keys.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "pagewise-demo",
        gateways: int = 1,
        scheduler_options: tuple[str, ...] = (),
        gateway_options: tuple[str, ...] = (),
        executor_options: tuple[str, ...] = (),
        simulate: float | None = None,
        address: str = _LOOPBACK,
        as_shipped: bool = False,
        api_key: str = "",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.endpoint = f"tcp://{address}:{free_port(address)}"
        self.gateway_endpoint = f"tcp://{_LOOPBACK}:{free_port()}"
        self.urls = {f"gateway-{number}": f"http://{_LOOPBACK}:{free_port()}" for number in range(gateways)}
        self.url = self.urls["gateway-0"]
        self.scheduler: Process
        self.gateways: dict[str, Process] = {}
        self.executors: list[Process] = []
        self._model, self._api_key = model, api_key
        # Network namespaces of its own: no other process can reach them.
        plaintext = () if address == _LOOPBACK else ("--plaintext",)
        security, costs = (self._make_keys(), self._host_memory()) if as_shipped else (plaintext, ("--no-profile",))
        invented = () if simulate is None else ("--simulate", f"--simulate-step={simulate}")
        self._scheduler_options = (*security, *scheduler_options)
        self._gateway_options = (*(security if as_shipped else ()), *gateway_options)
        self._executor_options = (*security, *costs, *invented, *executor_options)

    def start_scheduler(self, seconds: float = 120.0) -> None:
        """Start it, under the same endpoints each time, and wait until it can be reached."""
        options = [f"--listen={self.endpoint}", f"--listen-gateways={self.gateway_endpoint}", *self._scheduler_options]
        self.scheduler = Process("scheduler", self._command(SCHEDULER, options), self.folder)
        wait_until(lambda: bool(self.scheduler.listening()), seconds, "the scheduler listens", self.scheduler)

    def start_gateway(self, name: str = "gateway-0", *options: str, seconds: float = 120.0) -> Process:
        """Start one, under the same port each time, and wait until HTTP answers."""
        port = self.urls[name].rsplit(":", 1)[1]
        own = [f"--port={port}", f"--scheduler={self.gateway_endpoint}", f"--gateway-id={name}"]
        process = Process(name, self._command(GATEWAY, [*own, *self._gateway_options, *options]), self.folder)
        self.gateways[name] = process
        wait_until(lambda: answers(f"{self.urls[name]}/version"), seconds, f"{name} answers", process)
        return process

    def start(self) -> None:
        """Start the scheduler and every gateway."""
        self.start_scheduler()
        for name in self.urls:
            self.start_gateway(name)

    def start_executor(
        self,
        name: str,
        *options: str,
        prefix: tuple[str, ...] = (),
        endpoint: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> Process:
        """Start one; ``prefix``: arguments in front of its command."""
        own = [f"--scheduler={endpoint or self.endpoint}", f"--executor-id={name}", "--threads=1"]
        command = [*prefix, *self._command(EXECUTOR, [*own, *self._executor_options, *options])]
        process = Process(name, command, self.folder, environment)
        self.executors.append(process)
        return process

    def get(self, path: str) -> Any:
        """A JSON answer of a gateway that is able to give one."""
        return get(self.able() + path, key=self._api_key)

    def scrape(self) -> list[Sample]:
        """All metrics."""
        return scrape(self.able(), key=self._api_key)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        return total(self.scrape(), name, **labels)

    def members(self) -> dict[str, dict[str, Any]]:
        """Memory reports of the executors that are in, by name; none while no scheduler answers."""
        try:
            return {report["executor_id"]: report for report in self.get("/debug/memory?limit=1000")["executors"]}
        except OSError:
            return {}

    def executors_ready(self) -> int:
        """How many executors take work; none while no scheduler answers."""
        try:
            return int(self.metric("executors_ready"))
        except OSError:
            return 0

    def wait_ready(self, count: int, seconds: float = 240.0) -> float:
        """Wait until that many executors take work and all gateways that are able to answer know of one; returns how
        long it took, in seconds."""
        began = time.monotonic()
        wait_until(
            lambda: self.executors_ready() >= count
            and (not count or all(answers(f"{url}/health") for url in self._able())),
            seconds, f"{count} executors", self.scheduler, self.executors,
        )  # fmt: skip
        return time.monotonic() - began

    def close(self) -> None:
        """End everything at once."""
        scheduler = [self.scheduler] if hasattr(self, "scheduler") else []
        for process in [*self.gateways.values(), *self.executors, *scheduler]:
            process.close()

    def able(self) -> str:
        """The URL of a gateway that neither has ended nor is stopped."""
        return next(iter(self._able()), self.url)

    def _able(self) -> list[str]:
        able = (name for name, process in self.gateways.items() if process.exit_code is None and not process.frozen)
        return [self.urls[name] for name in able]

    def _command(self, module: str, options: list[str]) -> list[str]:
        return [sys.executable, "-m", module, self._model, *options]

    def _make_keys(self) -> tuple[str, ...]:
        folder = self.folder / "keys"
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the numbers
            assert keys(["--keys", str(folder), "init"]) == 0
        return (f"--keys={folder}",)

    def _host_memory(self) -> tuple[str, ...]:
        # Not /dev/shm: memory of killed executors would stay there.
        folder = self.folder / "memory"
        folder.mkdir(exist_ok=True)
        return f"--host-memory={HOST_MEMORY}", f"--host-memory-dir={folder}", "--verify-copies"


@contextlib.contextmanager
def running(cluster: Cluster, executors: int) -> Iterator[Cluster]:
    """The cluster with its scheduler, its gateways and so many executors, all ready."""
    try:
        cluster.start()
        for number in range(executors):
            cluster.start_executor(f"first-{number}")
        cluster.wait_ready(executors, 240.0)
        yield cluster
    finally:
        cluster.close()


def wait_until(
    condition: Callable[[], bool], seconds: float, what: str, process: Process, others: Sequence[Process] = ()
) -> None:
    """Wait for something that ``process`` is to bring about; fails if it does not in time, or ends.

    ``others``: processes that may end, and whose logs belong to the failure too.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.exit_code is None, f"{process.name} ended with {process.exit_code}:\n{process.tail()}"
        if time.monotonic() > deadline:
            logs = (f"---- {one.name}, exit code {one.exit_code}:\n{one.tail()}" for one in (process, *others))
            raise AssertionError("\n".join([f"not within {seconds:g} s: {what}", *logs]))
        time.sleep(0.05)


class Served:
    """A running ``pagewise serve`` that has printed that it serves; ``output`` collects every line it prints.

    ``url`` is where clients send requests: the URL of the gateways, ``gateway_url``, or of a proxy in front of them.
    """

    def __init__(self, *arguments: str, ready_seconds: float = 240.0) -> None:
        self.output: list[str] = []
        self.url = self.gateway_url = ""
        self.process = spawn(
            [sys.executable, "-m", "pagewise.main", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            process_group=0,  # as a terminal gives each command
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(ready_seconds) or not self.url:
            self.close()
            raise RuntimeError("pagewise serve did not become ready:\n" + "".join(self.output))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if line.startswith("Serving "):
                self.url = self.gateway_url = line.split(" at ")[1].split(" ")[0]
                self._ready.set()
        self._ready.set()

    def pids(self, module: str) -> list[int]:
        """Its children that run ``module``."""
        return [pid for pid, command in children(self.process.pid) if module.encode() in command]

    def scrape(self) -> list[Sample]:
        """All metrics."""
        return scrape(self.gateway_url)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples."""
        return total(self.scrape(), name, **labels)

    def wait_for_metric(self, name: str, value: float, seconds: float = 20.0) -> None:
        """Wait until a metric has a value. While the scheduler is started again there are no metrics."""
        deadline, now = time.monotonic() + seconds, None
        while now != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}"
            with contextlib.suppress(urllib.error.HTTPError):
                now = self.metric(name)
            if now != value:
                time.sleep(0.2)

    def wait_for_line(self, text: str, seconds: float = 20.0) -> None:
        """Wait until it has printed a line that holds ``text``: lines of a service come later than its metrics."""
        deadline = time.monotonic() + seconds
        while not any(text in line for line in self.output):
            assert time.monotonic() < deadline, f"{text!r} is not in:\n{''.join(self.output)}"
            time.sleep(0.05)

    def press_ctrl_c(self) -> None:
        """Send the interrupt to the whole process group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.press_ctrl_c()
        return self.process.wait(timeout=30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(timeout=10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def serving(*arguments: str, ready_seconds: float = 240.0) -> Iterator[Served]:
    """``pagewise serve`` on a free port, ready."""
    server = Served(*arguments, ready_seconds=ready_seconds)
    try:
        yield server
    finally:
        server.close()


def children(parent: int) -> list[tuple[int, list[bytes]]]:
    """Process id and command line of the children of a process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                found.append((int(entry.name), command))
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False

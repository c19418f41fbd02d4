"""One scheduler and more and more executors: throughput, and what a token costs the scheduler's process.

    python -m benchmarks.scaling.run [--executors 1 2 4 8 64] [--json FILE] [--smoke]

Executors are processes (``pagewise-executor --simulate``) whose steps take a fixed time and cost next to nothing, so
what is measured is everything else. Every executor gets the same load: so many streams in a closed loop, over HTTP as
server-sent events (``stream``), over HTTP with one answer at the end (``answer``), or by tasks in the process of
router, fleet and engines, without HTTP (``core``). At the end more is offered than can be had: what
is reached then is the limit of one scheduler on this machine.
"""

import argparse
import asyncio
import contextlib
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop

from benchmarks.record import record_file, write_record
from benchmarks.scaling.load import Load

_TOKENS, _STEPS = "pagewise_generation_tokens_total", "pagewise_iteration_tokens_count"
MODES = ("core", "answer", "stream")

_TOO_MUCH = (8, 128, 0.02)
"""Executors, streams of each and seconds of a step: 51,200 tokens per second are offered."""


@dataclass(frozen=True)
class Setup:
    """``step``: seconds that a simulated step takes. ``streams``: per executor."""

    mode: str
    executors: int
    streams: int
    step: float


@dataclass
class Row:
    """Medians over the windows. ``of_offered``: of the tokens that the executors would compute if nothing held them up.

    ``scheduler_cpu``: CPU seconds of the scheduler's process per second. ``machine_busy``: of all cores, whoever it is.
    """

    mode: str
    executors: int
    streams: int
    step_ms: float
    tokens_per_s: float
    of_offered: float
    steps_per_s: float
    cpu_us_per_token: float
    cpu_us_per_token_windows: list[float]
    scheduler_cpu: float
    machine_busy: float


@dataclass(frozen=True)
class Server:
    """A scheduler under load: where its metrics are, and its process."""

    url: str
    pid: int


@dataclass(frozen=True)
class Reading:
    """Counts of a window, and its seconds."""

    tokens: float
    steps: float
    cpu: float
    seconds: float


def read(url: str) -> dict[str, float]:
    """The scheduler's metrics, summed over labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.split("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a process; from its threads, because the process's own sum comes in pieces of 10 ms."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) * 1e-9


def window(server: Server, seconds: float) -> Reading:
    """What has happened within ``seconds``; asking for it is not counted as CPU time."""
    metrics, cpu, began = read(server.url), cpu_seconds(server.pid), time.perf_counter()
    time.sleep(seconds)
    cpu, taken = cpu_seconds(server.pid) - cpu, time.perf_counter() - began
    now = read(server.url)
    tokens, steps = (now[name] - metrics[name] for name in (_TOKENS, _STEPS))
    return Reading(tokens, steps, cpu, taken)


@contextlib.contextmanager
def processes(commands: list[list[str]]) -> Iterator[list["subprocess.Popen[str]"]]:
    """Start ``python -m`` commands; whatever happens, they end."""
    started = [
        subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        yield started
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def scheduler_command(setup: Setup, endpoint: str) -> list[str]:
    if setup.mode == "core":
        count = setup.executors * setup.streams
        limits = [f"--executors={setup.executors}", f"--streams={count}"]
        return ["benchmarks.scaling.core", f"--listen={endpoint}", *limits]
    options = ["--port=0", "--max-num-seqs=1024", "--max-waiting=100000", "--executor-timeout=60"]
    return ["pagewise_scheduler.main", f"--listen={endpoint}", "--log-level=error", *options]


@contextlib.asynccontextmanager
async def under_load(setup: Setup) -> AsyncIterator[Server]:
    """A scheduler with its executors, all streams begun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    executor = [
        "pagewise_executor.main", "--simulate", f"--simulate-step={setup.step}", f"--scheduler={endpoint}",
        "--max-num-seqs=1024", "--log-level=error", "--num-blocks=65536",
    ]  # fmt: skip
    with processes([scheduler_command(setup, endpoint)]) as (scheduler,):
        assert scheduler.stdout is not None
        url = scheduler.stdout.readline().removeprefix("listening ").strip()
        with processes([[*executor, f"--executor-id=e{number}"] for number in range(setup.executors)]) as fleet:
            while read(url)["pagewise_executors_ready"] < setup.executors:
                assert all(process.poll() is None for process in fleet), "an executor did not start"
                await asyncio.sleep(0.2)
            if setup.mode == "core":
                yield Server(url, scheduler.pid)
                return
            host, port = url.removeprefix("http://").split(":")
            async with Load(host, int(port), setup.executors * setup.streams, setup.mode == "stream") as load:
                yield Server(url, scheduler.pid)
            assert not load.failures, load.failures[0]


async def measure(setup: Setup, seconds: float, windows: int) -> Row:
    """Let it settle for a whole request, then look at it ``windows`` times for ``seconds``."""
    readings, busy = [], []
    async with under_load(setup) as server:
        await asyncio.sleep(seconds)
        for _ in range(windows):
            psutil.cpu_percent()
            readings.append(await asyncio.to_thread(window, server, seconds))
            busy.append(psutil.cpu_percent() / 100)
    per_token = [reading.cpu / reading.tokens * 1e6 for reading in readings]
    rate = statistics.median(reading.tokens / reading.seconds for reading in readings)
    return Row(
        setup.mode,
        setup.executors,
        setup.streams,
        setup.step * 1e3,
        round(rate),
        round(rate * setup.step / (setup.executors * setup.streams), 3),
        round(statistics.median(reading.steps / reading.seconds for reading in readings), 1),
        round(statistics.median(per_token), 1),
        [round(value, 1) for value in per_token],
        round(statistics.median(reading.cpu / reading.seconds for reading in readings), 3),
        round(statistics.median(busy), 3),
    )


def show(row: Row) -> None:
    print(
        f"{row.mode:<8}{row.executors:>4} executors {row.streams:>4} streams each {row.step_ms:>6.0f} ms/step"
        f"{row.tokens_per_s:>9.0f} tokens/s ({row.of_offered:>4.0%} of offered){row.steps_per_s:>8.0f} steps/s"
        f"{row.cpu_us_per_token:>8.1f} µs CPU/token, scheduler {row.scheduler_cpu:>4.0%}, "
        f"machine {row.machine_busy:>4.0%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--executors", type=int, nargs="+", default=[1, 2, 4, 8, 64])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--streams", type=int, default=16, help="per executor")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a simulated step")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small and short: does everything run?")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    if args.smoke:
        args.executors, args.streams, args.step, args.seconds, args.windows = [1, 2], 4, 0.01, 0.5, 1
    setups = [Setup(mode, count, args.streams, args.step) for mode in args.modes for count in args.executors]
    if not args.smoke:
        setups += [Setup(mode, *_TOO_MUCH) for mode in args.modes]
    rows = []
    for setup in setups:
        rows.append(uvloop.run(measure(setup, args.seconds, args.windows)))
        show(rows[-1])
        if args.json:  # after each row: what is measured is measured
            write_record(args.json, {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()

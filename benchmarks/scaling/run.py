"""One scheduler, gateways, and more and more executors: throughput, and the cost of a token in each kind of process.

    python -m benchmarks.scaling.run [--executors 1 2 4 8 64] [--gateways 1 2] [--scheduler-core 0] [--json FILE]

Executors are processes (``pagewise-executor --simulate``) whose steps take a fixed time and cost next to nothing, so
everything else is measured. Every executor gets the same load: so many streams in a closed loop, over HTTP as
server-sent events (``stream``), over HTTP with one answer at the end (``answer``), or by a gateway without HTTP and
text (``wire``). At the end more is offered than can be served: the throughput then is the limit of one scheduler, or
of its gateways, on this machine.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import psutil
import uvloop

from benchmarks.processes import Cluster
from benchmarks.record import record_file, write_record
from benchmarks.scaling.load import Load
from benchmarks.scaling.wire import WireLoad
from benchmarks.scrape import scrape, total

_TOKENS, _STEPS = "generation_tokens_total", "iteration_tokens_count"
MODES = ("wire", "answer", "stream")

_TOO_MUCH = (8, 128, 0.02)
"""Executors, streams of each and seconds of a step: 51,200 tokens per second are offered."""


@dataclass(frozen=True)
class Setup:
    """``step``: seconds that a simulated step takes. ``streams``: per executor. ``gateways``: 0 over the wire.

    ``scheduler_core``: the core that the scheduler has for itself, None: all share all cores.
    """

    mode: str
    gateways: int
    executors: int
    streams: int
    step: float
    scheduler_core: int | None = None


@dataclass
class Row:
    """Medians over the windows. ``of_offered``: of the tokens that the executors would compute if nothing held them up.

    ``..._us_per_token``: CPU time of the scheduler's process, of all gateways together, of the executors together.
    ``..._cpu``: their CPU seconds per second. ``machine_busy``: of all cores, by any process.
    """

    mode: str
    gateways: int
    executors: int
    streams: int
    step_ms: float
    tokens_per_s: float
    of_offered: float
    steps_per_s: float
    scheduler_us_per_token: float
    scheduler_us_per_token_windows: list[float]
    gateway_us_per_token: float
    gateway_us_per_token_windows: list[float]
    executor_us_per_token: float
    scheduler_cpu: float
    gateway_cpu: float
    machine_busy: float


@dataclass(frozen=True)
class UnderLoad:
    """Processes under load by kind (process ids); ``counts``: tokens and steps so far."""

    pids: dict[str, list[int]]
    counts: Callable[[], Awaitable[tuple[float, float]]]


@dataclass(frozen=True)
class Window:
    """The changes within ``seconds``: CPU seconds by kind of process."""

    tokens: float
    steps: float
    cpu: dict[str, float]
    seconds: float

    def us_per_token(self, kind: str) -> float:
        return self.cpu[kind] / self.tokens * 1e6


def cpu_seconds(pid: int) -> float:
    """CPU time of a process; from its threads, because the process's own sum comes in pieces of 10 ms."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) * 1e-9


def isolate(pid: int, core: int) -> None:
    """Give a core to a process, with all its threads, and the other cores to all other processes of this tree."""
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        cores = {core} if process.pid == pid else set(range(psutil.cpu_count() or 1)) - {core}
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), cores)


async def window(load: UnderLoad, seconds: float) -> Window:
    """The changes within ``seconds``; asking for them is not counted as CPU time."""

    def used() -> dict[str, float]:
        return {kind: sum(map(cpu_seconds, pids)) for kind, pids in load.pids.items()}

    before, cpu, began = await load.counts(), used(), perf_counter()
    await asyncio.sleep(seconds)
    cpu, taken = {kind: now - cpu[kind] for kind, now in used().items()}, perf_counter() - began
    tokens, steps = await load.counts()
    return Window(tokens - before[0], steps - before[1], cpu, taken)


@contextlib.asynccontextmanager
async def under_load(setup: Setup) -> AsyncIterator[UnderLoad]:
    """A scheduler with its gateways and executors, all streams begun."""
    limits = ("--log-level=error", "--max-num-seqs=1024")
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(
            Path(folder),
            gateways=setup.gateways + 1,
            scheduler_options=(*limits, "--max-waiting=100000", "--executor-timeout=60", "--gateway-timeout=60"),
            gateway_options=limits[:1],
            executor_options=(*limits, "--num-blocks=65536"),
            simulate=setup.step,
        )
        try:
            await asyncio.to_thread(cluster.start if setup.gateways else cluster.start_scheduler)
            for number in range(setup.executors):
                cluster.start_executor(f"e{number}")
            if setup.scheduler_core is not None:
                isolate(cluster.scheduler.pid, setup.scheduler_core)
            pids = {
                "scheduler": [cluster.scheduler.pid],
                "gateway": [process.pid for process in list(cluster.gateways.values())[: setup.gateways]],
                "executor": [process.pid for process in cluster.executors],
            }
            if not setup.gateways:
                async with WireLoad(cluster.gateway_endpoint, setup.executors * setup.streams) as wire:
                    await wire.start(setup.executors)
                    yield UnderLoad(pids, lambda: _over_the_wire(wire))
                assert not wire.failures, wire.failures[0]
                return
            await asyncio.to_thread(cluster.wait_ready, setup.executors, 120.0)
            async with contextlib.AsyncExitStack() as stack:
                loads = [
                    await stack.enter_async_context(Load("127.0.0.1", port, streams, setup.mode == "stream"))
                    for port, streams in shares(cluster, setup)
                ]
                yield UnderLoad(pids, lambda: _over_http(cluster))
            for load in loads:
                assert not load.failures, load.failures[0]
        finally:
            cluster.close()


async def _over_the_wire(wire: WireLoad) -> tuple[float, float]:
    samples = await wire.scrape()
    return wire.tokens, total(samples, _STEPS)


async def _over_http(cluster: Cluster) -> tuple[float, float]:
    """Ask the last gateway, which carries no load: a busy one answers seconds late, and tokens counted meanwhile would
    look as if they had cost no CPU time."""
    samples = await asyncio.to_thread(scrape, list(cluster.urls.values())[-1])
    return total(samples, _TOKENS), total(samples, _STEPS)


def shares(cluster: Cluster, setup: Setup) -> list[tuple[int, int]]:
    """The port of each gateway under load, and how many of the streams it gets."""
    streams = setup.executors * setup.streams
    ports = [int(url.rsplit(":", 1)[1]) for url in list(cluster.urls.values())[: setup.gateways]]
    return [(port, len(range(number, streams, len(ports)))) for number, port in enumerate(ports)]


async def measure(setup: Setup, seconds: float, windows: int) -> Row:
    """Let it settle for a whole request, then look at it ``windows`` times for ``seconds``."""
    found, busy = [], []
    async with under_load(setup) as load:
        await asyncio.sleep(seconds)
        for _ in range(windows):
            psutil.cpu_percent()
            found.append(await window(load, seconds))
            busy.append(psutil.cpu_percent() / 100)
    rate = statistics.median(one.tokens / one.seconds for one in found)
    per_token = {kind: [round(one.us_per_token(kind), 2) for one in found] for kind in load.pids}
    return Row(
        setup.mode,
        setup.gateways,
        setup.executors,
        setup.streams,
        setup.step * 1e3,
        round(rate),
        round(rate * setup.step / (setup.executors * setup.streams), 3),
        round(statistics.median(one.steps / one.seconds for one in found), 1),
        round(statistics.median(per_token["scheduler"]), 2),
        per_token["scheduler"],
        round(statistics.median(per_token["gateway"]), 2),
        per_token["gateway"],
        round(statistics.median(per_token["executor"]), 2),
        round(statistics.median(one.cpu["scheduler"] / one.seconds for one in found), 3),
        round(statistics.median(one.cpu["gateway"] / one.seconds for one in found), 3),
        round(statistics.median(busy), 3),
    )


def show(row: Row) -> None:
    print(
        f"{row.mode:<7}{row.gateways:>2} gateways {row.executors:>3} executors {row.streams:>4} streams each"
        f"{row.step_ms:>5.0f} ms/step{row.tokens_per_s:>8.0f} tokens/s ({row.of_offered:>4.0%} of offered)"
        f"{row.scheduler_us_per_token:>7.1f} + {row.gateway_us_per_token:>5.1f} + {row.executor_us_per_token:>5.1f}"
        f" µs CPU/token (scheduler {row.scheduler_cpu:>4.0%}, gateways {row.gateway_cpu:>4.0%}, executors), "
        f"machine {row.machine_busy:>4.0%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--executors", type=int, nargs="+", default=[1, 2, 4, 8, 64])
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--streams", type=int, default=16, help="per executor")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a simulated step")
    parser.add_argument(
        "--scheduler-core", type=int, help="core that the scheduler has for itself; all share all if omitted"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small and short: does everything run?")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    if args.smoke:
        args.executors, args.streams, args.step, args.seconds, args.windows = [1, 2], 4, 0.01, 1.5, 1
    setups = []
    for mode in args.modes:
        for gateways in [0] if mode == "wire" else args.gateways:
            setups += [
                Setup(mode, gateways, count, args.streams, args.step, args.scheduler_core) for count in args.executors
            ]
            setups += [] if args.smoke else [Setup(mode, gateways, *_TOO_MUCH, args.scheduler_core)]
    rows = []
    for setup in setups:
        rows.append(uvloop.run(measure(setup, args.seconds, args.windows)))
        show(rows[-1])
        if args.json:  # after each row, so that an interrupted run keeps its rows
            write_record(args.json, {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()

"""The cost of consoles: an update of each part for 16 executors, and serving with 0 and with 4 consoles open, in turns.

First the core alone: 16 schedulers whose pools are in use, cached and free by thirds, of which a part changes between
two updates. Then real processes with simulated executors: the scheduler's and the gateway's CPU time per second while
nothing else happens, and per token while streams run without an end. The consoles show different views, so that they
share little.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvloop
from pagewise_scheduler.core.console.block_map import MarkedBlocks, StateCells, cell_size, coloured_cells
from pagewise_scheduler.core.console.prefixes import executor_prefixes
from pagewise_scheduler.core.scheduling.scheduler import Scheduler

from benchmarks.processes import Cluster
from benchmarks.record import record_file, write_record
from benchmarks.streams.run import Load, Measured, Stream, measure, services

EXECUTORS = 16
VIEWS = ("", "executor=e0&cells=4096&colour=prefix", "executor=e1&first=100&count=1000&colour=request", "cells=4096")
"""The view of each of the four consoles."""


def filled(num_blocks: int) -> Scheduler:
    """A scheduler with a third of its blocks in use, a third cached, in prefixes of 64 blocks, and the rest free."""
    scheduler = Scheduler(num_blocks=num_blocks, block_size=16, max_num_seqs=256, max_num_batched_tokens=2048)
    kv = scheduler.kv
    for number in range(num_blocks // 3 * 2 // 64):
        table = kv.new_table()
        kv.grow(table, 64 * 16)
        tokens = number.to_bytes(4, "little") * 16
        kv.cache_full_blocks(table, 64 * 16, partial(_same, tokens))
        if number % 2:
            kv.free(table, None)
    return scheduler


def _same(tokens: bytes, start: int, stop: int) -> bytes:
    return tokens


def core_row(num_blocks: int, churn: float, rounds: int) -> dict[str, Any]:
    """Microseconds of one update of all executors. ``churn``: share of the blocks that change between two updates."""
    schedulers = [filled(num_blocks) for _ in range(EXECUTORS)]
    kept = [StateCells() for _ in schedulers]
    size = cell_size(num_blocks, 2048 // EXECUTORS)
    chance = random.Random(1)

    def maps() -> None:
        for scheduler, cells in zip(schedulers, kept, strict=True):
            pool = scheduler.kv.pool
            marked = MarkedBlocks(scheduler, pool, float("inf"))
            cells.update(pool, 0, num_blocks, size, marked)
            marked.counts(pool)

    def trees() -> None:
        for scheduler in schedulers:
            executor_prefixes("e", scheduler, 1, 4096 // EXECUTORS, tokens=False)

    def coloured() -> None:
        for colour in ("request", "prefix", "age", "tier"):
            pool = schedulers[0].kv.pool
            coloured_cells(schedulers[0], pool, colour, 0, num_blocks, cell_size(num_blocks, 2048))

    def changed() -> None:
        for scheduler in schedulers:
            states = scheduler.kv.pool.states
            for _ in range(int(churn * num_blocks) // 16):  # blocks that come and go are neighbours
                start = chance.randrange(num_blocks)
                states[start : start + 16] = bytes([chance.randrange(3)]) * len(states[start : start + 16])

    maps()
    times: dict[str, list[float]] = {"maps": [], "trees": [], "four_coloured_maps_of_one": []}
    for _ in range(rounds):
        changed()
        for name, update in zip(times, (maps, trees, coloured), strict=True):
            times[name].append(taken(update))
    return {"num_blocks": num_blocks, "changed": churn} | {
        f"{name}_us": round(1e6 * statistics.median(seconds)) for name, seconds in times.items()
    }


def taken(update: Callable[[], None]) -> float:
    """CPU seconds."""
    began = time.process_time()
    update()
    return time.process_time() - began


@asynccontextmanager
async def consoles(cluster: Cluster, number: int) -> AsyncIterator[list[int]]:
    """So many consoles that are open, and the bytes that each has received."""
    port = int(cluster.url.rsplit(":", 1)[1])
    received = [0] * number

    async def watch(index: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /console/stream?{VIEWS[index % len(VIEWS)]} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        while data := await reader.read(1 << 16):
            received[index] += len(data)

    tasks = [asyncio.create_task(watch(index)) for index in range(number)]
    try:
        if tasks:
            await asyncio.sleep(1.0)
        yield received
        assert all(received), "every console is told something"
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def idle_row(cluster: Cluster, number: int, seconds: float) -> dict[str, Any]:
    """CPU time of the processes while only consoles are served, as a share of one core."""
    kinds = {"scheduler": cluster.scheduler.pid, "gateway": cluster.gateways["gateway-0"].pid}
    processes = {kind: psutil.Process(pid) for kind, pid in kinds.items()}
    async with consoles(cluster, number) as received:
        before = {kind: sum(process.cpu_times()[:2]) for kind, process in processes.items()}
        bytes_before = sum(received)
        await asyncio.sleep(seconds)
        return {"consoles": number, "bytes_per_second": round((sum(received) - bytes_before) / seconds)} | {
            f"{kind}_core_percent": round(100 * (sum(process.cpu_times()[:2]) - before[kind]) / seconds, 2)
            for kind, process in processes.items()
        }


class Streams:
    """A load that does not end: whenever a stream has ended, the next one begins. They have from half to one and a half
    times ``tokens`` tokens, so that they do not end together: the cost of a token would vary with that."""

    def __init__(self, cluster: Cluster, number: int, tokens: int) -> None:
        self._port = int(cluster.url.rsplit(":", 1)[1])
        self._tokens = tokens
        self._measured = Measured()
        self._tasks = [asyncio.create_task(self._run(index, number)) for index in range(number)]

    async def _run(self, index: int, step: int) -> None:
        while True:
            tokens = self._tokens // 2 + 7919 * index % self._tokens
            make = partial(Stream, index, tokens, self._measured)
            transport, stream = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", self._port)
            try:
                stream.send()
                await stream.done
            finally:
                transport.close()
            assert not self._measured.errors, self._measured.errors[0]
            self._measured.first.clear()
            self._measured.gaps.clear()
            index += step

    async def close(self) -> None:
        """End all streams.

        Raises:
            AssertionError: one had failed.
        """
        failed = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in failed:
            task.result()


def cpu_seconds(pid: int) -> float:
    """The CPU time of the threads of a process so far, to the nanosecond: the times of psutil are multiples of 10
    ms."""
    return 1e-9 * sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))


async def window(cluster: Cluster, seconds: float) -> dict[str, float]:
    """The CPU time of tokens in the processes, during so many seconds of a lasting load."""
    pids = {"scheduler": cluster.scheduler.pid, "gateway": cluster.gateways["gateway-0"].pid}

    async def counted() -> tuple[float, float]:
        return await asyncio.to_thread(cluster.metric, "generation_tokens_total"), time.perf_counter()

    (tokens_before, began), before = await counted(), {kind: cpu_seconds(pid) for kind, pid in pids.items()}
    await asyncio.sleep(seconds)
    used = {kind: cpu_seconds(pid) - before[kind] for kind, pid in pids.items()}
    tokens, now = await counted()
    tokens -= tokens_before
    return {"tokens_per_second": tokens / (now - began)} | {
        f"{kind}_cpu_us_per_token": 1e6 * one / tokens for kind, one in used.items()
    }


async def pairs(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve one load without an end, and open and close four consoles meanwhile.

    A machine that others use too becomes faster and slower, for longer than a window takes. So each window with
    consoles is compared with the one without them beside it, and the result is the median of these ratios, with the
    interval that has it with 95% (of 2,000 resamples of the pairs).
    """
    rows: list[dict[int, dict[str, float]]] = []
    streams = Streams(cluster, arguments.streams, arguments.tokens)
    try:
        await asyncio.sleep(10 * arguments.settle)  # until they end at different times
        for turn in range(arguments.pairs):
            rows.append({})
            for number in (0, 4) if turn % 2 else (4, 0):
                async with consoles(cluster, number):
                    await asyncio.sleep(arguments.settle)
                    rows[-1][number] = await window(cluster, arguments.window)
    finally:
        await streams.close()
    names = rows[0][0]
    return {
        "streams": arguments.streams,
        "pairs": arguments.pairs,
        "window_seconds": arguments.window,
        "medians": [{"consoles": number} | median([row[number] for row in rows]) for number in (0, 4)],
        "ratio_of_4_to_0": {name: interval([row[4][name] / row[0][name] for row in rows]) for name in names},
    }


def interval(ratios: list[float]) -> dict[str, float]:
    """The median, and the interval that has it with 95%."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "median": round(statistics.median(ratios), 4),
        "from": round(medians[50], 4),
        "to": round(medians[-51], 4),
    }


def median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of rows of one number of consoles, by column."""
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


async def served(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rows that need processes, in turns without and with consoles."""
    load = Load([arguments.streams], 1, arguments.executors, arguments.tokens)
    idle: dict[int, list[dict[str, Any]]] = {0: [], 4: []}
    with services(load) as cluster:
        await measure(cluster, arguments.streams, arguments.tokens)  # warms everything up
        for turn in range(arguments.rounds):
            for number in (0, 4) if turn % 2 else (4, 0):
                idle[number].append(await idle_row(cluster, number, arguments.seconds))
        loaded = await pairs(cluster, arguments)
    return {
        "executors": arguments.executors,
        "idle": [median(rows) for rows in idle.values()],
        "loaded": loaded,
        "rounds": {"idle": idle},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--executors", type=int, default=EXECUTORS, help="simulated executors that serve")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement without load")
    parser.add_argument("--rounds", type=int, default=5, help="measurements without load")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of measurements under load")
    parser.add_argument("--window", type=float, default=2.5, help="seconds of each of these measurements")
    parser.add_argument("--settle", type=float, default=0.5, help="seconds before each of them")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--json", type=record_file, help="file for the numbers")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.blocks, arguments.executors, arguments.streams, arguments.tokens = [300], 2, 8, 20
        arguments.seconds, arguments.rounds, arguments.pairs, arguments.window = 1.2, 1, 2, 0.5
    core = [core_row(blocks, churn, 4 * arguments.rounds) for blocks in arguments.blocks for churn in (0.0, 0.01, 0.1)]
    for row in core:
        print(row, flush=True)
    numbers = {"core": core, "served": uvloop.run(served(arguments))}
    print(json.dumps(numbers["served"], indent=1))
    if arguments.json:
        write_record(arguments.json, numbers)


if __name__ == "__main__":
    main()

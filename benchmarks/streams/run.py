"""Many streams at once: where gateways and the scheduler saturate, and the cost of a token in each of them.

Starts a scheduler, gateways and several simulated executors (they invent tokens and take no time) on loopback, opens N
connections, asks for a stream on all of them at once, and reads. All processes share the cores of the machine, so CPU
time per token is a better measure than the throughput. Prints a table and, with ``--json``, writes the numbers.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.processes import Cluster
from benchmarks.record import record_file, write_record

CONNECTING = 200


@dataclass
class Load:
    """The load to request."""

    streams: list[int]
    gateways: int
    executors: int
    tokens: int
    rows: int = 4096
    step: float = 0.0


@dataclass
class Measured:
    """Times in seconds: ``first`` of each stream's first token, ``gaps`` between arrivals of its tokens."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Stream(asyncio.Protocol):
    """One connection that asks for one stream."""

    def __init__(self, number: int, tokens: int, measured: Measured) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number, self._tokens, self._measured = number, tokens, measured
        self._sent = self._last = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self) -> None:
        prompt = [2000 + self._number % 1000, 7 + self._number // 1000, *range(10, 40)]
        body = json.dumps(
            {
                "prompt": prompt,
                "max_tokens": self._tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        self._sent = time.perf_counter()
        self._transport.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._last:
            self._measured.first.append(now - self._sent)
            if not data.startswith(b"HTTP/1.1 200"):
                self._end(data[:200].decode(errors="replace"))
        else:
            self._measured.gaps.append(now - self._last)
        self._last = now
        self._tail = (self._tail + data)[-600:]
        if b"[DONE]" in self._tail and not self.done.done():
            whole = b'"completion_tokens":%d,' % self._tokens in self._tail
            self._end("" if whole else f"an answer without {self._tokens} tokens: {self._tail.decode()}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}")

    def _end(self, error: str) -> None:
        if not self.done.done():
            if error:
                self._measured.errors.append(error)
            self.done.set_result(None)


@contextlib.contextmanager
def services(load: Load) -> Iterator[Cluster]:
    """A scheduler, its gateways and its executors, ready."""
    quiet, rows = "--log-level=error", (f"--max-num-seqs={load.rows}", "--max-num-batched-tokens=16384")
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(
            Path(folder),
            gateways=load.gateways,
            scheduler_options=(*rows, "--max-waiting=100000", quiet),
            gateway_options=(quiet,),
            executor_options=(*rows, "--num-blocks=65536", quiet),
            simulate=load.step,
        )
        try:
            cluster.start()
            for number in range(load.executors):
                cluster.start_executor(f"e{number}")
            cluster.wait_ready(load.executors, 120.0)
            yield cluster
        finally:
            cluster.close()


@dataclass(frozen=True)
class Usage:
    """Of processes of one kind together: CPU seconds, and resident bytes."""

    cpu: float
    rss: int


def usage(processes: list[psutil.Process]) -> Usage:
    """CPU time and memory of processes so far."""
    times = [process.cpu_times() for process in processes]
    return Usage(sum(one.user + one.system for one in times), sum(one.memory_info().rss for one in processes))


async def measure(cluster: Cluster, number: int, tokens: int) -> dict[str, Any]:
    """Run ``number`` streams of ``tokens`` tokens each, all at once, in turn over the gateways."""
    loop, measured = asyncio.get_running_loop(), Measured()
    connecting = asyncio.Semaphore(CONNECTING)
    ports = [int(url.rsplit(":", 1)[1]) for url in cluster.urls.values()]
    kinds = {
        "scheduler": [psutil.Process(cluster.scheduler.pid)],
        "gateway": [psutil.Process(process.pid) for process in cluster.gateways.values()],
    }

    async def connect(index: int) -> Stream:
        async with connecting:
            port = ports[index % len(ports)]
            return (await loop.create_connection(lambda: Stream(index, tokens, measured), "127.0.0.1", port))[1]

    streams = await asyncio.gather(*(connect(index) for index in range(number)))
    before = {kind: usage(processes) for kind, processes in kinds.items()}
    began = time.perf_counter()
    for stream in streams:
        stream.send()
    most = {kind: one.rss for kind, one in before.items()}
    waiting = {stream.done for stream in streams}
    while waiting:
        _, waiting = await asyncio.wait(waiting, timeout=1.0)
        most = {kind: max(most[kind], usage(processes).rss) for kind, processes in kinds.items()}
    seconds = time.perf_counter() - began
    cpu = {kind: usage(processes).cpu - before[kind].cpu for kind, processes in kinds.items()}
    for stream in streams:
        stream._transport.close()
    produced = number * tokens
    row: dict[str, Any] = {
        "streams": number,
        "tokens_per_stream": tokens,
        "errors": len(measured.errors),
        "first_error": measured.errors[0] if measured.errors else None,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(produced / seconds),
        "first_token_ms": percentiles(measured.first),
        "gap_ms": percentiles(measured.gaps),
    }
    for kind in kinds:
        row |= {
            f"{kind}_cpu_us_per_token": round(cpu[kind] / produced * 1e6, 1),
            f"{kind}_cpu_share": round(cpu[kind] / seconds, 2),
            f"{kind}_rss_mb": round(most[kind] / 1e6),
        }
    return row


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [float("nan")]
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3, 1) for p in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--executors", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--step", type=float, default=0.0, help="seconds that a step of an executor takes (default: 0)")
    parser.add_argument("--smoke", action="store_true", help="a few streams, to see that it works")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    load = Load(args.streams, args.gateways, args.executors, args.tokens, step=args.step)
    if args.smoke:
        load = Load([20], 2, 2, 8, rows=64)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{'':>24}|{'scheduler':^24}|{'gateways together':^24}|")
    columns = f"{'µs/token':>10}{'cores':>7}{'MB':>7}|"
    print(
        f"{'streams':>8}{'errors':>7}{'tokens/s':>9}|{columns}{columns}{'first p50/p99 ms':>20}{'gap p50/p99 ms':>18}"
    )
    rows = []
    with services(load) as cluster:
        for number in load.streams:
            row = uvloop.run(measure(cluster, number, load.tokens))
            rows.append(row)
            used = "".join(
                f"{row[f'{kind}_cpu_us_per_token']:>10}{row[f'{kind}_cpu_share']:>7}{row[f'{kind}_rss_mb']:>7}|"
                for kind in ("scheduler", "gateway")
            )
            first, gap = row["first_token_ms"], row["gap_ms"]
            print(
                f"{number:>8}{row['errors']:>7}{row['tokens_per_second']:>9}|{used}"
                f"{first['p50']:>11} /{first['p99']:>7}{gap['p50']:>9} /{gap['p99']:>7}",
                flush=True,
            )
    if args.json:
        numbers = {"gateways": load.gateways, "executors": load.executors}
        write_record(args.json, {**numbers, "load_average_at_end": round(os.getloadavg()[0], 1), "rows": rows})
    if any(row["errors"] for row in rows):
        sys.exit(f"streams failed: {next(row['first_error'] for row in rows if row['errors'])}")


if __name__ == "__main__":
    main()

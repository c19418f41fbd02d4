"""Many streams at once through one scheduler: where its gateway saturates, and what a token costs it.

Starts a real scheduler and several simulated executors (they invent tokens and take no time) on loopback, opens N
connections, asks for a stream on all of them at once, and reads. All processes share the cores of the machine, so the
scheduler's CPU time per token says more than the throughput. Prints a table and, with ``--json``, writes the numbers.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.record import record_file, write_record

ROOT = Path(__file__).parents[2]
CONNECTING = 200


@dataclass
class Load:
    """What to ask for."""

    streams: list[int]
    executors: int
    tokens: int
    rows: int = 4096


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
def services(load: Load) -> Iterator[tuple[psutil.Process, int]]:
    """A scheduler and its executors, ready; yields the scheduler's process and its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    python, quiet = [sys.executable, "-m"], ["--log-level=error"]
    rows = [f"--max-num-seqs={load.rows}", "--max-num-batched-tokens=16384"]
    limits = ["--max-waiting=100000", *quiet]
    started: list[subprocess.Popen[str]] = []
    try:
        scheduler = subprocess.Popen(
            [*python, "pagewise_scheduler.main", "--port=0", f"--listen={endpoint}", *rows, *limits],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        started.append(scheduler)
        assert scheduler.stdout is not None
        port = int(scheduler.stdout.readline().strip().rsplit(":", 1)[1])
        executor = [*python, "pagewise_executor.main", "--simulate", f"--scheduler={endpoint}", *rows, *quiet]
        executor.append("--num-blocks=65536")
        started += [
            subprocess.Popen(
                [*executor, f"--executor-id=e{number}"],
                cwd=ROOT,
                text=True,
            )
            for number in range(load.executors)
        ]
        deadline = time.monotonic() + 120
        while ready(port) < load.executors:
            assert time.monotonic() < deadline, "the executors do not join"
            time.sleep(0.2)
        yield psutil.Process(scheduler.pid), port
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(started):
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def ready(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return int(json.loads(answer.read())["executors"])
    except urllib.error.HTTPError:
        return 0


async def measure(port: int, number: int, tokens: int, scheduler: psutil.Process) -> dict[str, Any]:
    """Run ``number`` streams of ``tokens`` tokens each, all at once."""
    loop, measured = asyncio.get_running_loop(), Measured()
    connecting = asyncio.Semaphore(CONNECTING)

    async def connect(index: int) -> Stream:
        async with connecting:
            return (await loop.create_connection(lambda: Stream(index, tokens, measured), "127.0.0.1", port))[1]

    streams = await asyncio.gather(*(connect(index) for index in range(number)))
    before = scheduler.cpu_times()
    began = time.perf_counter()
    for stream in streams:
        stream.send()
    most = scheduler.memory_info().rss
    waiting = {stream.done for stream in streams}
    while waiting:
        _, waiting = await asyncio.wait(waiting, timeout=1.0)
        most = max(most, scheduler.memory_info().rss)
    seconds = time.perf_counter() - began
    after = scheduler.cpu_times()
    for stream in streams:
        stream._transport.close()
    cpu = after.user + after.system - before.user - before.system
    produced = number * tokens
    return {
        "streams": number,
        "tokens_per_stream": tokens,
        "errors": len(measured.errors),
        "first_error": measured.errors[0] if measured.errors else None,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(produced / seconds),
        "scheduler_cpu_us_per_token": round(cpu / produced * 1e6, 1),
        "scheduler_cpu_share": round(cpu / seconds, 2),
        "scheduler_rss_mb": round(most / 1e6),
        "first_token_ms": percentiles(measured.first),
        "gap_ms": percentiles(measured.gaps),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [float("nan")]
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3, 1) for p in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--executors", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--smoke", action="store_true", help="a few streams, to see that it works")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    load = Load([20], 2, 8, rows=64) if args.smoke else Load(args.streams, args.executors, args.tokens)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{'streams':>8}{'errors':>8}{'tokens/s':>10}{'µs CPU/token':>14}{'cores':>7}{'RSS MB':>8}", end="")
    print(f"{'first token p50/p99 ms':>26}{'gap p50/p99 ms':>20}")
    rows = []
    with services(load) as (scheduler, port):
        for number in load.streams:
            row = uvloop.run(measure(port, number, load.tokens, scheduler))
            rows.append(row)
            first, gap = row["first_token_ms"], row["gap_ms"]
            print(
                f"{number:>8}{row['errors']:>8}{row['tokens_per_second']:>10}{row['scheduler_cpu_us_per_token']:>14}"
                f"{row['scheduler_cpu_share']:>7}{row['scheduler_rss_mb']:>8}"
                f"{first['p50']:>15} / {first['p99']:>8}{gap['p50']:>10} / {gap['p99']:>7}",
                flush=True,
            )
    if args.json:
        load_average = round(os.getloadavg()[0], 1)
        write_record(args.json, {"executors": load.executors, "load_average_at_end": load_average, "rows": rows})
    if any(row["errors"] for row in rows):
        sys.exit(f"streams failed: {next(row['first_error'] for row in rows if row['errors'])}")


if __name__ == "__main__":
    main()

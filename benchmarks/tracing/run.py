"""The cost of traces: CPU time of gateway and scheduler per request, with traces and without, in turns.

    python -m benchmarks.tracing.run [--before DIR] [--tree DIR] [--json FILE]

Executors are simulated, so that only the control plane is measured. CPU time, not the clock: other work on the machine
changes it less. ``--before``: a checkout of an earlier commit, which is measured in turns with this one or with the
checkout ``--tree``. A collector takes the spans and drops them, in a process of its own.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.processes import GATEWAY, SCHEDULER, Served, free_port, spawn
from benchmarks.record import record_file, write_record

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("", "shared", "kernels", "services/scheduler", "services/executor", "services/gateway", "services/cli")
CONCURRENT = 16
_TICKS = os.sysconf("SC_CLK_TCK")


class Discard(BaseHTTPRequestHandler):
    """Takes spans and forgets them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer as a collector does."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def commit_of(tree: Path) -> str:
    """The commit that a checkout is of."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


async def load(url: str, requests: int, max_tokens: int) -> None:
    """Send so many requests, a few at a time, and read their streams."""
    numbers = iter(range(requests))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            body = {"prompt": f"{number} def f(x):\n" * 8, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                await answer.read()

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(CONCURRENT)))


def measure(tree: Path, requests: int, max_tokens: int, *options: str) -> dict[str, float]:
    """CPU microseconds per request of a gateway and a scheduler of the code in ``tree``."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(tree / room) for room in ROOMS)
    try:
        server = Served("--simulate", "--no-profile", *options)
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    try:
        (gateway,), (scheduler,) = server.pids(GATEWAY), server.pids(SCHEDULER)
        asyncio.run(load(server.url, requests // 4, max_tokens))
        used = cpu_seconds(gateway), cpu_seconds(scheduler)
        began = time.monotonic()
        asyncio.run(load(server.url, requests, max_tokens))
        seconds = time.monotonic() - began
        time.sleep(1.0)  # the last spans are sent
        return {
            "gateway_us": (cpu_seconds(gateway) - used[0]) / requests * 1e6,
            "scheduler_us": (cpu_seconds(scheduler) - used[1]) / requests * 1e6,
            "tokens_per_second": requests * max_tokens / seconds,
        }
    finally:
        server.close()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    parser.add_argument("--requests", type=int, default=1600)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    parser.add_argument("--collect", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.collect:
        ThreadingHTTPServer(("127.0.0.1", args.collect), Discard).serve_forever()
    port = free_port()
    collector = spawn([sys.executable, "-m", "benchmarks.tracing.run", f"--collect={port}"], cwd=ROOT)
    cases: dict[str, tuple[Path, tuple[str, ...]]] = {"before": (args.before, ())} if args.before else {}
    cases |= {"off": (args.tree, ()), "on": (args.tree, (f"--otlp-traces-endpoint=http://127.0.0.1:{port}",))}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    try:
        for turn in range(args.turns):
            for name in cases if turn % 2 else reversed(cases):
                tree, options = cases[name]
                found[name].append(measure(tree, args.requests, args.max_tokens, *options))
    finally:
        collector.kill()
        collector.wait()
    rows: list[dict[str, Any]] = []
    for name, turns in found.items():
        row: dict[str, Any] = {"case": name, "commit": commit_of(cases[name][0])}
        for measured in turns[0]:
            row[measured] = round(statistics.median(turn[measured] for turn in turns), 1)
            if measured.endswith("_us"):
                row[f"{measured}_least"] = round(min(turn[measured] for turn in turns), 1)
            row[f"{measured}_all"] = [round(turn[measured], 1) for turn in turns]
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items() if not key.endswith("_all")), flush=True)
    if args.json:
        write_record(args.json, {"requests": args.requests, "max_tokens": args.max_tokens, "rows": rows})


if __name__ == "__main__":
    main()

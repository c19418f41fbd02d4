"""Prefill and decode apart by real processes: two CPU executors for both, beside one for each.

Long prompts that no executor has cached come at random times, and each is answered with some dozens of tokens. Both
clusters are up at once and take turns; every number is a median over the rounds. A round has prompts of its own, so
that none finds the cache of the one before.

    python -m benchmarks.roles.processes --json benchmarks/results/roles-cpu.json
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.processes import Cluster
from benchmarks.record import record_file, write_record

LAYOUTS = {"both": ("both", "both"), "1:1": ("prefill", "decode")}


@dataclass(frozen=True)
class Shape:
    """``requests`` of ``prompt`` tokens, so many a second, each answered with ``output`` tokens."""

    requests: int = 30
    per_second: float = 1.5
    prompt: int = 1024
    output: int = 64


def start(cluster: Cluster, roles: tuple[str, ...]) -> None:
    """The cluster with one executor for each role, which has measured the time of steps."""
    cluster.start()
    for number, role in enumerate(roles):
        cluster.start_executor(f"{role}-{number}", f"--role={role}", "--profile", "--num-blocks=4096")
    cluster.wait_ready(len(roles), 120.0)


async def one(http: aiohttp.ClientSession, url: str, shape: Shape, seed: str) -> list[float]:
    """When it was sent, and when each of its tokens came."""
    rng = random.Random(seed)
    body = {
        "prompt": [rng.randrange(10, 4000) for _ in range(shape.prompt)],
        "max_tokens": shape.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    times = [time.perf_counter()]
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    times += [time.perf_counter()] * len(choice.get("token_ids") or [])
    assert len(times) == 1 + shape.output
    return times


async def drive(url: str, shape: Shape, seed: int) -> list[list[float]]:
    """All requests, at times that are the same for every cluster."""
    rng = random.Random(seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        tasks = []
        for number in range(shape.requests):
            tasks.append(asyncio.create_task(one(http, url, shape, f"{seed} {number}")))
            await asyncio.sleep(rng.expovariate(shape.per_second))
        return await asyncio.gather(*tasks)


def measure(cluster: Cluster, shape: Shape, seed: int) -> dict[str, float]:
    moved = cluster.metric("request_moves_total", reason="decode")
    began = time.perf_counter()
    streams = asyncio.run(drive(cluster.url, shape, seed))
    seconds = time.perf_counter() - began
    first = sorted(times[1] - times[0] for times in streams)
    gaps = sorted(after - before for times in streams for before, after in pairwise(times[1:]))
    return {
        "ttft_p50": first[len(first) // 2],
        "ttft_p90": first[int(0.9 * len(first))],
        "gap_p50": gaps[len(gaps) // 2],
        "gap_p99": gaps[int(0.99 * len(gaps))],
        "gap_max": gaps[-1],
        "tokens_per_second": shape.requests * shape.output / seconds,
        "moved": (cluster.metric("request_moves_total", reason="decode") - moved) / shape.requests,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="one round of a few requests")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    shape, rounds = (Shape(requests=6), 1) if args.smoke else (Shape(), args.rounds)
    results: dict[str, list[dict[str, float]]] = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        clusters = {layout: Cluster(Path(folder) / layout.replace(":", "-")) for layout in LAYOUTS}
        try:
            for layout, roles in LAYOUTS.items():
                start(clusters[layout], roles)
                measure(clusters[layout], Shape(requests=6), -1)
            for number in range(rounds):
                for layout, cluster in clusters.items():
                    results[layout].append(measure(cluster, shape, number))
        finally:
            for cluster in clusters.values():
                cluster.close()
    rows: dict[str, dict[str, Any]] = {
        layout: {name: round(statistics.median(one[name] for one in each), 4) for name in each[0]}
        for layout, each in results.items()
    }
    print(f"{'':>6}{'TTFT p50':>10}{'p90':>8}{'gap p50':>10}{'p99':>8}{'max':>8}{'tokens/s':>10}{'moved':>7}")
    for layout, row in rows.items():
        gaps = f"{1e3 * row['gap_p50']:>7.1f} ms{1e3 * row['gap_p99']:>8.1f}{1e3 * row['gap_max']:>8.1f}"
        print(
            f"{layout:>6}{row['ttft_p50']:>10.3f}{row['ttft_p90']:>8.3f}{gaps}{row['tokens_per_second']:>10.1f}"
            f"{row['moved']:>7.0%}"
        )
    if args.json:
        settings = {"rounds": rounds, "shape": vars(shape)}
        write_record(args.json, {"settings": settings, "rows": rows, "rounds": results}, device="cpu")


if __name__ == "__main__":
    main()

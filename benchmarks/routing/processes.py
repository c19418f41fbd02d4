"""Routing by real processes: ``pagewise serve`` with four CPU executors, ``ttft`` beside ``round-robin`` in one run.

Sixteen groups of users, each group with a long system prompt of its own; sessions of several turns, each turn's prompt
being the conversation so far. Both servers are up at once and take turns; every number is a median over the rounds. A
round has prompts of its own, so that none finds the cache of the one before.

    python -m benchmarks.routing.processes --json benchmarks/results/routing-cpu.json
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.processes import Served
from benchmarks.record import record_file, write_record

POLICIES = ("ttft", "round-robin")


@dataclass(frozen=True)
class Shape:
    """Sessions: ``groups`` with a system prompt of ``system`` tokens each, ``sessions`` a group, ``turns`` a session.

    A turn adds ``user`` tokens and is answered with ``output``. ``at_once``: sessions that talk at a time.
    """

    groups: int = 16
    system: int = 768
    sessions: int = 4
    turns: int = 3
    user: int = 32
    output: int = 8
    at_once: int = 4


def start(policy: str, executors: int, num_blocks: int) -> Served:
    """``pagewise serve`` with one thread an executor, all of which have joined."""
    options = {"device": "cpu", "threads": 1, "executors": executors, "num-blocks": num_blocks, "routing": policy}
    server = Served(*(f"--{name}={value}" for name, value in options.items()), "--log-level=warning", ready_seconds=300)
    server.wait_for_metric("executors_ready", executors, 300.0)
    return server


def sums(server: Served) -> dict[str, float]:
    """Metrics summed over labels."""
    found: dict[str, float] = {}
    for sample in server.scrape():
        found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def session(
    http: aiohttp.ClientSession, url: str, prompt: list[int], shape: Shape, rng: random.Random
) -> list[float]:
    """Seconds to the first token of each turn."""
    seconds = []
    for _ in range(shape.turns):
        prompt = prompt + [rng.randrange(10, 4000) for _ in range(shape.user)]
        body = {
            "prompt": prompt,
            "max_tokens": shape.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        began, first = time.perf_counter(), 0.0
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - began
                    for choice in json.loads(line[6:])["choices"]:
                        prompt += choice.get("token_ids") or []
        seconds.append(first)
    return seconds


async def drive(url: str, shape: Shape, seed: int) -> list[list[float]]:
    """All sessions, the groups mixed, so many at once."""
    rng = random.Random(seed)
    systems = [[rng.randrange(10, 4000) for _ in range(shape.system)] for _ in range(shape.groups)]
    order = [group for group in range(shape.groups) for _ in range(shape.sessions)]
    rng.shuffle(order)
    turn = asyncio.Semaphore(shape.at_once)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

        async def one(number: int, group: int) -> list[float]:
            async with turn:
                return await session(http, url, systems[group], shape, random.Random(seed * 10_000 + number))

        return await asyncio.gather(*(one(number, group) for number, group in enumerate(order)))


def measure(server: Served, shape: Shape, seed: int) -> dict[str, float]:
    before, began = sums(server), time.perf_counter()
    sessions = asyncio.run(drive(server.url, shape, seed))
    seconds, after = time.perf_counter() - began, sums(server)
    first = sorted(itertools.chain.from_iterable(sessions))

    def grown(name: str) -> float:
        return after[name] - before[name]

    return {
        "hit_rate": grown("prefix_cache_hits_total") / grown("prefix_cache_queries_total"),
        "ttft_p50": first[len(first) // 2],
        "ttft_p90": first[int(0.9 * len(first))],
        "ttft_mean": statistics.mean(first),
        "seconds": seconds,
        "decision_us": 1e6 * grown("placement_decision_seconds_sum") / grown("placement_decision_seconds_count"),
        "actual_of_predicted": grown("placement_actual_ratio_sum") / grown("placement_actual_ratio_count"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executors", type=int, default=4)
    parser.add_argument("--num-blocks", type=int, default=512, help="of 16 tokens, for each executor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="one round of a few sessions on two executors")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    shape, executors, rounds = Shape(), args.executors, args.rounds
    if args.smoke:
        shape, executors, rounds = Shape(groups=3, sessions=2, turns=2, system=256), 2, 1
    results: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    servers: dict[str, Served] = {}
    try:
        for policy in POLICIES:
            servers[policy] = start(policy, executors, args.num_blocks)
        for number in range(rounds):
            for policy, server in servers.items():
                results[policy].append(measure(server, shape, number))
    finally:
        for server in servers.values():
            server.close()
    rows: dict[str, dict[str, Any]] = {
        policy: {name: round(statistics.median(one[name] for one in each), 4) for name in each[0]}
        for policy, each in results.items()
    }
    heads = f"{'hit rate':>10}{'TTFT p50':>10}{'p90':>8}{'mean':>8}{'round s':>9}{'actual/pred.':>14}{'decision':>11}"
    print(f"{'':>14}{heads}")
    for policy, row in rows.items():
        print(
            f"{policy:>14}{row['hit_rate']:>10.1%}{row['ttft_p50']:>10.3f}{row['ttft_p90']:>8.3f}{row['ttft_mean']:>8.3f}"
            f"{row['seconds']:>9.1f}{row['actual_of_predicted']:>14.2f}{row['decision_us']:>8.0f} µs"
        )
    if args.json:
        settings = {"executors": executors, "num_blocks": args.num_blocks, "rounds": rounds, "shape": vars(shape)}
        write_record(args.json, {"settings": settings, "rows": rows, "rounds": results}, device="cpu")


if __name__ == "__main__":
    main()

"""How well the time to the first token is predicted, by real processes, alone and beside processes that keep busy.

    python -m benchmarks.routing.predictions [--rounds 3] [--busy 0 2] [--requests 80] [--json FILE]

Each round starts ``pagewise serve`` anew (two CPU executors, the demo model), so that the measurement at the start is
judged, too. Clients send prompts of 64 to 1,024 tokens, half of which begin with one of four shared prefixes. For every
request the scheduler observes the actual time from its placement to its first token over the predicted one.
"""

import argparse
import asyncio
import random
import statistics
from dataclasses import asdict, dataclass
from math import inf

import aiohttp

from benchmarks.busy import busy_processes
from benchmarks.processes import Served, serving
from benchmarks.record import record_file, write_record
from benchmarks.scrape import Sample

OPTIONS = ("--device=cpu", "--threads=1", "--executors=2", "--num-blocks=1024", "--log-level=warning")
_RATIO = "placement_actual_ratio_bucket"
_AT_ONCE = 4


@dataclass(frozen=True)
class Round:
    """Quantiles of actual over predicted of ``requests`` requests beside ``busy`` busy processes."""

    busy: int
    requests: int
    p10: float
    median: float
    p90: float


def quantile(samples: list[Sample], share: float) -> float:
    """A quantile of a histogram: its samples by upper bound, linear between bounds."""
    counts: dict[float, float] = {}
    for sample in samples:
        if sample.name == _RATIO:
            bound = float(sample.labels.split('le="')[1].split('"')[0])
            counts[bound] = counts.get(bound, 0.0) + sample.value
    wanted, before, lower = share * counts[inf], 0.0, 0.0
    for bound in sorted(counts):
        if counts[bound] >= wanted:
            return lower + (bound - lower) * (wanted - before) / (counts[bound] - before) if bound < inf else lower
        before, lower = counts[bound], bound
    return lower


async def send(server: Served, requests: int, seed: int) -> None:
    """The requests, a few at a time."""
    rng = random.Random(seed)
    shared = [[rng.randrange(300, 4000) for _ in range(512)] for _ in range(4)]
    waiting = [
        (shared[number % 4] if number % 2 else [])
        + [rng.randrange(300, 4000) for _ in range(rng.choice((64, 128, 256, 512)))]
        for number in range(requests)
    ]

    async def client(session: aiohttp.ClientSession) -> None:
        while waiting:
            body = {"prompt": waiting.pop(), "max_tokens": 16, "ignore_eos": True, "temperature": 0}
            async with session.post(f"{server.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session, asyncio.TaskGroup() as tasks:
        for _ in range(_AT_ONCE):
            tasks.create_task(client(session))


def one_round(busy: int, requests: int, seed: int) -> Round:
    """Start, send, read the histogram."""
    with busy_processes(busy), serving(*OPTIONS, ready_seconds=300) as server:
        server.wait_for_metric("executors_ready", 2, 120)
        asyncio.run(send(server, requests, seed))
        samples = server.scrape()
    return Round(busy, requests, *(round(quantile(samples, share), 2) for share in (0.1, 0.5, 0.9)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2], help="numbers of busy processes")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    rounds = []
    for seed in range(args.rounds):
        for busy in args.busy:
            rounds.append(one_round(busy, args.requests, seed))
            print(rounds[-1], flush=True)
    for busy in args.busy:
        medians = [one.median for one in rounds if one.busy == busy]
        print(f"beside {busy} busy processes: median of actual / predicted {statistics.median(medians):.2f}")
    if args.json:
        write_record(args.json, {"options": OPTIONS, "rounds": [asdict(one) for one in rounds]})


if __name__ == "__main__":
    main()

"""What it costs a gateway to look for text that prompts repeat.

First the search alone, in this process: prompts that are new, and prompts that repeat others at another offset, beside
tokenizing a text of as many tokens. Then two real gateways for the same kind of requests in turns: one as it is, and
one that does not search. The executor behind them invents its tokens. All times are CPU time. Prints tables and, with
``--json``, writes the numbers.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pagewise_gateway.link.repeat_watch import REMEMBERED_KEYS
from pagewise_gateway.repeats.finder import RepeatFinder
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.model_files import resolve_model

from benchmarks.processes import Cluster, Process, answers, wait_until
from benchmarks.record import record_file, write_record

ROOT = Path(__file__).resolve().parents[2]
ALONE = (64, 256, 1024, 4096, 16_384, 131_072, 1_048_576)
SERVED = (64, 256, 1024, 4096, 8000)
VOCABULARY = 2048
"""Token ids are below it; the demo model has a few more."""


def ids(rng: random.Random, length: int) -> "array[int]":
    return array("i", rng.choices(range(VOCABULARY), k=length))


def steps_of(finder: RepeatFinder, tokens: "array[int]") -> list[float]:
    """CPU seconds of each step of a search."""
    steps = finder.examining(tokens, "key:somebody")
    times: list[float] = []
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except StopIteration:
            return [*times, time.thread_time() - began]
        times.append(time.thread_time() - began)


def search_alone(lengths: tuple[int, ...], rounds: int) -> Iterator[dict[str, Any]]:
    rng, finder = random.Random(0), RepeatFinder(REMEMBERED_KEYS)
    tokenizer = Tokenizer.load(resolve_model("pagewise-demo"))
    words = [word for path in sorted(ROOT.glob("docs/*.md")) for word in path.read_text(encoding="utf-8").split()]
    for length in lengths:
        new: list[float] = []
        seen: list[float] = []
        steps, tokenizing = [], []
        for _ in range(max(3, min(rounds, 4_000_000 // length))):
            tokens = ids(rng, length)
            for one, times in ((tokens, new), (array("i", [1]) + tokens, seen)):
                taken = steps_of(finder, one)
                times.append(sum(taken))
                steps.append(max(taken))
            text = tokenizer.decode(tokenizer.encode(" ".join(rng.choices(words, k=length)))[:length])
            began = time.thread_time()
            tokenizer.encode(text)
            tokenizing.append(time.thread_time() - began)
        medians = (statistics.median(times) * 1e6 for times in (new, seen, steps, tokenizing))
        names = ("new_us", "repeated_us", "longest_step_us", "tokenizing_us")
        yield {"tokens": length} | {name: round(value, 1) for name, value in zip(names, medians, strict=True)}


@contextmanager
def gateways() -> Iterator[dict[str, tuple[Process, str]]]:
    """A gateway as it is, and one that does not search, by name, with their addresses."""
    quiet = "--log-level=error"
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(
            Path(folder),
            gateways=2,
            scheduler_options=("--max-num-batched-tokens=16384", quiet),
            gateway_options=(quiet,),
            executor_options=("--max-num-batched-tokens=16384", "--num-blocks=65536", quiet),
            simulate=0.0,
        )
        url = cluster.urls["gateway-1"]
        port = url.rsplit(":", 1)[1]
        options = [f"--port={port}", f"--scheduler={cluster.gateway_endpoint}", "--gateway-id=without", quiet]
        try:
            cluster.start_scheduler()
            searching = cluster.start_gateway("gateway-0")
            command = [sys.executable, "-m", "benchmarks.repeats.without", "pagewise-demo", *options]
            without = cluster.gateways["gateway-1"] = Process("without", command, cluster.folder)
            wait_until(lambda: answers(f"{url}/version"), 60.0, "the gateway answers", without)
            cluster.start_executor("e0")
            cluster.wait_ready(1)
            yield {"searching": (searching, cluster.url), "without": (without, url)}
        finally:
            cluster.close()


def cpu_seconds(process: Process) -> float:
    """CPU time of all threads of a process, to the nanosecond; ``/proc/PID/stat`` has ticks of 10 ms."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{process.pid}/task").glob("*/schedstat")) / 1e9


def served(lengths: tuple[int, ...], rounds: int, requests: int, output: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(1)
    words = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split()
    tokenizer = Tokenizer.load(resolve_model("pagewise-demo"))

    def text(length: int) -> str:
        return tokenizer.decode(tokenizer.encode(" ".join(rng.choices(words, k=length)))[:length])

    kinds: dict[str, Callable[[int], object]] = {"ids": lambda length: list(ids(rng, length)), "text": text}
    with gateways() as both:
        connections = {
            name: http.client.HTTPConnection(urlsplit(url).netloc, timeout=60) for name, (_, url) in both.items()
        }
        for kind, make in kinds.items():
            for length in lengths:
                taken: dict[str, list[float]] = {name: [] for name in both}
                for number in range(rounds + 1):
                    for name, (process, _) in both.items():
                        bodies = [
                            json.dumps({"prompt": make(length), "max_tokens": output, "ignore_eos": True})
                            for _ in range(requests)
                        ]
                        before = cpu_seconds(process)
                        for body in bodies:
                            complete(connections[name], body)
                        if number:  # the first round warms up
                            taken[name].append((cpu_seconds(process) - before) / requests)
                cpu = {name: statistics.median(times) * 1e6 for name, times in taken.items()}
                yield {
                    "prompt": kind,
                    "tokens": length,
                    "output_tokens": output,
                    "without_us": round(cpu["without"], 1),
                    "searching_us": round(cpu["searching"], 1),
                    "share": round(cpu["searching"] / cpu["without"] - 1, 4),
                }


def complete(connection: http.client.HTTPConnection, body: str) -> None:
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        sys.exit(f"a request failed: {answer.decode()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=40, help="requests of a round to each gateway")
    parser.add_argument("--output", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--smoke", action="store_true", help="a few requests, to see that it works")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    rounds, requests = (1, 2) if args.smoke else (args.rounds, args.requests)
    print(f"{'tokens':>9}{'new µs':>10}{'repeated µs':>13}{'longest step µs':>17}{'tokenizing µs':>15}")
    alone = []
    for row in search_alone(ALONE[:3] if args.smoke else ALONE, 4 * rounds):
        alone.append(row)
        print(
            f"{row['tokens']:>9}{row['new_us']:>10}{row['repeated_us']:>13}{row['longest_step_us']:>17}"
            f"{row['tokenizing_us']:>15}",
            flush=True,
        )
    print(f"\n{'prompt':>9}{'tokens':>9}{'without µs':>13}{'searching µs':>14}{'more':>9}")
    rows = []
    for row in served(SERVED[:2] if args.smoke else SERVED, rounds, requests, args.output):
        rows.append(row)
        print(
            f"{row['prompt']:>9}{row['tokens']:>9}{row['without_us']:>13}{row['searching_us']:>14}{row['share']:>9.1%}",
            flush=True,
        )
    if args.json:
        load = round(os.getloadavg()[0], 1)
        write_record(args.json, {"load_average_at_end": load, "alone": alone, "served": rows})


if __name__ == "__main__":
    main()

"""The cost of a gateway's search for text that prompts repeat.

First the search alone, in this process: prompts that are new, and prompts that repeat others at another offset, beside
tokenizing a text of as many tokens. Then a real gateway, which answers one request after the other, with an executor
behind it that invents its tokens: the CPU time of the gateway for each request, and the search's share. Prints tables
and, with ``--json``, writes the numbers.
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
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pagewise_gateway.repeats import BATCH_SECONDS, PAUSE, REMEMBERED_KEYS, WAIT_SECONDS, RepeatFinder
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.model_files import resolve_model

from benchmarks.processes import Cluster, Process, answers, wait_until
from benchmarks.record import record_file, write_record
from benchmarks.repeats.timed import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
ALONE = (64, 256, 1024, 4096, 16_384, 131_072, 1_048_576)
SERVED = (256, 1024, 4096, 8000)
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


class Timed(NamedTuple):
    """A gateway that measures its search."""

    process: Process
    url: str
    search_time: Path

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time of all its threads, and of the search alone. ``/proc/PID/stat`` has ticks of 10 ms only."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        everything = sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
        return everything, float(self.search_time.read_text() or 0.0)

    def idle(self) -> tuple[float, float]:
        """The same, once all waiting prompts have been searched."""
        before, now = -1.0, self.cpu_seconds()
        while now[1] != before:
            before = now[1]
            time.sleep(WAIT_SECONDS + 2 * PAUSE * BATCH_SECONDS)
            now = self.cpu_seconds()
        return now


@contextmanager
def gateway() -> Iterator[Timed]:
    quiet = "--log-level=error"
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(
            Path(folder),
            scheduler_options=("--max-num-batched-tokens=16384", quiet),
            executor_options=("--max-num-batched-tokens=16384", "--num-blocks=65536", quiet),
            simulate=0.0,
        )
        file = Path(folder) / "search-time"
        options = [f"--port={urlsplit(cluster.url).port}", f"--scheduler={cluster.gateway_endpoint}", quiet]
        command = [sys.executable, "-m", "benchmarks.repeats.timed", "pagewise-demo", *options]
        try:
            cluster.start_scheduler()
            process = Process("gateway", command, cluster.folder, {VARIABLE: str(file)})
            cluster.gateways["gateway-0"] = process
            wait_until(lambda: answers(f"{cluster.url}/version"), 60.0, "the gateway answers", process)
            cluster.start_executor("e0")
            cluster.wait_ready(1)
            yield Timed(process, cluster.url, file)
        finally:
            cluster.close()


def served(lengths: tuple[int, ...], rounds: int, requests: int, output: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(1)
    words = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split()
    tokenizer = Tokenizer.load(resolve_model("pagewise-demo"))

    def text(length: int) -> str:
        return tokenizer.decode(tokenizer.encode(" ".join(rng.choices(words, k=length)))[:length])

    kinds: dict[str, Callable[[int], object]] = {"ids": lambda length: list(ids(rng, length)), "text": text}
    with gateway() as timed:
        connection = http.client.HTTPConnection(urlsplit(timed.url).netloc, timeout=60)
        for kind, make in kinds.items():
            for length in lengths:
                taken: list[tuple[float, float]] = []
                for _ in range(rounds + 1):
                    bodies = [
                        json.dumps({"prompt": make(length), "max_tokens": output, "ignore_eos": True})
                        for _ in range(requests)
                    ]
                    before = timed.cpu_seconds()
                    for body in bodies:
                        complete(connection, body)
                    after = timed.idle()
                    taken.append((after[0] - before[0], after[1] - before[1]))
                del taken[0]  # which warmed up
                cpu, search = (statistics.median(times) / requests for times in zip(*taken, strict=True))
                yield {
                    "prompt": kind,
                    "tokens": length,
                    "output_tokens": output,
                    "gateway_us": round(cpu * 1e6, 1),
                    "search_us": round(search * 1e6, 1),
                    "share": round(search / cpu, 4),
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
    parser.add_argument("--requests", type=int, default=40, help="requests of a round")
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
    print(f"\n{'prompt':>9}{'tokens':>9}{'gateway µs':>13}{'of it search µs':>17}{'share':>9}")
    rows = []
    for row in served(SERVED[:1] if args.smoke else SERVED, rounds, requests, args.output):
        rows.append(row)
        print(
            f"{row['prompt']:>9}{row['tokens']:>9}{row['gateway_us']:>13}{row['search_us']:>17}{row['share']:>9.1%}",
            flush=True,
        )
    if args.json:
        load = round(os.getloadavg()[0], 1)
        write_record(args.json, {"load_average_at_end": load, "alone": alone, "served": rows})


if __name__ == "__main__":
    main()

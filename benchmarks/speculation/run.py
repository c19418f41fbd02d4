"""The gain by speculation with prompt lookup: tokens per step, and tokens per second at few concurrent requests.

Two services with real processes, one that drafts and one that does not, get the same requests in turns. The executors
compute the model, but draw the tokens of given texts (``executor.py``): code that is rewritten or edited, code and
prose that go on, and random tokens. ``own`` are texts that the model writes itself, greedily. Outputs of both services
have to be equal. Prints a table and, with ``--json``, writes the numbers.

With ``--head``, a draft model makes the drafts: an EAGLE-3 head in a folder, or one with random weights. Drafts are
drawn like tokens. So drafts of given texts are always right, which is the bound for any head, and drafts of ``own`` are
the head's.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.model_files import resolve_model
from tqdm import tqdm

from benchmarks.processes import Cluster, Process
from benchmarks.record import record_file, shown, write_record
from benchmarks.scrape import scrape, total
from benchmarks.serving.workloads import build_model
from benchmarks.speculation.executor import VARIABLE
from benchmarks.speculation.heads import build_random_head
from benchmarks.speculation.texts import KINDS, MODULES, Text, Texts

DEMO, RANDOM_49M, RANDOM_HEAD = "pagewise-demo", "49M", "random"
OWN = "own"


class Counted(NamedTuple):
    """The counts of a service so far, and the CPU seconds that its processes have used."""

    tokens: float
    steps: float
    drafts: float
    drafted: float
    accepted: float
    cpu: float

    def since(self, before: "Counted") -> "Counted":
        return Counted(*(now - then for now, then in zip(self, before, strict=True)))


class Service:
    """A scheduler, a gateway and an executor that draws texts."""

    def __init__(self, folder: Path, model: str, texts: Path, options: list[str], threads: int | None) -> None:
        quiet = "--log-level=warning"
        self.cluster = Cluster(
            folder, model=model, scheduler_options=(quiet, *options), gateway_options=(quiet,), executor_options=()
        )
        self.cluster.start()
        used = [f"--threads={threads}"] if threads else []
        command = [sys.executable, "-m", "benchmarks.speculation.executor", model, *used, "--num-blocks=2048"]
        command += [f"--scheduler={self.cluster.endpoint}", "--executor-id=e0", "--no-profile", *options]
        self.cluster.executors.append(Process("executor", command, folder, {VARIABLE: str(texts)}))
        self.cluster.wait_ready(1, 120.0)
        started = (self.cluster.scheduler, *self.cluster.gateways.values(), *self.cluster.executors)
        self._processes = [psutil.Process(process.pid) for process in started]

    def counted(self) -> Counted:
        times = [process.cpu_times() for process in self._processes]
        samples = scrape(self.cluster.url)
        names = ("generation_tokens_total", "iteration_tokens_count", "spec_decode_num_drafts_total")
        further = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
        counts = [total(samples, name) for name in (*names, *further)]
        return Counted._make([*counts, sum(one.user + one.system for one in times)])


async def ask(service: Service, bodies: list[dict[str, Any]], concurrent: int) -> tuple[float, list[str]]:
    """Send all requests, so many at a time; returns the seconds that it took, and the answers."""
    turns = asyncio.Semaphore(concurrent)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def one(body: dict[str, Any]) -> str:
            async with turns, session.post(f"{service.cluster.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                (choice,) = (await answer.json())["choices"]
                return str(choice["text"])

        began = time.perf_counter()
        answers = await asyncio.gather(*map(one, bodies))
        return time.perf_counter() - began, answers


def body_of(text: Text, number: int, kind: str) -> dict[str, Any]:
    drawn = {"temperature": 0} if kind == OWN else {"temperature": 1, "seed": number}
    # Nothing is found in the prefix cache: the first token of each prompt is its own.
    prompt = [10 + number % 4000, *text.prompt[1:]]
    return {"prompt": prompt, "max_tokens": len(text.output), "ignore_eos": True, **drawn}


@contextlib.contextmanager
def services(args: argparse.Namespace, model: str, texts: list[Text]) -> Iterator[dict[str, Service]]:
    """One service without drafts and one with them."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        path = model
        if model == RANDOM_49M:
            path = str(folder / "model")
            build_model(Path(path))
        file = folder / "texts.json"
        file.write_text(json.dumps([[*text.prompt, *text.output] for text in texts]))
        found, config = {}, args.config
        if args.head is not None:
            head = folder / "head"
            if args.head == RANDOM_HEAD:
                settings = json.loads((resolve_model(path) / "config.json").read_text())
                build_random_head(head, settings, vocabulary=1024)
            else:
                head = Path(args.head)
            config = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": args.tokens})
        for mode, options in (("off", []), ("on", [f"--speculative-config={config}"])):
            found[mode] = service = Service(folder / mode, path, file, options, args.threads)
            stack.callback(service.cluster.close)
        yield found


def measure(args: argparse.Namespace, model: str) -> Iterator[dict[str, Any]]:
    maker = Texts(Tokenizer.load(resolve_model(DEMO if model == RANDOM_49M else model)), args.output, args.modules)
    kinds = [kind for kind in args.kinds if kind != OWN or model != RANDOM_49M]
    cases = [
        (kind, concurrent, number) for number in range(args.rounds) for kind in kinds for concurrent in args.concurrent
    ]
    texts: list[Text] = []
    bodies: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for case in cases:
        kind, concurrent, _ = case
        bodies[case] = []
        for _ in range(max(args.requests, concurrent)):
            text = maker.make("completion" if kind == OWN else kind, len(texts))
            bodies[case].append(body_of(text, len(texts), kind))
            texts.append(text)
    taken: dict[tuple[str, int, str], list[tuple[float, Counted]]] = defaultdict(list)
    with services(args, model, texts) as both:
        for service in both.values():  # the first one compiles and allocates
            asyncio.run(ask(service, bodies[cases[0]], 1))
        for case in tqdm(cases, desc=f"measuring {model}", unit=" cases", disable=None):
            kind, concurrent, number = case
            answers = {}
            for mode in ("off", "on") if number % 2 else ("on", "off"):
                service = both[mode]
                before = service.counted()
                seconds, answers[mode] = asyncio.run(ask(service, bodies[case], concurrent))
                taken[kind, concurrent, mode].append((seconds, service.counted().since(before)))
            if answers["on"] != answers["off"]:
                sys.exit(f"drafts have changed an output of {kind}")
    for kind in kinds:
        for concurrent in args.concurrent:
            yield row_of(model, kind, concurrent, {mode: taken[kind, concurrent, mode] for mode in ("off", "on")})


def row_of(model: str, kind: str, concurrent: int, taken: dict[str, list[tuple[float, Counted]]]) -> dict[str, Any]:
    speeds = {mode: [counted.tokens / seconds for seconds, counted in runs] for mode, runs in taken.items()}
    drafted = [counted for _, counted in taken["on"]]
    tokens, accepted = sum(one.tokens for one in drafted), sum(one.accepted for one in drafted)
    per_cpu = {mode: [counted.tokens / counted.cpu for _, counted in runs] for mode, runs in taken.items()}
    ratios, cpu_ratios = (
        [round(on / off, 2) for on, off in zip(each["on"], each["off"], strict=True)] for each in (speeds, per_cpu)
    )
    return {
        "model": Path(model).name,
        "text": kind,
        "concurrent": concurrent,
        # Of one sequence in one step: each gives one token, and the tokens of its draft that were right.
        "tokens_per_step": round(tokens / (tokens - accepted), 2),
        "accepted_share": round(accepted / max(1.0, sum(one.drafted for one in drafted)), 2),
        "drafted_share_of_steps": round(sum(one.drafts for one in drafted) / (tokens - accepted), 2),
        "tokens_per_s_off": round(statistics.median(speeds["off"]), 1),
        "tokens_per_s_on": round(statistics.median(speeds["on"]), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": ratios,
        "tokens_per_cpu_s_off": round(statistics.median(per_cpu["off"]), 1),
        "tokens_per_cpu_s_on": round(statistics.median(per_cpu["on"]), 1),
        "cpu_ratio": round(statistics.median(cpu_ratios), 2),
        "cpu_ratios": cpu_ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default='{"num_speculative_tokens": 4, "disable_by_batch_size": 8}')
    parser.add_argument("--head", help=f"draft by an EAGLE-3 head: its folder, or {RANDOM_HEAD}")
    parser.add_argument("--tokens", type=int, default=3, help="of a draft of the head, at most")
    parser.add_argument("--models", nargs="+", default=[DEMO, RANDOM_49M], help=f"{RANDOM_49M} is a random Llama")
    parser.add_argument("--modules", nargs="+", default=MODULES, help="of the standard library, for all code")
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, OWN), default=[*KINDS, OWN])
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=4, help="of a round, or as many as are concurrent")
    parser.add_argument("--output", type=int, default=200, help="tokens of each answer, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of each executor (default: its own choice)")
    parser.add_argument("--smoke", action="store_true", help="a few requests, to see that it works")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    if args.smoke:
        args.models, args.kinds, args.concurrent = [DEMO], ["rewriting", "random"], [2]
        args.requests, args.output, args.rounds = 2, 40, 1
    print(
        f"{'model':>14}{'text':>12}{'at once':>9}{'tokens/step':>13}{'accepted':>10} {'off':>8}{'on':>9}"
        f"{'on/off':>8}{'per CPU s':>11}"
    )
    rows = []
    for model in args.models:
        for row in measure(args, model):
            rows.append(row)
            print(
                f"{row['model']:>14}{row['text']:>12}{row['concurrent']:>9}{row['tokens_per_step']:>13}"
                f"{row['accepted_share']:>10}{row['tokens_per_s_off']:>9}{row['tokens_per_s_on']:>9}{row['ratio']:>8}"
                f"{row['cpu_ratio']:>11}",
                flush=True,
            )
    if args.json:
        load = round(os.getloadavg()[0], 1)
        write_record(args.json, {"config": shown(args.head or args.config), "load_average_at_end": load, "rows": rows})


if __name__ == "__main__":
    main()

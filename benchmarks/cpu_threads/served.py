"""The same question over HTTP: `pagewise serve` alone, and beside a process that keeps a core busy.

    python -m benchmarks.cpu_threads.served

Here an executor also shares the cores with the other processes of `pagewise serve` and with the client. libgomp spins
300,000 times by default, which is some milliseconds.
"""

import argparse
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cpu_threads.run import VARIABLES, busy_process, go_first
from benchmarks.record import record_file, write_record
from benchmarks.serving.clients import percentile
from benchmarks.serving.contenders import Pagewise
from benchmarks.serving.workloads import Work, build_model

REQUESTS, PROMPT = 16, 64


def start(model: str, variables: dict[str, str], first: bool) -> Pagewise:
    """`pagewise serve` with these variables in its environment."""
    kept = dict(os.environ)
    try:
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(variables)
        server = Pagewise(model, "cpu", "float32")
    finally:
        os.environ.clear()
        os.environ.update(kept)
    if first:
        root = psutil.Process(server.process.pid)
        for process in (root, *root.children(recursive=True)):
            for thread in process.threads():
                go_first(process.pid, thread.id)
    return server


def measure(server: Pagewise, works: list[Work], number: int) -> dict[str, float]:
    taken = server.round(works, None, number)
    tokens = sum(work.output for work in works)
    assert taken.cpu_seconds is not None
    return {
        "tokens_per_s": round(tokens / taken.seconds, 1),
        "tokens_per_cpu_s": round(tokens / taken.cpu_seconds, 1),
        "first_token_ms_p50": round(1e3 * percentile(taken.first_token, 0.5), 1),
        "between_tokens_ms_p99": round(1e3 * percentile(taken.between_tokens, 0.99), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="that each request generates")
    parser.add_argument("--spins", type=int, nargs="+", default=[300_000, 0, 1000, 5000])
    parser.add_argument("--first", action="store_true", help="run at the highest priority, before other processes")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    rng = random.Random(0)
    works = [Work([rng.randrange(10, 4000) for _ in range(PROMPT)], args.tokens) for _ in range(REQUESTS)]
    runs: list[dict[str, Any]] = []
    servers: dict[int, Pagewise] = {}
    if args.first:
        go_first()
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder))
        try:
            for spins in args.spins:
                servers[spins] = start(folder, {"GOMP_SPINCOUNT": str(spins)}, args.first)
            for number in range(args.rounds):
                for beside in ("nothing", "a busy process"):
                    other: subprocess.Popen[bytes] | None = busy_process(args.first) if beside != "nothing" else None
                    time.sleep(0.2)
                    for spins, server in servers.items():
                        row = {"spins": spins, "beside": beside, "number": number}
                        runs.append(row | measure(server, works, number))
                    if other is not None:
                        other.kill()
                        other.wait()
        finally:
            for server in servers.values():
                server.close()
    cases: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        cases[run["spins"], run["beside"]].append(run)
    rows = []
    for (spins, beside), members in cases.items():
        names = [name for name in members[0] if name.endswith(("_s", "_p50", "_p99"))]
        medians = {name: round(statistics.median(run[name] for run in members), 1) for name in names}
        rows.append({"spins": spins, "beside": beside, **medians})
        print(rows[-1], flush=True)
    if args.json:
        write_record(args.json, {"rows": rows, "runs": runs})


if __name__ == "__main__":
    main()

"""How long ``make serve`` takes to its first token, the CPU time of each process until then, and their memory when
idle.

    python -m benchmarks.start.run [--rounds 3] [--beside CHECKOUT] [--json FILE]

Runs ``make serve`` (everything installed already) on the demo model, sends the request that its curl line shows as soon
as the server reports that it serves, and stops the clock at the first token. It reads the CPU time of the scheduler,
the gateway, the executor, and ``pagewise serve`` itself when the server is ready, and their resident memory a second
later. ``--beside``: another checkout, such as one of the commit before, whose starts take turns with the starts of this
one.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.processes import EXECUTOR, GATEWAY, SCHEDULER
from benchmarks.record import record_file, write_record

ROOT = Path(__file__).parents[2]


SIGNS = {"scheduler": SCHEDULER, "gateway": GATEWAY, "serve": "serve", "executor": EXECUTOR}
"""A word in the command line of each process."""


def one_start(checkout: Path) -> dict[str, float]:
    """Seconds from the command to ready and to the first token, CPU seconds and resident MB of the processes."""
    began = time.perf_counter()
    process = subprocess.Popen(
        ["make", "--no-print-directory", "serve", "ARGS=--port 0 --log-level warning"],
        cwd=checkout, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = next(line.split(" at ")[1].split(" ")[0] for line in process.stdout if line.startswith("Serving "))
        ready = time.perf_counter() - began
        cpu = of_processes(process.pid, "cpu_s", lambda one: sum(one.cpu_times()[:2]))
        body = {"prompt": "def fibonacci(n):", "max_tokens": 16, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    break
            first = time.perf_counter() - began
        time.sleep(1)
        memory = of_processes(process.pid, "mb", lambda one: float(one.memory_info().rss) / 1e6)
        without_torch = sum(memory.values()) - memory["executor_mb"]
        return {"ready_s": ready, "first_token_s": first} | cpu | memory | {"without_torch_mb": without_torch}
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=30)


def of_processes(pid: int, unit: str, measure: Callable[[psutil.Process], float]) -> dict[str, float]:
    """The results of ``measure`` for each process below ``pid``, as ``scheduler_unit`` and so on."""
    found = {f"{name}_{unit}": 0.0 for name in SIGNS}
    for process in (one := psutil.Process(pid), *one.children(recursive=True)):
        words = process.cmdline()
        for name, sign in SIGNS.items():
            if sign in words and "make" not in Path(words[0]).name:
                found[f"{name}_{unit}"] += measure(process)
    return found


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of each number."""
    return {key: round(statistics.median(one[key] for one in rounds), 2) for key in rounds[0]}


def show(title: str, medians: dict[str, float]) -> None:
    print(f"{title}: ready after {medians['ready_s']} s, first token after {medians['first_token_s']} s")
    for unit, what in (("cpu_s", "CPU seconds until ready"), ("mb", "idle, MB resident")):
        print(f"  {what}: " + ", ".join(f"{name} {medians[f'{name}_{unit}']:.4g}" for name in SIGNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="another checkout, with everything installed, which takes turns")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    rounds, others = [], []
    for _ in range(args.rounds):
        rounds.append(one_start(ROOT))
        if args.beside is not None:
            others.append(one_start(args.beside))
    numbers: dict[str, object] = {"medians": summary(rounds), "rounds": rounds}
    show("make serve, installed", summary(rounds))
    if others:
        numbers |= {"beside": {"medians": summary(others), "rounds": others}}
        show(f"the same in {args.beside.name}", summary(others))
    if args.json:
        write_record(args.json, numbers)


if __name__ == "__main__":
    main()

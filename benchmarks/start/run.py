"""How long ``make serve`` takes to its first token, and what the idle processes without torch weigh.

    python -m benchmarks.start.run [--rounds 3] [--json FILE]

Runs ``make serve`` (everything installed already) on the demo model, sends the request that its curl line shows as soon
as the server says it serves, and stops the clock at the first token. Then reads the resident memory of the scheduler,
the gateway, and ``pagewise serve`` itself.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import time
import urllib.request
from pathlib import Path

import psutil

from benchmarks.processes import GATEWAY, SCHEDULER
from benchmarks.record import record_file, write_record

ROOT = Path(__file__).parents[2]


def one_start() -> dict[str, float]:
    """Seconds from the command to ready and to the first token, and MB of the idle processes."""
    began = time.perf_counter()
    process = subprocess.Popen(
        ["make", "--no-print-directory", "serve", "ARGS=--port 0 --log-level warning"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = next(line.split(" at ")[1].split(" ")[0] for line in process.stdout if line.startswith("Serving "))
        ready = time.perf_counter() - began
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
        return {"ready_s": ready, "first_token_s": first, **memory(process.pid)}
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=30)


def memory(pid: int) -> dict[str, float]:
    """Resident MB (10^6 bytes) of the processes below ``pid`` that have no torch, and their sum."""
    found = dict.fromkeys(("scheduler_mb", "gateway_mb", "serve_mb"), 0.0)
    for process in (one := psutil.Process(pid), *one.children(recursive=True)):
        words = process.cmdline()
        for name, sign in (("scheduler_mb", SCHEDULER), ("gateway_mb", GATEWAY), ("serve_mb", "serve")):
            if sign in words and "make" not in Path(words[0]).name:
                found[name] += float(process.memory_info().rss) / 1e6
    return {**found, "all_mb": sum(found.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    rounds = [one_start() for _ in range(args.rounds)]
    medians = {key: round(statistics.median(r[key] for r in rounds), 2) for key in rounds[0]}
    print(f"make serve, installed: ready after {medians['ready_s']} s, first token after {medians['first_token_s']} s")
    print(
        "idle, MB resident: " + ", ".join(f"{name[:-3]} {medians[name]:.0f}" for name in medians if name.endswith("mb"))
    )
    if args.json:
        write_record(args.json, {"medians": medians, "rounds": rounds})


if __name__ == "__main__":
    main()

"""How long do streams pause, and how warm are the caches, when the scheduler is killed under load?

A scheduler, a gateway and executors on this machine, with keys and a host tier; clients that each stream answers about
one of a few long texts, through the real client. While all of them stream the scheduler is killed with SIGKILL and
started again; the streams go on. Compares the share of tokens that was cached before, in the requests that the gateway
submitted again, and in the next round. Prints the numbers and, with ``--json``, writes them.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.restarts import Restart, restarts_under_load
from benchmarks.processes import HOST_MEMORY, Cluster, running
from benchmarks.record import write_record

NUM_BLOCKS = 800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--executors", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--texts", type=int, default=8, help="that clients share")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--logs", type=Path, help="folder for the logs of all processes")
    parser.add_argument("--json", help="file to write the numbers to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(args.logs or Path(folder), executor_options=(f"--num-blocks={NUM_BLOCKS}",), as_shipped=True)
        with running(cluster, args.executors):
            sizes = {"clients": args.clients, "texts": args.texts, "max_tokens": args.max_tokens}
            cold, restarts = asyncio.run(restarts_under_load(cluster, args.restarts, **sizes))
            load = psutil.getloadavg()[0]
    numbers: dict[str, Any] = {
        "configuration": f"keys, --num-blocks={NUM_BLOCKS}, --host-memory={HOST_MEMORY}, --verify-copies, profiled",
        "executors": args.executors,
        **sizes,
        "load_average": round(load, 1),
        "cold_hit_rate": round(cold, 4),
        "worst": _worst(restarts),
        "restarts": [one.numbers() for one in restarts],
    }
    print(json.dumps(numbers, indent=1))
    failures = [failure for one in restarts for failure in one.failures]
    print("\n".join(failures[:50]), file=sys.stderr)
    if args.json:
        write_record(args.json, numbers, device="cpu")
    return 1 if failures else 0


def _worst(restarts: list[Restart]) -> dict[str, float]:
    """The longest pause, the slowest return, and the least that was left of the hit rate before, as a share of it."""
    return {
        "pause": round(max(pause for one in restarts for pause in one.pauses), 2),
        "rejoined": round(max(one.back.rejoined for one in restarts), 2),
        "away": round(max(one.back.away for one in restarts), 2),
        "resumed_over_before": round(min(one.resumed / one.before for one in restarts), 4),
        "after_over_before": round(min(one.after / one.before for one in restarts), 4),
    }


if __name__ == "__main__":
    sys.exit(main())

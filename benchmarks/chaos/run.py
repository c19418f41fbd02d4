"""How long do streams pause when executors, gateways and the scheduler are killed, frozen, drained and cut off?

A hundred streams of nine kinds through the real client, two gateways, a scheduler and three executors on this machine,
the last one in a network namespace of its own where the machine allows that. Every output is compared with the answer
of the same server before any disturbance. The pause of a stream is the longest gap between two of its tokens
around a disturbance of its executor, its gateway or the scheduler. Prints the numbers; ``--json`` writes them.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from benchmarks.chaos.disturbances import GATEWAY_OPTIONS, Monkey
from benchmarks.chaos.harness import chaos
from benchmarks.chaos.network import namespace
from benchmarks.chaos.workload import make_cases
from benchmarks.processes import HOST_MEMORY, Cluster
from benchmarks.record import record_file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=150)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two disturbances, at least")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument(
        "--every", type=float, nargs=2, default=[20.0, 40.0], help="seconds between two of the scheduler"
    )
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds without a heartbeat")
    parser.add_argument("--plain", action="store_true", help="no keys, no host memory, nothing measured at the start")
    parser.add_argument("--logs", type=Path, help="folder for the logs of all processes")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    options = (f"--executor-timeout={args.timeout:g}", f"--gateway-timeout={args.timeout:g}", "--step-timeout=10")
    with namespace() as network, tempfile.TemporaryDirectory() as folder:
        address = "127.0.0.1" if isinstance(network, str) else network.host
        logs = args.logs or Path(folder)
        cluster = Cluster(
            logs,
            gateways=args.gateways,
            scheduler_options=options,
            gateway_options=GATEWAY_OPTIONS,
            address=address,
            as_shipped=not args.plain,
        )
        monkey = Monkey(cluster, args.pause, args.timeout + 3, blocks=(600, 400, 300), every=tuple(args.every))
        if not isinstance(network, str):
            monkey.network = network
        report = asyncio.run(
            chaos(cluster, monkey, make_cases(args.streams, args.max_tokens), args.seconds, args.timeout)
        )
    numbers = report.numbers() | {
        "timeout": args.timeout,
        "gateways": args.gateways,
        "configuration": "plain" if args.plain else f"keys, --host-memory={HOST_MEMORY}, --verify-copies, profiled",
        "network": network if isinstance(network, str) else f"packets dropped by {network.dropped_by}",
    }
    return report.tell(numbers, args.json)


if __name__ == "__main__":
    sys.exit(main())

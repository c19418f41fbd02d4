"""Hours of honest and abusive clients while processes come and go: does anything grow, leak, or repeat itself?

    python -m benchmarks.soak.run [--minutes 60] [--json FILE] [--logs FOLDER]

Twenty streams of nine kinds run through two gateways with one API key, and every output is compared with its reference.
A stranger with two other keys sends requests that do harm elsewhere. Executors are killed, frozen and drained all the
time, the scheduler and the second gateway a few times. One executor and the first gateway are only frozen, so that they
live from the beginning to the end. These rules have to hold:

- no stream fails but the streams of a gateway that was killed, and every output is right;
- the memory of a process that lives for a fifth of the time, and at least four minutes, grows by less than 2% (and 3
  MB) once it has lived for a tenth of the time. In each tenth of the time, all clients rest for a while: the memory it
  holds then is its lasting memory. A scheduler that lives for less than half an hour may grow by 11 MB more, until its
  records of lost blocks and of ended requests, whose sizes are bounded, are full;
- file descriptors, sockets, threads and tasks end as they began, all blocks are accounted for, and nothing runs or
  waits at the end;
- no warning is repeated more often than its bound allows, and the stranger never makes a server fail.
"""

import argparse
import asyncio
import sys
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks.chaos.disturbances import GATEWAY_OPTIONS, Monkey
from benchmarks.chaos.harness import Report, chaos
from benchmarks.chaos.workload import make_cases
from benchmarks.processes import Cluster
from benchmarks.record import record_file
from benchmarks.soak.abuse import Abuser
from benchmarks.soak.resources import Life, Resources, repeated
from benchmarks.soak.rests import Rests

MOST_GROWTH = 0.02
_SLACK_MB = 3.0
"""Megabytes by which a process may grow beside that: pages that are touched for the first time late."""
_RECORDS_MB = 11.0
"""The records of a scheduler that are full: 65,536 lost blocks were measured at 7 MB, and 2,048 ended sequences at 1.5
MB for short sequences; sequences of this workload report more."""
_RECORDS_FULL = 1800.0
"""The seconds after which its records are surely full."""
_COUNTED = ("descriptors", "sockets", "threads", "tasks")
_SLACK = 16
"""How many of each of them a process may have more."""
_TIMEOUT = 3.0
_WARNINGS_PER_MINUTE = 6.0
"""The bound of warnings that others can cause, and the line with the number that were left out."""
_LEAST_WARNINGS = 20
_HONEST, _ABUSER, _IDLER, _OPERATOR = "sk-honest", "sk-abuser", "sk-idler", "sk-operator"


def key_file(folder: Path) -> Path:
    """The API keys of the clients."""
    path = folder / "api-keys"
    path.write_text(
        f"honest: {_HONEST}\n"
        f"abuser: {_ABUSER} concurrent=4 requests-per-minute=600\n"
        f"idler: {_IDLER} concurrent=4 requests-per-minute=600\n"
        f"operator: {_OPERATOR} operator=yes\n"
    )
    path.chmod(0o600)
    return path


def grown(lives: list[Life]) -> list[str]:
    """Which of these processes hold more at the end of their lives than near the beginning."""
    found = []
    for life in lives:
        before, after = life.before_and_after(attrgetter("memory"))
        fills = life.name == "scheduler" and life.seconds < _RECORDS_FULL
        if after > before * (1 + MOST_GROWTH) + _SLACK_MB + (_RECORDS_MB if fills else 0.0):
            found.append(f"{life.name} ({life.pid}) grew from {before:.0f} to {after:.0f} MB in {life.seconds:.0f} s")
        if all(one.tasks is None for one in life.samples):
            found.append(f"{life.name} ({life.pid}) has told no number of tasks in {life.seconds:.0f} s")
        for what in _COUNTED:
            first, last = life.before_and_after(attrgetter(what))
            if last > first + _SLACK:
                found.append(f"{life.name} ({life.pid}) has {last:.0f} {what}, {first:.0f} before")
    return found


def soak(folder: Path, minutes: float, streams: int) -> tuple[Report, dict[str, Any]]:
    """Run it; the failures of all checks are in the report."""
    seconds = 60.0 * minutes
    cluster = Cluster(
        folder,
        gateways=2,
        scheduler_options=(f"--executor-timeout={_TIMEOUT:g}", f"--gateway-timeout={_TIMEOUT:g}", "--step-timeout=10"),
        gateway_options=(*GATEWAY_OPTIONS, f"--api-keys-file={key_file(folder)}"),
        as_shipped=True,
        api_key=_OPERATOR,
    )
    # The last life of the scheduler is to be long enough to show whether it grows.
    monkey = Monkey(
        cluster,
        max(5.0, seconds / 60),
        _TIMEOUT + 3,
        blocks=(600, 400, 300),
        every=(0.3 * seconds, 0.35 * seconds),
        spared="executor-0",
    )
    rests, resources = Rests(seconds), Resources()
    abuser = Abuser(_ABUSER, _IDLER, rests.over)
    report = asyncio.run(
        chaos(
            cluster,
            monkey,
            make_cases(streams, 100),
            seconds,
            _TIMEOUT,
            companions=(rests.keep, abuser.run, resources.watch),
            key=_HONEST,
            ready=rests.over,
        )
    )
    long_lives = resources.long()
    report.failures += grown(long_lives) + abuser.failures
    most = max(_LEAST_WARNINGS, _WARNINGS_PER_MINUTE * minutes) + len(report.disturbances)  # each of which is logged
    warnings = repeated(folder)
    report.failures += [
        f"{name} says {count} times: {text}" for (name, text), count in warnings.items() if count > most
    ]
    numbers = {
        "minutes": minutes,
        **report.numbers(),
        "abuse": {f"{kind}: {status}": count for (kind, status), count in sorted(abuser.answers.items())},
        "growth": [
            {
                "process": life.name,
                "seconds": round(life.seconds),
                "mb": [round(one, 1) for one in life.before_and_after(attrgetter("memory"))],
                "growth": round(life.growth, 4),
                **{what: life.before_and_after(attrgetter(what)) for what in _COUNTED},
            }
            for life in long_lives
        ],
        "warnings_repeated_most": [[name, text, count] for (name, text), count in warnings.most_common(5)],
    }
    return report, numbers


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--logs", type=Path, help="folder for the logs of all processes")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report, numbers = soak(folder, args.minutes, args.streams)
    return report.tell(numbers, args.json)


if __name__ == "__main__":
    sys.exit(main())

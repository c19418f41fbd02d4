"""A hundred streams while processes come and go: drives both, and reports the failures and pauses."""

import asyncio
import contextlib
import json
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import openai
import psutil
from pagewise_scheduler.server.executor_registry import ExecutorRegistry

from benchmarks.chaos.disturbances import Disturbance, Monkey
from benchmarks.chaos.timeline import Timeline
from benchmarks.chaos.workload import Case, Outcome, client_of, references, stream
from benchmarks.processes import Cluster, Process
from benchmarks.record import write_record
from benchmarks.scrape import total

START_SECONDS = 180.0
"""Most that executors may take to start: loading torch three times on two cores that have other work."""

SETTLE_SECONDS = 120.0
"""Most that streams may take to end once nothing is disturbed any more."""

COPIES = ("stored", "loaded", "corrupt", "fetched", "fetch_failed", "copied")
"""Events of blocks that go to the host and to other executors, and come back."""


MOST_PAUSES = 10
"""How many of the longest pauses are printed one by one."""


class Pause(NamedTuple):
    """Seconds that a stream waited for a token, around a disturbance of a process.

    ``during``: all disturbances of that time, in order. ``spent``: seconds by their causes, the most first.
    """

    seconds: float
    cause: str
    stream: str
    during: tuple[str, ...]
    spent: dict[str, float]


@dataclass
class Report:
    """The results. ``failures``: requests that failed, outputs that differ, processes that did not behave.

    ``cut``: streams that ended with their gateway, which was killed: they alone may. ``refused``: requests that reached
    a gateway which had just had a signal to leave. ``pauses``: one for each stream and disturbance that it was touched
    by. ``blocks``: how many were copied, and where to, over all lives of the scheduler. ``rss``: of the scheduler and
    of the gateway that lives on, in MiB, each second. ``load``: how many wanted a core then, on the mean over a minute.
    """

    seconds: float = 0.0
    streams: int = 0
    cut: int = 0
    refused: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COPIES, 0))
    rss: dict[str, list[float]] = field(default_factory=lambda: {"scheduler": [], "gateway": []})
    load: list[float] = field(default_factory=list)

    def numbers(self) -> dict[str, Any]:
        """For a result file: times in seconds."""
        return {
            "seconds": round(self.seconds, 1),
            "streams": self.streams,
            "streams_cut_with_their_gateway": self.cut,
            "refused_by_a_gateway_that_leaves": self.refused,
            "tokens": self.tokens,
            "failures": len(self.failures),
            "pause": _spread([pause.seconds for pause in self.pauses]),
            "by_kind": {kind: self._of_kind(kind) for kind in sorted({event.kind for event in self.disturbances})},
            "spent": self._spent(),
            "longest_pauses": self._longest(),
            "blocks": self.blocks,
            "load_average": {"median": round(statistics.median(self.load), 1), "worst": round(max(self.load), 1)},
            "rss_mib": {
                name: {"start": round(rss[0], 1), "middle": round(rss[len(rss) // 2], 1), "end": round(rss[-1], 1)}
                for name, rss in self.rss.items()
                if rss
            },
        }

    def tell(self, numbers: dict[str, Any], path: str | None) -> int:
        """Print the numbers and the failures, and write the numbers to ``path``; returns the exit code."""
        print(json.dumps(numbers, indent=1))
        print("\n".join(self.failures[:50]), file=sys.stderr)
        if path is not None:
            write_record(path, numbers, device="cpu")
        return 1 if self.failures else 0

    def _longest(self) -> list[dict[str, Any]]:
        """The longest pauses, each once; several disturbances may have touched it."""
        each = {(round(one.seconds, 2), one.stream, one.during): one.spent for one in self.pauses}
        return [
            {"seconds": seconds, "stream": stream, "during": list(during), "spent": each[seconds, stream, during]}
            for seconds, stream, during in sorted(each, reverse=True)[:MOST_PAUSES]
        ]

    def _spent(self) -> dict[str, float]:
        """The causes on which the seconds of all pauses were spent, as shares of them."""
        found: dict[str, float] = {}
        for one in self.pauses:
            for what, seconds in one.spent.items():
                found[what] = found.get(what, 0.0) + seconds
        whole = sum(found.values()) or 1.0
        return {what: round(found[what] / whole, 3) for what in sorted(found, key=found.__getitem__, reverse=True)}

    def _of_kind(self, kind: str) -> dict[str, Any]:
        events = [event for event in self.disturbances if event.kind == kind]
        pauses = [pause.seconds for pause in self.pauses if pause.cause == kind]
        return {
            "times": len(events),
            "streams_paused": len(pauses),
            "pause": _spread(pauses),
            "rejoined": _spread([event.rejoined for event in events if event.rejoined is not None]),
        }


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(statistics.median(values), 2), "worst": round(max(values), 2)}


Companion = Callable[[Cluster], Awaitable[None]]
"""Does something else beside the streams, until it is cancelled."""

Ready = Callable[[], Awaitable[None]]


async def _always() -> None:
    """Be ready at once."""


async def chaos(
    cluster: Cluster,
    monkey: Monkey,
    cases: list[Case],
    seconds: float,
    given_up: float,
    *,
    companions: Sequence[Companion] = (),
    key: str = "none",
    ready: Ready = _always,
) -> Report:
    """Start the cluster, keep a stream of each case running while the monkey is at work, and check the processes in the
    end.

    ``given_up``: seconds after which the scheduler gives up a silent process at the latest. ``companions``: run as long
    as the streams. ``key``: the API key of the streams. ``ready`` is waited for between two of them.
    """
    try:
        await asyncio.to_thread(cluster.start)
        monkey.start()
        await asyncio.to_thread(cluster.wait_ready, len(monkey.blocks), START_SECONDS)
        timeline = Timeline(monkey.freeze, min(given_up, ExecutorRegistry.least_timeout))
        report = await _disturb(cluster, monkey, cases, seconds, timeline, companions, key, ready)
        report.failures += await settled(cluster)
        if report.blocks["corrupt"]:
            report.failures.append(f"{report.blocks['corrupt']} blocks came back from the host corrupt")
    finally:
        cluster.close()
    return report


async def _disturb(
    cluster: Cluster,
    monkey: Monkey,
    cases: list[Case],
    seconds: float,
    timeline: Timeline,
    companions: Sequence[Companion],
    key: str,
    ready: Ready,
) -> Report:
    report = Report()
    expected = await references(cluster.url, cases, key)
    outcomes: list[Outcome] = []
    until = monotonic() + seconds
    watchers = [_watch_machine(cluster, report), _watch_blocks(cluster, report), timeline.watch(cluster)]
    watching = [asyncio.ensure_future(one) for one in (*watchers, *(companion(cluster) for companion in companions))]
    began = monotonic()
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            (name, await stack.enter_async_context(client_of(url, key=key))) for name, url in cluster.urls.items()
        ]
        streams = [
            asyncio.create_task(
                _keep_asking(*clients[number % len(clients)], case, right, until, outcomes, monkey, report, ready)
            )
            for number, (case, right) in enumerate(zip(cases, expected, strict=True))
        ]
        await monkey.run(until)
        _, hanging = await asyncio.wait(streams, timeout=SETTLE_SECONDS)
        report.failures += [f"a stream does not end: {task.get_name()}" for task in hanging]
        for task in hanging:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    report.seconds = monotonic() - began
    for task in watching:
        task.cancel()
    for done in await asyncio.gather(*watching, return_exceptions=True):
        if isinstance(done, Exception):
            report.failures.append(f"what runs beside the streams failed: {done!r}")
    report.failures += monkey.failures
    report.disturbances = monkey.done
    report.streams, report.tokens = len(outcomes), sum(outcome.completion_tokens for outcome in outcomes)
    report.pauses = _pauses(outcomes, monkey.done, timeline)
    return report


async def _keep_asking(
    gateway: str,
    client: openai.AsyncOpenAI,
    case: Case,
    right: Outcome,
    until: float,
    outcomes: list[Outcome],
    monkey: Monkey,
    report: Report,
    ready: Ready,
) -> None:
    while monkey.goes_on(until):
        await monkey.wait_for(gateway)
        outcome, began = Outcome(case, gateway=gateway), monotonic()
        outcomes.append(outcome)
        try:
            await stream(client, case, outcome)
        except Exception as error:
            if monkey.killed(gateway, began, monotonic()):
                report.cut += 1
                if not outcome.begins(right):
                    report.failures.append(f"{outcome.request_id} {case.kind}: what came before it was cut off differs")
            elif not outcome.request_id and monkey.leaving(gateway, began, monotonic()):
                report.refused += 1
            else:
                said = f"{type(error).__name__}: {error}"
                report.failures.append(f"{case.kind} {outcome.request_id} through {gateway} failed: {said}")
                await asyncio.sleep(0.5)
        else:
            report.failures += [f"{outcome.request_id} {one}" for one in outcome.differences(right)]
        await ready()


async def _watch_machine(cluster: Cluster, report: Report) -> None:
    while True:
        first = cluster.gateways["gateway-0"]
        for name, process in (("scheduler", cluster.scheduler), ("gateway", first)):
            if (memory := _memory(process)) is not None:
                report.rss[name].append(memory)
        report.load.append(psutil.getloadavg()[0])
        await asyncio.sleep(1.0)


def _memory(process: Process) -> float | None:
    """MiB of a process; None: it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.exit_code is None:
            return float(psutil.Process(process.pid).memory_info().rss) / 2**20
    return None


async def _watch_blocks(cluster: Cluster, report: Report) -> None:
    """Add up the counts of each life of the scheduler: its counters begin anew with each."""
    before = dict.fromkeys(COPIES, 0)
    while True:
        with contextlib.suppress(OSError):
            samples = await asyncio.to_thread(cluster.scrape)
            for event in COPIES:
                now = int(total(samples, "kv_block_events_total", event=event))
                report.blocks[event] += now - before[event] if now >= before[event] else now
                before[event] = now
        await asyncio.sleep(1.0)


def _pauses(outcomes: list[Outcome], events: list[Disturbance], timeline: Timeline) -> list[Pause]:
    """The longest gap of each stream around each disturbance that it was touched by."""
    found = []
    for event in events:
        for outcome in outcomes:
            if outcome.case.told_at_end or not _touched(outcome, event):
                continue
            # Tokens that are in transit from an executor still come after it.
            gap = outcome.longest_gap(event.time + 1.0, event.time)
            if gap is not None:
                during = tuple(f"{one.kind} {one.victim}" for one in events if one.overlaps(*gap))
                spent = timeline.explain(*gap, outcome.gateway, outcome.request_id, events)
                found.append(Pause(gap[1] - gap[0], event.kind, outcome.case.kind, during, spent))
    return found


def _touched(outcome: Outcome, event: Disturbance) -> bool:
    match event.target:
        case "executor":
            return outcome.request_id in event.request_ids
        case "gateway":
            return outcome.gateway == event.victim
        case "scheduler":
            return True


async def settled(cluster: Cluster, seconds: float = 20.0) -> list[str]:
    """The faults that are left once all streams have ended: blocks not returned, requests that run or wait."""
    deadline = monotonic() + seconds
    while (wrong := await asyncio.to_thread(_unsettled, cluster)) and monotonic() < deadline:
        await asyncio.sleep(0.2)
    return wrong


def _unsettled(cluster: Cluster) -> list[str]:
    wrong = [
        f"{name} is {value:g}"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        if (value := cluster.metric(name))
    ]
    for name, report in cluster.members().items():
        device = report["device"]
        if device["free"] + device["cached"] + device["in_use"] != device["num_blocks"]:
            wrong.append(f"{name}: the blocks do not add up: {device}")
        held = {key: report[key] for key in ("running", "waiting", "steps_in_flight", "requests")}
        if device["in_use"] or device["retiring"] or any(held.values()):
            wrong.append(f"{name} holds something: {device} {held}")
    return wrong

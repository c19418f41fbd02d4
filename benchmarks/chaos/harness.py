"""A hundred streams while executors come and go: drives both, and says what was seen."""

import asyncio
import itertools
import statistics
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import openai
import psutil

from tests.chaos.disturbances import Disturbance, Monkey
from tests.chaos.processes import Cluster
from tests.chaos.workload import Case, Outcome, client_of, references, stream

START_SECONDS = 180.0
"""Most that executors may take to start: loading torch three times on two cores that have other work."""

SETTLE_SECONDS = 120.0
"""Most that streams may take to end once nothing is disturbed any more."""

COPIES = ("stored", "loaded", "spoiled", "fetched", "fetch_failed", "copied")
"""Events of blocks that go to the host and to other executors, and come back."""


@dataclass
class Report:
    """What was seen. ``failures``: requests that failed, outputs that differ, executors that did not behave.

    ``pauses``: seconds without a token for each stream that an executor was taken from, by what was done to it.
    ``blocks``: how many were copied, and where to. ``rss``: of the scheduler in MiB, each second. ``load``: how many
    wanted a core then, on the mean over a minute.
    """

    seconds: float = 0.0
    streams: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    pauses: dict[str, list[float]] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    rss: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)

    def numbers(self) -> dict[str, Any]:
        """For a result file: times in seconds."""
        kinds = {kind: [one for one in self.disturbances if one.kind == kind] for kind in sorted(self.pauses)}
        every = [pause for pauses in self.pauses.values() for pause in pauses]
        return {
            "seconds": round(self.seconds, 1),
            "streams": self.streams,
            "tokens": self.tokens,
            "failures": len(self.failures),
            "pause": _spread(every),
            "by_kind": {
                kind: {
                    "times": len(events),
                    "streams_moved": len(self.pauses[kind]),
                    "pause": _spread(self.pauses[kind]),
                    "rejoined": _spread([one.rejoined for one in events if one.rejoined is not None]),
                }
                for kind, events in kinds.items()
            },
            "blocks": self.blocks,
            "load_average": {"median": round(statistics.median(self.load), 1), "worst": round(max(self.load), 1)},
            "scheduler_rss_mib": {
                "start": round(self.rss[0], 1),
                "middle": round(self.rss[len(self.rss) // 2], 1),
                "end": round(self.rss[-1], 1),
            },
        }


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(statistics.median(values), 2), "worst": round(max(values), 2)}


async def chaos(cluster: Cluster, monkey: Monkey, cases: list[Case], seconds: float) -> Report:
    """Start the cluster, keep a stream of each case running while the monkey is at work, and look at what is left."""
    try:
        await asyncio.to_thread(cluster.start_scheduler)
        monkey.start()
        await asyncio.to_thread(cluster.wait_ready, len(monkey.blocks), START_SECONDS)
        report = await _disturb(cluster, monkey, cases, seconds)
        report.failures += await _settled(cluster)
        report.blocks = {
            event: int(await asyncio.to_thread(cluster.metric, "kv_block_events_total", event=event))
            for event in COPIES
        }
        if report.blocks["spoiled"]:
            report.failures.append(f"{report.blocks['spoiled']} blocks came back from the host spoiled")
    finally:
        cluster.close()
    return report


async def _disturb(cluster: Cluster, monkey: Monkey, cases: list[Case], seconds: float) -> Report:
    report = Report()
    expected = await references(cluster.url, cases)
    outcomes: list[Outcome] = []
    until = monotonic() + seconds
    watching = asyncio.create_task(_watch_memory(cluster, report))
    began = monotonic()
    async with client_of(cluster.url) as client:
        streams = [
            asyncio.create_task(_keep_asking(client, case, right, until, outcomes, report))
            for case, right in zip(cases, expected, strict=True)
        ]
        await monkey.run(until)
        _, hanging = await asyncio.wait(streams, timeout=SETTLE_SECONDS)
        report.failures += [f"a stream does not end: {task.get_name()}" for task in hanging]
        for task in hanging:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    report.seconds = monotonic() - began
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    report.failures += monkey.failures
    report.disturbances = monkey.done
    report.streams, report.tokens = len(outcomes), sum(outcome.completion_tokens for outcome in outcomes)
    report.pauses = _pauses(outcomes, monkey.done)
    return report


async def _keep_asking(
    client: openai.AsyncOpenAI, case: Case, right: Outcome, until: float, outcomes: list[Outcome], report: Report
) -> None:
    while monotonic() < until:
        outcome = Outcome(case)
        outcomes.append(outcome)
        try:
            await stream(client, case, outcome)
        except Exception as error:
            report.failures.append(f"{case.kind} {outcome.request_id} failed: {type(error).__name__}: {error}")
            await asyncio.sleep(0.5)
        else:
            report.failures += [f"{outcome.request_id} {one}" for one in outcome.differences(right)]


async def _watch_memory(cluster: Cluster, report: Report) -> None:
    process = psutil.Process(cluster.scheduler.pid)
    while True:
        report.rss.append(process.memory_info().rss / 2**20)
        report.load.append(psutil.getloadavg()[0])
        await asyncio.sleep(1.0)


def _pauses(outcomes: list[Outcome], events: list[Disturbance]) -> dict[str, list[float]]:
    """The longest gap around each disturbance of a stream's executor; tokens on their way still come after it."""
    by_id = {outcome.request_id: outcome for outcome in outcomes if not outcome.case.told_at_end}
    pauses: dict[str, list[float]] = {event.kind: [] for event in events}
    for event, request_id in itertools.chain.from_iterable(
        ((event, request_id) for request_id in event.request_ids) for event in events
    ):
        if request_id in by_id:
            gap = by_id[request_id].longest_gap(event.time + 1.0, event.time)
            if gap is not None:
                pauses[event.kind].append(gap)
    return pauses


async def _settled(cluster: Cluster, seconds: float = 20.0) -> list[str]:
    """What is not as it should be once all streams have ended: everything returned, nothing runs, nothing waits."""
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

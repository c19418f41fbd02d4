"""What the scheduler answers to the queries of gateways: metrics, and what the KV memory holds."""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct
from pagewise_shared.protocol import Query

from pagewise_scheduler.actors.clock import clock
from pagewise_scheduler.actors.console import Console
from pagewise_scheduler.actors.engine import Engine
from pagewise_scheduler.actors.live_request import LiveRequest
from pagewise_scheduler.actors.recent_requests import is_called
from pagewise_scheduler.core.inspection import unplaced_report
from pagewise_scheduler.core.memory_reports import MemoryReport, RequestReport, shown
from pagewise_scheduler.metrics import Metrics

DEFAULT_LIMIT, MOST = 100, 10_000


class MemoryReports(Struct):
    """One report for each executor."""

    executors: list[MemoryReport]


def answer(
    query: Query, engines: Sequence[Engine], unplaced: Iterable[LiveRequest], metrics: Metrics, console: Console
) -> bytes | None:
    """The body of the answer, None if what is asked for is not known, or not shown to the query's key.

    ``unplaced``: requests that no engine can take now.
    """
    if query.key and query.kind != "request":
        return None
    limit = min(query.limit, MOST) if query.limit > 0 else DEFAULT_LIMIT
    match query.kind:
        case "metrics":
            return metrics.render()
        case "memory":
            return msgspec.json.encode(MemoryReports([engine.memory_report(limit) for engine in engines]))
        case "console":
            return console.answer(query.view) if query.view is not None else None
        case "request":
            report = _request(query.argument, query.key, engines, unplaced, limit) if query.argument else None
            return msgspec.json.encode(report) if report is not None else None


def _request(
    name: str, key: str, engines: Sequence[Engine], unplaced: Iterable[LiveRequest], limit: int
) -> RequestReport | None:
    """What a request holds. Its client may have given several requests one id, which then means the newest."""
    now = clock()
    found = [report for engine in engines for report in engine.request_reports(name, key, limit)]
    found += [unplaced_report(live.request, now) for live in unplaced if is_called(live.request, name, key)]
    if not found:
        return None
    report = min(found, key=lambda report: (report.request_id != name, report.arrived_seconds_ago))
    names = {engine.scheduler.recoveries.endpoint: engine.executor_id for engine in engines}
    return shown(report, names, key)

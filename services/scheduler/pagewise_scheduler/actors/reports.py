"""What the scheduler answers to the queries of gateways: metrics, and what the KV memory holds."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from pagewise_shared.protocol import Query

from pagewise_scheduler.actors.clock import clock
from pagewise_scheduler.actors.console import Console
from pagewise_scheduler.actors.engine import Engine
from pagewise_scheduler.actors.request_names import RequestNames
from pagewise_scheduler.core.inspection import unplaced_report
from pagewise_scheduler.core.memory_reports import MemoryReport, RequestReport, shown
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.metrics import Metrics

DEFAULT_LIMIT, MOST = 100, 10_000


class MemoryReports(Struct):
    """One report for each executor."""

    executors: list[MemoryReport]


def answer(
    query: Query, engines: Sequence[Engine], live: RequestNames[Request], metrics: Metrics, console: Console
) -> bytes | None:
    """The body of the answer, None if what is asked for is not known, or not shown to the query's key.

    ``live``: the requests that have not ended.
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
            report = _request(query.argument, query.key, engines, live, limit) if query.argument else None
            return msgspec.json.encode(report) if report is not None else None


def _request(
    name: str, key: str, engines: Sequence[Engine], live: RequestNames[Request], limit: int
) -> RequestReport | None:
    """What a request holds. Its client may have given several requests one id, which then means the newest."""
    now = clock()
    newest = live.newest(name, key)
    found = (
        [] if newest is None else [engine.request_report(newest, limit) for engine in engines if engine.serves(newest)]
    )
    if newest is not None and not found:
        found = [unplaced_report(newest, now)]
    ended = (engine.recent.newest_called(name, key, now) for engine in engines)
    found += [report for report in ended if report is not None]
    if not found:
        return None
    report = min(found, key=lambda report: (report.request_id != name, report.arrived_seconds_ago))
    names = {engine.scheduler.recoveries.endpoint: engine.executor_id for engine in engines}
    return shown(report, names, key)

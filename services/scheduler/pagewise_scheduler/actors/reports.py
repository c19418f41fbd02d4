"""What the scheduler answers to the queries of gateways: metrics, and what the KV memory holds."""

from collections.abc import Iterable

import msgspec
from msgspec import Struct
from pagewise_shared.protocol import Query

from pagewise_scheduler.actors.engine import Engine
from pagewise_scheduler.core.memory_reports import MemoryReport, shown
from pagewise_scheduler.metrics import Metrics

DEFAULT_LIMIT, MOST = 100, 10_000


class MemoryReports(Struct):
    """One report for each executor."""

    executors: list[MemoryReport]


def answer(query: Query, engines: Iterable[Engine], metrics: Metrics) -> bytes | None:
    """The body of the answer, None if what is asked for is not known, or not shown to the query's key."""
    if query.key and query.kind != "request":
        return None
    limit = min(query.limit, MOST) if query.limit > 0 else DEFAULT_LIMIT
    match query.kind:
        case "metrics":
            return metrics.render()
        case "memory":
            return msgspec.json.encode(MemoryReports([engine.memory_report(limit) for engine in engines]))
        case "request":
            return _request(query, list(engines), limit)
    return None


def _request(query: Query, engines: list[Engine], limit: int) -> bytes | None:
    """What a request holds. Its client may have given several requests one id, which then means the newest."""
    name, key = query.argument, query.key
    found = [report for engine in engines for report in engine.request_reports(name, key, limit) if name]
    if not found:
        return None
    report = min(found, key=lambda report: (report.request_id != name, report.arrived_seconds_ago))
    names = {engine.scheduler.recoveries.endpoint: engine.executor_id for engine in engines}
    return msgspec.json.encode(shown(report, names, hashes=not key))

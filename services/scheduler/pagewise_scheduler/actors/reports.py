"""What the scheduler answers to the queries of gateways: metrics, and what the KV memory holds."""

from collections.abc import Iterable

import msgspec
from msgspec import Struct
from pagewise_shared.protocol import Query

from pagewise_scheduler.actors.engine import Engine
from pagewise_scheduler.core.inspection import MemoryReport
from pagewise_scheduler.metrics import Metrics

DEFAULT_LIMIT, MOST = 100, 10_000


class MemoryReports(Struct):
    """One report for each executor."""

    executors: list[MemoryReport]


def answer(query: Query, engines: Iterable[Engine], metrics: Metrics) -> bytes | None:
    """The body of the answer, None if what is asked for is not known."""
    limit = min(query.limit, MOST) if query.limit > 0 else DEFAULT_LIMIT
    match query.kind:
        case "metrics":
            return metrics.render()
        case "memory":
            return msgspec.json.encode(MemoryReports([engine.memory_report(limit) for engine in engines]))
        case "request":
            for engine in engines:
                if (report := engine.request_report(query.argument, limit)) is not None:
                    return msgspec.json.encode(report)
    return None

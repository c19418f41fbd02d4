"""Answers the queries of gateways: metrics, the content of the KV memory, and the reports of requests."""

import time
from collections.abc import Sequence
from time import monotonic as clock

import msgspec
from msgspec import Struct
from pagewise_shared.protocol import Query
from pagewise_shared.reports import CacheReport, MemoryReport

from pagewise_scheduler.core.console.cached_prefixes import executor_cache
from pagewise_scheduler.core.memory_report import memory_report
from pagewise_scheduler.core.request_report import later, request_report, seen_by
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.console import Console
from pagewise_scheduler.server.executor_handle import ExecutorHandle
from pagewise_scheduler.server.gateways import Gateways

DEFAULT_LIMIT, MOST = 100, 10_000


class MemoryReports(Struct):
    """One report for each executor."""

    executors: list[MemoryReport]


def answer(
    query: Query, executors: Sequence[ExecutorHandle], gateways: Gateways, metrics: Metrics, console: Console
) -> bytes | None:
    """Return the body of the answer, None if the subject is not known, or not shown to the query's key."""
    if query.key and query.kind != "request":
        return None
    limit = min(query.limit, MOST) if query.limit > 0 else DEFAULT_LIMIT
    match query.kind:
        case "metrics":
            return metrics.render()
        case "memory":
            reports = [memory_report(one.executor_id, one.scheduler, clock(), limit) for one in executors]
            return msgspec.json.encode(MemoryReports(reports))
        case "cache":
            return msgspec.json.encode(_cache(query.argument, executors, limit))
        case "console":
            return console.answer(query.view) if query.view is not None else None
        case "request":
            return _request(query, executors, gateways, limit) if query.argument else None


def _cache(salt: str, executors: Sequence[ExecutorHandle], limit: int) -> CacheReport:
    now = clock()
    return CacheReport(
        [
            executor_cache(one.executor_id, one.scheduler, one.hello.bytes_per_block, salt, limit, one.stats.ticks, now)
            for one in executors
        ]
    )


def _request(query: Query, executors: Sequence[ExecutorHandle], gateways: Gateways, limit: int) -> bytes | None:
    """The report of a request. Its client may have given several requests one id, which then means the newest, after
    our own ids."""
    now, name, key = clock(), query.argument, query.key
    live, ended = gateways.names.newest(name, key), gateways.ended.newest(name, key)
    found = [] if ended is None else [later(ended.report, now - ended.time)]
    if live is not None:
        scheduler = next((one.scheduler for one in executors if one.serves(live)), None)
        found.append(request_report(live, scheduler, now, limit, time.time() - now))
    if not found:
        return None
    report = min(found, key=lambda one: (one.request_id != name, one.arrived_seconds_ago))
    names = {executor.scheduler.recoveries.planner.endpoint: executor.executor_id for executor in executors}
    return msgspec.json.encode(seen_by(report, key, names))

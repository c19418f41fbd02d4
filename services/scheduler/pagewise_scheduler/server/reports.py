"""Answers the queries of gateways: metrics, the content of the KV memory, and where the time of requests went."""

import time
from collections.abc import Sequence
from time import monotonic as clock

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from pagewise_shared.protocol import Query

from pagewise_scheduler.core.explanation import explain, seen_by
from pagewise_scheduler.core.explanation_text import sentences
from pagewise_scheduler.core.inspection import memory_report, request_report, unplaced_report
from pagewise_scheduler.core.memory_reports import MemoryReport, later, shown
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
    """The body of the answer, None if what is asked for is not known, or not shown to the query's key."""
    if query.key and query.kind != "request":
        return None
    limit = min(query.limit, MOST) if query.limit > 0 else DEFAULT_LIMIT
    match query.kind:
        case "metrics":
            return metrics.render()
        case "memory":
            reports = [memory_report(one.executor_id, one.scheduler, clock(), limit) for one in executors]
            return msgspec.json.encode(MemoryReports(reports))
        case "console":
            return console.answer(query.view) if query.view is not None else None
        case "request" if not query.argument:
            return None
        case "request" if query.detail == "explain":
            return _explained(query, executors, gateways)
        case "request":
            return _held(query, executors, gateways, limit)


def _explained(query: Query, executors: Sequence[ExecutorHandle], gateways: Gateways) -> bytes | None:
    """Where the time of a request went. Its client may have given several requests one id, which then means the newest,
    after our own ids."""
    now, name, key = clock(), query.argument, query.key
    live, ended = gateways.names.newest(name, key), gateways.ended.newest(name, key)
    found = [] if live is None else [explain(live, now, time.time() - now)]
    found += [] if ended is None else [ended.record.explanation]
    if not found:
        return None
    told = min(found, key=lambda one: (one.request_id != name, -one.arrived))
    if key:
        told = seen_by(told, key)
    names = _names(executors)
    told.recoveries = [replace(one, peer=names.get(one.peer or "")) for one in told.recoveries]
    told.sentences = sentences(told)
    return msgspec.json.encode(told)


def _held(query: Query, executors: Sequence[ExecutorHandle], gateways: Gateways, limit: int) -> bytes | None:
    """What a request holds, at most ``limit`` of each list; found by its name as in ``_explained``."""
    now, name, key = clock(), query.argument, query.key
    live, ended = gateways.names.newest(name, key), gateways.ended.newest(name, key)
    found = [] if ended is None else [later(ended.record.report, now - ended.time)]
    if live is not None:
        executor = next((one for one in executors if one.serves(live)), None)
        found.append(
            unplaced_report(live, now) if executor is None else request_report(live, executor.scheduler, now, limit)
        )
    if not found:
        return None
    report = min(found, key=lambda report: (report.request_id != name, report.arrived_seconds_ago))
    return msgspec.json.encode(shown(report, _names(executors), key))


def _names(executors: Sequence[ExecutorHandle]) -> dict[str, str]:
    """The executors' names by their block endpoints."""
    return {executor.scheduler.recoveries.endpoint: executor.executor_id for executor in executors}

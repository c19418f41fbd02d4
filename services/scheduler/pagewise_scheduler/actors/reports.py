"""Answers the queries of gateways: metrics, the content of the KV memory, and where the time of requests went."""

import time
from collections.abc import Sequence
from time import monotonic as clock

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from pagewise_shared.protocol import Query

from pagewise_scheduler.actors.console import Console
from pagewise_scheduler.actors.engine import Engine
from pagewise_scheduler.actors.gateways import Gateways
from pagewise_scheduler.core.explanation import explain, seen_by
from pagewise_scheduler.core.explanation_text import sentences
from pagewise_scheduler.core.inspection import memory_report, request_report, unplaced_report
from pagewise_scheduler.core.memory_reports import MemoryReport, later, shown
from pagewise_scheduler.metrics import Metrics

DEFAULT_LIMIT, MOST = 100, 10_000


class MemoryReports(Struct):
    """One report for each executor."""

    executors: list[MemoryReport]


def answer(
    query: Query, engines: Sequence[Engine], gateways: Gateways, metrics: Metrics, console: Console
) -> bytes | None:
    """The body of the answer, None if what is asked for is not known, or not shown to the query's key."""
    if query.key and query.kind != "request":
        return None
    limit = min(query.limit, MOST) if query.limit > 0 else DEFAULT_LIMIT
    match query.kind:
        case "metrics":
            return metrics.render()
        case "memory":
            reports = [memory_report(one.executor_id, one.scheduler, clock(), limit) for one in engines]
            return msgspec.json.encode(MemoryReports(reports))
        case "console":
            return console.answer(query.view) if query.view is not None else None
        case "request" if not query.argument:
            return None
        case "request" if query.detail == "explain":
            return _explained(query, engines, gateways)
        case "request":
            return _held(query, engines, gateways, limit)


def _explained(query: Query, engines: Sequence[Engine], gateways: Gateways) -> bytes | None:
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
    names = _names(engines)
    told.recoveries = [replace(one, peer=names.get(one.peer or "")) for one in told.recoveries]
    told.sentences = sentences(told)
    return msgspec.json.encode(told)


def _held(query: Query, engines: Sequence[Engine], gateways: Gateways, limit: int) -> bytes | None:
    """What a request holds, at most ``limit`` of each list; found by its name as in ``_explained``."""
    now, name, key = clock(), query.argument, query.key
    live, ended = gateways.names.newest(name, key), gateways.ended.newest(name, key)
    found = [] if ended is None else [later(ended.record.report, now - ended.time)]
    if live is not None:
        engine = next((one for one in engines if one.serves(live)), None)
        found.append(
            unplaced_report(live, now) if engine is None else request_report(live, engine.scheduler, now, limit)
        )
    if not found:
        return None
    report = min(found, key=lambda report: (report.request_id != name, report.arrived_seconds_ago))
    return msgspec.json.encode(shown(report, _names(engines), key))


def _names(engines: Sequence[Engine]) -> dict[str, str]:
    """The executors' names by their block endpoints."""
    return {engine.scheduler.recoveries.endpoint: engine.executor_id for engine in engines}

"""What the KV memory holds and how each request got its part: for people, and for ``pagewise vmstat`` and ``pmap``."""

import msgspec
from aiohttp import web
from msgspec import Struct

from pagewise_gateway.core.inspection import MemoryReport, RequestReport
from pagewise_gateway.http.context import Service
from pagewise_gateway.http.errors import InvalidRequestError, NotFoundError

DEFAULT_LIMIT, MOST = 100, 10_000


class MemoryReports(Struct):
    """One report for each executor."""

    executors: list[MemoryReport]


async def debug_memory(request: web.Request) -> web.Response:
    """Pools, requests and the prefix tree of every executor."""
    reports = MemoryReports(request.app[Service.KEY].gateway.memory_reports(_limit(request)))
    return web.Response(body=msgspec.json.encode(reports), content_type="application/json")


async def debug_request(request: web.Request) -> web.Response:
    """The blocks of one request, and what happened to them. Knows the last few that have ended, too."""
    name = request.match_info["request_id"]
    report: RequestReport | None = request.app[Service.KEY].gateway.request_report(
        name.removeprefix("chatcmpl-").removeprefix("cmpl-"), _limit(request)
    )
    if report is None:
        raise NotFoundError(f"no request {name} is known", "request_id")
    return web.Response(body=msgspec.json.encode(report), content_type="application/json")


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(DEFAULT_LIMIT))
    if not (text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= MOST):
        raise InvalidRequestError(f"limit: a whole number from 1 to {MOST}, not {text[:20]!r}", "limit")
    return int(text)

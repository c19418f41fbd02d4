"""The ``/debug`` endpoints, for people and for ``pagewise vmstat`` and ``pagewise pmap``.

They show what KV memory holds, and the blocks of single requests. The JSON comes from the scheduler as it is.
"""

from typing import Literal

from aiohttp import web

from pagewise_gateway.http.context import Service
from pagewise_gateway.http.errors import InvalidRequestError, NotFoundError

DEFAULT_LIMIT, MOST = 100, 10_000


async def debug_memory(request: web.Request) -> web.Response:
    """Pools, requests and the prefix tree of every executor."""
    return await _report(request, "memory", "")


async def debug_request(request: web.Request) -> web.Response:
    """The blocks of one request and their history. The last few requests that have ended are known too."""
    name = request.match_info["request_id"]
    try:
        return await _report(request, "request", name.removeprefix("chatcmpl-").removeprefix("cmpl-"))
    except LookupError:
        raise NotFoundError(f"no request {name} is known", "request_id") from None


async def _report(request: web.Request, kind: Literal["memory", "request"], argument: str) -> web.Response:
    body = await request.app[Service.KEY].link.query(kind, argument, _limit(request))
    return web.Response(body=body, content_type="application/json")


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(DEFAULT_LIMIT))
    if not (text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= MOST):
        raise InvalidRequestError(f"limit: a whole number from 1 to {MOST}, not {text[:20]!r}", "limit")
    return int(text)

"""The ``/debug`` endpoints, for people and for ``pagewise vmstat`` and ``pagewise pmap``.

They show what KV memory holds, and the blocks of single requests. The JSON comes from the scheduler as it is. A client
sees its own requests only, unless it has an operator's key.
"""

from contextlib import suppress
from typing import Literal

from aiohttp import web

from pagewise_gateway.http.access import check_operator
from pagewise_gateway.http.context import CLIENT, Service
from pagewise_gateway.http.errors import InvalidRequestError, NotFoundError
from pagewise_gateway.http.parsing import count_request

DEFAULT_LIMIT, MOST = 100, 10_000
MOST_OF_OWN = 1_000
"""The most that a client without an operator's key may ask for: the scheduler does nothing else meanwhile."""
_LONGEST_NAME = 256


async def debug_memory(request: web.Request) -> web.Response:
    """Pools, requests and the prefix tree of every executor."""
    check_operator(request, "/debug/memory shows")
    return _json(await _report(request, "memory", ""))


async def debug_request(request: web.Request) -> web.Response:
    """The blocks of one request and their history, by our id or the client's own (the newest that has it).

    The last few requests that have ended are known too. A request of somebody else is answered like an unknown one.
    """
    name = request.match_info["request_id"]
    await count_request(request)
    # An id that a client has chosen may look like the id of one of our responses.
    for known_as in dict.fromkeys((name.removeprefix("chatcmpl-").removeprefix("cmpl-"), name)):
        with suppress(LookupError):
            return _json(await _report(request, "request", known_as))
    raise NotFoundError(f"no request {name[:_LONGEST_NAME]} is known", "request_id")


async def _report(request: web.Request, kind: Literal["memory", "request"], argument: str) -> bytes:
    """Ask the scheduler for a report.

    Raises:
        LookupError: it knows no such request, or none that this client may see.
    """
    if len(argument) > _LONGEST_NAME:
        raise LookupError(argument)
    return await request.app[Service.KEY].link.query(kind, argument, _limit(request), request[CLIENT].view)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(DEFAULT_LIMIT))
    most = MOST if request[CLIENT].rights.operator else MOST_OF_OWN
    if not (text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= most):
        raise InvalidRequestError(f"limit: a whole number from 1 to {most}, not {text[:20]!r}", "limit")
    return int(text)

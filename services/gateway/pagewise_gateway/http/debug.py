"""The ``/debug`` endpoints, for people and for ``pagewise vmstat`` and ``pagewise pmap``.

They show the content of the KV memory, the blocks of single requests, and where a request's time went. The reports come
from the scheduler. The gateway adds sentences, and whether the client read slowly if this gateway served it. A client
sees its own requests only, unless it has an operator's key.
"""

from contextlib import suppress
from typing import Literal

import msgspec
from aiohttp import web
from pagewise_shared.reports import RequestReport

from pagewise_gateway.http.access import check_operator
from pagewise_gateway.http.context import CLIENT, Service
from pagewise_gateway.http.errors import InvalidRequestError, NotFoundError
from pagewise_gateway.http.explanation import delivery, sentences
from pagewise_gateway.http.parsing import count_request
from pagewise_gateway.http.writing import Deliveries

DEFAULT_LIMIT, MOST = 100, 10_000
MOST_OF_OWN = 1_000
"""The most that a client without an operator's key may ask for: the scheduler does nothing else meanwhile."""
_LONGEST_NAME = 256
EXPLAINED = 16
"""Sequences, blocks and events that an explanation lists by default (``limit``)."""

_decode = msgspec.json.Decoder(RequestReport).decode


async def debug_memory(request: web.Request) -> web.Response:
    """The contents of the KV memory of every executor; ?limit=N cuts lists."""
    check_operator(request, "/debug/memory shows")
    return _json(await _report(request, "memory", ""))


async def debug_request(request: web.Request) -> web.Response:
    """A request's blocks and their history, by our id or your X-Request-Id.

    Of several requests with the same X-Request-Id, it is the newest. The last requests that have ended are known too. A
    request of another key is answered like an unknown one.
    """
    await count_request(request)
    return _json(await _request_report(request))


async def debug_explain(request: web.Request) -> web.Response:
    """Where a request's time went and its cached prefix was lost, in sentences."""
    await count_request(request)
    try:
        report = _decode(await _request_report(request, EXPLAINED))
    except msgspec.ValidationError:
        raise NotFoundError("this scheduler is of a version that explains no requests", "request_id") from None
    blocked = request.app[Deliveries.KEY].blocked(report.request_id)
    more = {
        "client": {"known": blocked is not None, "blocked_seconds": blocked},
        "sentences": [*sentences(report), *filter(None, [delivery(blocked, report.total_seconds)])],
    }
    return _json(msgspec.json.encode({**msgspec.to_builtins(report), **more}))


async def _request_report(request: web.Request, default_limit: int = DEFAULT_LIMIT) -> bytes:
    """Ask the scheduler for the report of the request in the path.

    Raises:
        NotFoundError: it knows no such request, or none that this client may see.
    """
    name = request.match_info["request_id"]
    # An id that a client has chosen may look like the id of one of our responses.
    for known_as in dict.fromkeys((name.removeprefix("chatcmpl-").removeprefix("cmpl-"), name)):
        with suppress(LookupError):
            return await _report(request, "request", known_as, default_limit)
    raise NotFoundError(f"no request {name[:_LONGEST_NAME]} is known", "request_id")


async def _report(
    request: web.Request, kind: Literal["memory", "request"], argument: str, default_limit: int = DEFAULT_LIMIT
) -> bytes:
    """Ask the scheduler for a report.

    Raises:
        LookupError: it knows no such request, or none that this client may see.
    """
    if len(argument) > _LONGEST_NAME:
        raise LookupError(argument)
    return await request.app[Service.KEY].scheduler_client.queries.report(
        kind, argument, limit_of(request, default_limit), request[CLIENT].view
    )


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def limit_of(request: web.Request, default: int = DEFAULT_LIMIT) -> int:
    """Return the limit that a request gives for lists.

    Raises:
        InvalidRequestError: it is no number in range.
    """
    text = request.query.get("limit", str(default))
    most = MOST if request[CLIENT].operator else MOST_OF_OWN
    if not (text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= most):
        raise InvalidRequestError(f"limit: a whole number from 1 to {most}, not {text[:20]!r}", "limit")
    return int(text)

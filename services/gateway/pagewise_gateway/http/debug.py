"""The ``/debug`` endpoints, for people and for ``pagewise vmstat`` and ``pagewise pmap``.

They show what KV memory holds, the blocks of single requests, and where a request's time went. The JSON comes from the
scheduler, and the gateway that served a request adds whether its client read slowly. A client sees its own requests
only, unless it has an operator's key.
"""

from contextlib import suppress
from typing import Any, Literal

import msgspec
from aiohttp import web

from pagewise_gateway.http.access import check_operator
from pagewise_gateway.http.context import CLIENT, Service
from pagewise_gateway.http.errors import InvalidRequestError, NotFoundError
from pagewise_gateway.http.parsing import count_request
from pagewise_gateway.http.writing import Deliveries

DEFAULT_LIMIT, MOST = 100, 10_000
MOST_OF_OWN = 1_000
"""The most that a client without an operator's key may ask for: the scheduler does nothing else meanwhile."""
_LONGEST_NAME = 256
_LEAST_SECONDS = 1e-3


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


async def debug_explain(request: web.Request) -> web.Response:
    """Answer where a request's time went and where its cached prefix was lost, by our id or the client's (the newest).

    The last requests that have ended are known too. A request of another key is answered like an unknown one.
    """
    name = request.match_info["request_id"]
    await count_request(request)
    scheduler_client, view = request.app[Service.KEY].scheduler_client, request[CLIENT].view
    for known_as in dict.fromkeys((name.removeprefix("chatcmpl-").removeprefix("cmpl-"), name)):
        if len(known_as) > _LONGEST_NAME:
            continue
        with suppress(LookupError):
            told: dict[str, Any] = msgspec.json.decode(
                await scheduler_client.query("request", known_as, key=view, detail="explain")
            )
            if "total_seconds" not in told:
                raise NotFoundError("this scheduler is of a version that explains no requests", "request_id")
            _add_client(told, request.app[Deliveries.KEY])
            return web.Response(body=msgspec.json.encode(told), content_type="application/json")
    raise NotFoundError(f"no request {name[:_LONGEST_NAME]} is known", "request_id")


def _add_client(told: dict[str, Any], deliveries: Deliveries) -> None:
    """Tell whether the client read slowly, if that is known here."""
    seconds = deliveries.blocked(told["request_id"])
    told["client"] = {"known": seconds is not None, "blocked_seconds": seconds}
    sentences = told.setdefault("sentences", [])
    if seconds is None:
        sentences.append("How fast its client read is not known to this gateway, which has not served it lately.")
    elif seconds >= _LEAST_SECONDS:
        waited = f"{1e3 * seconds:.0f} ms" if seconds < 1.0 else f"{seconds:.2f} s"
        sentences.append(f"Its answer waited {waited} for its client, which read more slowly than the tokens came.")


async def _report(request: web.Request, kind: Literal["memory", "request"], argument: str) -> bytes:
    """Ask the scheduler for a report.

    Raises:
        LookupError: it knows no such request, or none that this client may see.
    """
    if len(argument) > _LONGEST_NAME:
        raise LookupError(argument)
    return await request.app[Service.KEY].scheduler_client.query(kind, argument, _limit(request), request[CLIENT].view)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(DEFAULT_LIMIT))
    most = MOST if request[CLIENT].rights.operator else MOST_OF_OWN
    if not (text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= most):
        raise InvalidRequestError(f"limit: a whole number from 1 to {most}, not {text[:20]!r}", "limit")
    return int(text)

"""``/debug/explain``: where a request's time went, in sentences.

The scheduler tells most of it. Whether the client read slowly is known by the gateway that served the request, and by
no other.
"""

from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web

from pagewise_gateway.http.context import CLIENT, Service
from pagewise_gateway.http.errors import NotFoundError
from pagewise_gateway.http.parsing import count_request
from pagewise_gateway.http.writing import Deliveries

_LONGEST_NAME = 256
_LEAST_SECONDS = 1e-3


async def debug_explain(request: web.Request) -> web.Response:
    """Answer where a request's time went and where its cached prefix was lost, by our id or the client's (the newest).

    The last requests that have ended are known too. A request of another key is answered like an unknown one.
    """
    name = request.match_info["request_id"]
    await count_request(request)
    link, view = request.app[Service.KEY].link, request[CLIENT].view
    for known_as in dict.fromkeys((name.removeprefix("chatcmpl-").removeprefix("cmpl-"), name)):
        if len(known_as) > _LONGEST_NAME:
            continue
        with suppress(LookupError):
            told: dict[str, Any] = msgspec.json.decode(
                await link.query("request", known_as, key=view, detail="explain")
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

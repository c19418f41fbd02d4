"""The routes of the console. The page needs no API key, because it holds no data; everything else needs an operator's
where there are keys."""

from contextlib import suppress
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from aiohttp import web
from msgspec import Meta, Struct
from pagewise_shared.protocol import ConsoleView
from pagewise_shared.protocol.gateway_messages import MAX_CELLS, Colour

from pagewise_gateway.http.access import check_operator
from pagewise_gateway.http.console.assets import Assets
from pagewise_gateway.http.console.feeds import MAX_CONSOLES, Feeds, with_text
from pagewise_gateway.http.context import Service
from pagewise_gateway.http.errors import InvalidRequestError, NotFoundError, OverloadedError
from pagewise_gateway.http.writing import EventWriter

_PAGE = "/console"
Query = TypeVar("Query", bound=Struct)

_LONGEST_NAME = 256
_MOST_TIERS = 4
_Part = Literal["fleet", "requests", "map", "prefixes"]
_Name = Annotated[str, Meta(max_length=_LONGEST_NAME)]
_LONGEST_TIER = 16
_Tier = Annotated[str, Meta(max_length=_LONGEST_TIER)]
_Number = Annotated[int, Meta(ge=0, lt=2**31)]


class _StreamQuery(Struct, forbid_unknown_fields=True):
    """The parameters of ``/console/stream``. ``tier``: the tiers whose maps it has, with commas."""

    executor: _Name = ""
    tier: Annotated[str, Meta(max_length=64)] = "device"
    first: _Number = 0
    count: _Number = 0
    colour: Colour = "state"
    cells: Annotated[int, Meta(ge=1, le=MAX_CELLS)] = 2048
    parts: str = ""


class _BlockQuery(Struct, forbid_unknown_fields=True):
    """The parameters of ``/console/block``."""

    executor: _Name
    block: _Number
    tier: _Tier = "device"


def add_console(app: web.Application, feeds: Feeds, *, shows_text: bool) -> None:
    """Add the console to an application. ``shows_text``: whether operators may see the text of blocks."""
    app[Assets.KEY], app[Feeds.KEY], app[_SHOWS_TEXT] = Assets(), feeds, shows_text
    app.on_shutdown.append(feeds.close)
    app.on_cleanup.append(feeds.wait)
    app.add_routes(
        [
            web.get("/", redirect),
            web.get(_PAGE, page),
            web.get("/console/assets/{name}", asset),
            web.get("/console/stream", stream),
            web.get("/console/block", block),
            web.post("/console/requests/{request_id}/abort", abort),
        ]
    )


_SHOWS_TEXT = web.AppKey("console_shows_text", bool)


async def redirect(_: web.Request) -> web.Response:
    """Redirect from ``/`` to the console, for people who open the server's address in a browser."""
    return web.Response(status=302, headers={"Location": _PAGE})


async def page(request: web.Request) -> web.Response:
    """Answer with the console's page."""
    return request.app[Assets.KEY].page(request)


async def asset(request: web.Request) -> web.Response:
    """Answer with a script or a style sheet of the page."""
    return request.app[Assets.KEY].file(request, request.match_info["name"])


async def stream(request: web.Request) -> web.StreamResponse:
    """Send server-sent events with the parts that the query asks for, until the client leaves or the gateway stops."""
    check_operator(request, "the console shows")
    feeds, views = request.app[Feeds.KEY], _views(_parsed(request, _StreamQuery), request.app[_SHOWS_TEXT])
    if len(feeds) >= MAX_CONSOLES:
        raise OverloadedError(f"{MAX_CONSOLES} consoles are open at this gateway: close one")
    writer = EventWriter(request)
    with feeds.watching(views) as watcher:
        await writer.send(b": the console of Pagewise\n\n")
        while frames := await watcher.take():
            await writer.send(frames)
    return await writer.finish()


def _views(query: _StreamQuery, text: bool) -> list[ConsoleView]:
    """Return the views that a stream has. ``text``: whether they may have the text of blocks.

    Raises:
        InvalidRequestError: there is no such part or tier, or there are too many tiers.
    """
    parts = query.parts.split(",") if query.parts else get_args(_Part)
    if unknown := set(parts).difference(get_args(_Part)):
        raise InvalidRequestError(f"parts: there is none called {min(unknown)[:20]!r}", "parts")
    if query.colour != "state" and not query.executor and "map" in parts:
        raise InvalidRequestError(f"colour={query.colour} needs an executor", "colour")
    tiers = dict.fromkeys(query.tier.split(","))
    if len(tiers) > _MOST_TIERS:
        raise InvalidRequestError(f"tier: at most {_MOST_TIERS} are shown at a time", "tier")
    if len(longest := max(tiers, key=len)) > _LONGEST_TIER:
        raise InvalidRequestError(f"tier: there is none called {longest[:20]!r}", "tier")
    region = query.first, query.count, query.colour, query.cells
    views = {
        "fleet": [ConsoleView("fleet")],
        "requests": [ConsoleView("requests")],
        "map": [ConsoleView("map", query.executor, tier, *region) for tier in tiers],
        "prefixes": [ConsoleView("prefixes", query.executor, tokens=text)],
    }
    return [view for part in parts for view in views[part]]


async def block(request: web.Request) -> web.Response:
    """Answer with the details of one block."""
    check_operator(request, "the console shows")
    query = _parsed(request, _BlockQuery)
    view = ConsoleView("block", query.executor, query.tier, block=query.block, tokens=request.app[_SHOWS_TEXT])
    with suppress(LookupError):
        service = request.app[Service.KEY]
        body = await service.scheduler_client.queries.report("console", view=view)
        if view.tokens:
            body = await with_text(service.tokenizer, body)
        return web.Response(body=body, content_type="application/json")
    raise NotFoundError(f"executor {query.executor!r} has no block {query.block} in its tier {query.tier!r}")


async def abort(request: web.Request) -> web.Response:
    """Abort a request, by our id or its client's. Its client gets the finish reason ``abort``."""
    check_operator(request, "aborting a request touches")
    name = request.match_info["request_id"][:_LONGEST_NAME]
    scheduler_client = request.app[Service.KEY].scheduler_client
    for known_as in dict.fromkeys((name.removeprefix("chatcmpl-").removeprefix("cmpl-"), name)):
        if await scheduler_client.queries.end_request(known_as):
            return web.Response(status=204)
    raise NotFoundError(f"no request {name} runs or waits", "request_id")


CONSOLE_HANDLERS = (redirect, page, asset, stream, block, abort)
"""All handlers of the console."""


def _parsed(request: web.Request, kind: type[Query]) -> Query:
    """Return the parameters of a request.

    Raises:
        InvalidRequestError: one is unknown, missing or out of range.
    """
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error)) from None

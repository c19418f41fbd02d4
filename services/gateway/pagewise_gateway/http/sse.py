"""Server-sent events to one client."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Protocol

import msgspec
from aiohttp import web

from pagewise_gateway.generation import GenerationError, SequenceDelta
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.errors import APIError, InternalError, failure
from pagewise_gateway.http.tracing import about_request
from pagewise_gateway.http.writing import in_time
from pagewise_gateway.link import LiveRequest

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

_MARK = "\x00text"
"""The placeholder of the text in a template; no chunk contains it otherwise."""

encode = msgspec.json.Encoder().encode
"""Encodes a value as JSON."""


def event(data: object) -> bytes:
    """Return an event that carries the JSON of ``data``."""
    return b"data: %b\n\n" % encode(data)


class EventTemplate:
    """Makes events that differ in one text only, which is in them once or more. What is around it is encoded once."""

    __slots__ = ("_around",)

    def __init__(self, chunk: Callable[[str], object]) -> None:
        """``chunk`` returns the data of the event for a given text."""
        self._around = event(chunk(_MARK)).split(encode(_MARK))

    def event(self, text: str) -> bytes:
        """Return the event for this text."""
        return encode(text).join(self._around)


class EventWriter:
    """Writes events to a client, and closes the connection of a client that stops reading.

    The data that is buffered for a client is bounded: the transport's buffer (64 KiB) and one more write.
    """

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **Service.headers(request),
            }
        )
        self._request = request
        self._chunked: asyncio.WriteTransport | None = None

    def ready(self) -> bool:
        """Whether the client has taken everything so far, so that ``write`` may be called."""
        transport = self._chunked
        return transport is not None and not transport.get_write_buffer_size() and not transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write the bytes of events without waiting.

        Nearly every token is written by this method. It bypasses aiohttp's writer, which needs six calls for the same.
        """
        if data and self._chunked is not None:
            self._chunked.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def send(self, data: bytes) -> None:
        """Write the bytes of events, and wait until there is room for more.

        Raises:
            ConnectionError: the client is gone, or stopped reading.
        """
        if not data:
            return
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await in_time(self._request, self.response.write(data))
        if self.response.headers.get("Transfer-Encoding") == "chunked":  # as it is for all but HTTP/1.0
            self._chunked = self._request.transport

    async def finish(self) -> web.StreamResponse:
        """End the stream."""
        await in_time(self._request, self.response.write_eof())
        return self.response

    async def fail(self, event: bytes) -> web.StreamResponse:
        """End the stream with an event that carries an error."""
        await self.send(event)
        return await self.finish()


class EventSource(Protocol):
    """What makes the events of a stream. ``end``: the bytes behind the last event."""

    end: bytes

    @property
    def cheap(self) -> bool:
        """Whether all events are made so fast that there is no need for slices."""

    def quick(self) -> bool:
        """Whether the events of what has arrived may be made at once."""

    def events(self, news: list[SequenceDelta]) -> bytes:
        """Return the events for these deltas."""

    def pieces(self, news: Iterable[SequenceDelta]) -> Iterator[bytes]:
        """Yield the same in pieces."""

    def last(self) -> bytes:
        """Return the event that ends a stream before ``[DONE]``, or nothing."""

    def error(self, error: APIError) -> bytes:
        """Return the event that ends a stream which has failed, in the shape of its API."""


async def stream_events(request: web.Request, live: LiveRequest, source: EventSource) -> web.StreamResponse:
    """Answer with a stream: events of all deltas as they arrive, then the last one, then ``[DONE]``.

    The response begins with the first deltas. So a request that fails before them still gets an error status, and
    clients that measure the time to the first event measure the time to the first token.
    """
    writer, slices, key = EventWriter(request), request.app[Service.KEY].slices, request[CLIENT].name

    def write_cheap() -> bool:
        """Write what has arrived, if the client has taken everything before. This does not wake a task for every token,
        which would take as long as all other work on it."""
        if not writer.ready():
            return False
        writer.write(source.events(live.take_news()))
        return True

    def write_quick() -> bool:
        """The same for events that take longer."""
        if not (writer.ready() and source.quick()):
            return False
        began = monotonic()
        writer.write(source.events(live.take_news()))
        slices.spend(monotonic() - began)
        return True

    follower = write_cheap if source.cheap else write_quick
    try:
        while news := await live.next():
            if source.cheap:
                await writer.send(source.events(news))
            else:
                pieces = source.pieces(news)
                del news  # so that each delta is freed once its events are made
                while (piece := await slices.next(key, pieces)) is not None:
                    await writer.send(piece)
            live.follow(follower)
    except GenerationError as error:
        if not writer.response.prepared:
            raise
        return await writer.fail(source.error(failure(error)))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except APIError as error:
        if not writer.response.prepared:
            raise
        return await writer.fail(source.error(error))
    except Exception:
        if not writer.response.prepared:
            raise
        log.exception("request %s failed", request[REQUEST_ID], extra=about_request(request))
        return await writer.fail(source.error(InternalError("internal error")))
    await writer.send(source.last() + source.end)
    return await writer.finish()

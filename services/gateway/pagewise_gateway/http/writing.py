"""Writes responses and streams of events to clients that may read slowly."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from time import monotonic
from typing import ClassVar, Protocol

import msgspec
from aiohttp import hdrs, web

from pagewise_gateway.generation import GenerationError, SequenceDelta
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.errors import APIError, InternalError, failure
from pagewise_gateway.http.tracing import about_request
from pagewise_gateway.scheduler_client import LiveRequest

log = logging.getLogger(__name__)

MOST_DELIVERIES = 4096
"""Requests of which is remembered how long their clients let them wait."""
_PIECE = 65_536
"""Bytes that are written at a time, as many as a transport buffers."""
DONE = b"data: [DONE]\n\n"
_MARK = "\x00text"
"""The placeholder of the text in a template; no chunk contains it otherwise."""
encode = msgspec.json.Encoder().encode
"""Encodes a value as JSON."""


class Deliveries:
    """How long the last requests waited for their clients to read, in seconds, by our id: at most ``most`` of them."""

    KEY: ClassVar[web.AppKey["Deliveries"]] = web.AppKey("deliveries")

    def __init__(self, most: int = MOST_DELIVERIES) -> None:
        self._most = most
        self._blocked: OrderedDict[str, float] = OrderedDict()

    def add(self, request_id: str, seconds: float) -> None:
        """A request was served here, or one that is being served has waited so much longer."""
        self._blocked[request_id] = self._blocked.pop(request_id, 0.0) + seconds
        if len(self._blocked) > self._most:
            self._blocked.popitem(last=False)

    def blocked(self, request_id: str) -> float | None:
        """How long that request has waited; None: it was not served here, or too long ago."""
        return self._blocked.get(request_id)


def waited_for_client(request: web.Request, seconds: float) -> None:
    """Note that the answer of a request waited so long for its client to read."""
    request.app[Deliveries.KEY].add(request[REQUEST_ID], seconds)


async def in_time(request: web.Request, writing: Awaitable[None]) -> None:
    """Wait until something has been written. The connection is closed if the client does not read meanwhile.

    Raises:
        ConnectionError: the client is gone, or has read nothing for ``--write-timeout``.
    """
    service, began = request.app[Service.KEY], monotonic()
    try:
        async with asyncio.timeout(service.write_timeout):
            await writing
    except TimeoutError:
        service.metrics.slow_readers.inc()
        log.info(
            "request %s: its client stopped reading, closing the connection",
            request[REQUEST_ID],
            extra=about_request(request),
        )
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client stopped reading") from None
    finally:
        waited_for_client(request, monotonic() - began)


async def write_if_large(request: web.Request, response: web.StreamResponse) -> None:
    """Write a response now if a client that does not read it would hold it up.

    aiohttp would write it after the request's handler, and wait without a limit. It leaves alone what is written
    already. A small response goes there, unless the client has left much of earlier ones unread: it fits into buffers.

    Raises:
        ConnectionError: as in ``in_time``.
    """
    transport = request.transport
    if not isinstance(response, web.Response) or transport is None or request.method == hdrs.METH_HEAD:
        return
    body = response.body
    if not isinstance(body, (bytes, bytearray)) or len(body) + transport.get_write_buffer_size() <= _PIECE:
        return
    transport.set_write_buffer_limits(0)  # from now on, waiting ends when nothing is left of what was written
    await response.prepare(request)
    last = (len(body) - 1) // _PIECE * _PIECE
    for start in range(0, last, _PIECE):  # the limit is for each piece: who reads may take longer for the whole
        await in_time(request, response.write(body[start : start + _PIECE]))
    response.body = body[max(last, 0) :]  # what ``write_eof`` writes
    await in_time(request, response.write_eof())


def known(error: Exception, request: web.Request) -> APIError:
    """Return the error that a client gets for an exception; one that is a bug is logged."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, GenerationError):
        return failure(error)
    log.error("request %s failed", request[REQUEST_ID], extra=about_request(request), exc_info=error)
    return InternalError(f"internal error; see the server's log of request {request[REQUEST_ID]}")


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
        """Whether all events are made so fast that they need no turns."""

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
    writer, turns, key = EventWriter(request), request.app[Service.KEY].turns, request[CLIENT].name

    def write_cheap() -> bool:
        """Write what has arrived, if the client has taken everything before. This does not wake a task for every token,
        which would take as long as all other work on it."""
        if not writer.ready():
            return False
        writer.write(source.events(live.take_deltas()))
        return True

    def write_quick() -> bool:
        """The same for events that take longer."""
        if not (writer.ready() and source.quick() and turns.free()):
            return False
        writer.write(source.events(live.take_deltas()))
        turns.done()
        return True

    follower = write_cheap if source.cheap else write_quick
    try:
        while news := await live.next():
            if source.cheap:
                await writer.send(source.events(news))
            else:
                pieces = source.pieces(news)
                del news  # so that each delta is freed once its events are made
                while (piece := await turns.next(key, pieces)) is not None:
                    await writer.send(piece)
            live.follow(follower)
    except ConnectionError:
        raise
    except Exception as error:
        if not writer.response.prepared:
            raise
        return await writer.fail(source.error(known(error, request)))
    await writer.send(source.last() + source.end)
    return await writer.finish()

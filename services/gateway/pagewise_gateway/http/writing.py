"""Writes responses and events to clients that may read slowly."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import ClassVar

import msgspec
from aiohttp import hdrs, web

from pagewise_gateway.generation import GenerationError
from pagewise_gateway.http.context import REQUEST_ID, Service
from pagewise_gateway.http.errors import APIError, InternalError, failure
from pagewise_gateway.http.request_log import about_request

log = logging.getLogger(__name__)

MAX_DELIVERIES = 4096
"""The number of requests whose waiting times for their clients are remembered."""
_PIECE = 65_536
"""Bytes that are written at a time, as many as a transport buffers."""
DONE = b"data: [DONE]\n\n"
_MARK = "\x00text"
"""The placeholder of the text in a template; no chunk contains it otherwise."""
encode = msgspec.json.Encoder().encode
"""Encodes a value as JSON."""


class Deliveries:
    """The seconds that each of the last ``most`` requests waited for its client to read, by our request id."""

    KEY: ClassVar[web.AppKey["Deliveries"]] = web.AppKey("deliveries")

    def __init__(self, most: int = MAX_DELIVERIES) -> None:
        self._most = most
        self._blocked: OrderedDict[str, float] = OrderedDict()

    def add(self, request_id: str, seconds: float) -> None:
        """Add seconds to the waiting time of a request, which this gateway serves."""
        self._blocked[request_id] = self._blocked.pop(request_id, 0.0) + seconds
        if len(self._blocked) > self._most:
            self._blocked.popitem(last=False)

    def blocked(self, request_id: str) -> float | None:
        """Return the waiting time in seconds; None: the request was not served here, or too long ago."""
        return self._blocked.get(request_id)


def note_blocked(request: web.Request, seconds: float) -> None:
    """Add seconds to the time that the answer of a request waited for its client to read."""
    request.app[Deliveries.KEY].add(request[REQUEST_ID], seconds)


async def in_time(request: web.Request, writing: Awaitable[None]) -> None:
    """Await a write. The connection is closed if the client does not read meanwhile.

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
        note_blocked(request, monotonic() - began)


async def write_if_large(request: web.Request, response: web.StreamResponse) -> None:
    """Write a response now if a client that does not read it would hold it up.

    aiohttp writes an unwritten response after the request's handler, and waits without a limit. A small response is
    left to aiohttp, because it fits into buffers, unless the client has left much of earlier responses unread.

    Raises:
        ConnectionError: as in ``in_time``.
    """
    transport = request.transport
    if not isinstance(response, web.Response) or transport is None or request.method == hdrs.METH_HEAD:
        return
    body = response.body
    if not isinstance(body, (bytes, bytearray)) or len(body) + transport.get_write_buffer_size() <= _PIECE:
        return
    transport.set_write_buffer_limits(0)  # from now on, a write waits until the buffer is empty
    await response.prepare(request)
    last = (len(body) - 1) // _PIECE * _PIECE
    for start in range(0, last, _PIECE):  # the time limit is for each piece: a client that reads may take longer
        await in_time(request, response.write(body[start : start + _PIECE]))
    response.body = body[max(last, 0) :]  # which ``write_eof`` writes
    await in_time(request, response.write_eof())


def known_error(error: Exception, request: web.Request) -> APIError:
    """Return the error that a client gets for an exception. An exception that is a bug is logged."""
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
    """Makes events that differ in one text only, which is in them once or more. The rest is encoded once."""

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

    Fields:
        wrote: whether anything was written since the last check of ``SilenceWatch``; true at the beginning.
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
        self.wrote = True

    def ready(self) -> bool:
        """Return whether the client has taken everything so far, so that ``write`` may be called."""
        transport = self._chunked
        return transport is not None and not transport.get_write_buffer_size() and not transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write the bytes of events without waiting.

        Nearly every token is written by this method. It bypasses aiohttp's writer, which needs six calls for the same.
        """
        if data and self._chunked is not None:
            self.wrote = True
            self._chunked.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def send(self, data: bytes) -> None:
        """Write the bytes of events, and wait until there is room for more.

        Raises:
            ConnectionError: the client is gone, or stopped reading.
        """
        if not data:
            return
        self.wrote = True
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await in_time(self._request, self.response.write(data))
        if self.response.headers.get("Transfer-Encoding") == "chunked":  # as it is for all but HTTP/1.0
            self._chunked = self._request.transport

    async def finish(self) -> web.StreamResponse:
        """End the stream."""
        await in_time(self._request, self.response.write_eof())
        return self.response


class SilenceWatch:
    """A context that calls ``silent`` when nothing was written for half of ``interval`` seconds or longer; 0: never.

    Nearly every token is a write, so a write only sets a flag, which a timer reads and clears twice in an interval.
    Before the first write, the first call comes after a whole interval.
    """

    __slots__ = ("_half", "_silent", "_timer", "_writer")

    def __init__(self, writer: EventWriter, interval: float, silent: Callable[[], None]) -> None:
        self._writer, self._half, self._silent = writer, interval / 2, silent
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._half:
            self._timer = asyncio.get_running_loop().call_later(self._half, self._look)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._writer.wrote:
            self._writer.wrote = False
        else:
            self._silent()
        self._timer = asyncio.get_running_loop().call_later(self._half, self._look)

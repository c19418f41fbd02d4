"""Server-sent events to one client."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from pagewise_gateway.generation import GenerationError, SequenceDelta
from pagewise_gateway.http.context import REQUEST_ID, Service
from pagewise_gateway.http.errors import InternalError, failure
from pagewise_gateway.http.generate import Generations

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

_SMALL = 32 * 1024
"""A write of so many bytes to a transport that has nothing buffered never waits."""

_encode = msgspec.json.Encoder().encode


class EventWriter:
    """Writes events, and cuts a client off that stops reading.

    What is buffered for a client is bounded: the transport's buffer (64 KiB) and one write more.
    """

    def __init__(self, request: web.Request, service: Service) -> None:
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **service.headers(request),
            }
        )
        self._request = request
        self._service = service

    async def send(self, events: Iterable[object], end: bytes = b"") -> None:
        """Write events, and raw bytes behind them, in one go.

        Raises:
            ConnectionError: the client is gone, or stopped reading.
        """
        parts: list[bytes] = []
        for event in events:
            parts += (b"data: ", _encode(event), b"\n\n")
        if end:
            parts.append(end)
        if not parts:
            return
        if not self.response.prepared:
            await self.response.prepare(self._request)
        data = b"".join(parts)
        transport = self._request.transport
        if transport is not None and len(data) <= _SMALL and not transport.get_write_buffer_size():
            await self.response.write(data)  # the usual case, without the price of a timeout
        else:
            await self._patiently(self.response.write(data))

    async def finish(self) -> web.StreamResponse:
        """End the stream."""
        await self._patiently(self.response.write_eof())
        return self.response

    async def _patiently(self, writing: Any) -> None:
        try:
            async with asyncio.timeout(self._service.patience):
                await writing
        except TimeoutError:
            self._service.metrics.slow_readers.inc()
            log.info("request %s: the client stopped reading, cutting it off", self._request[REQUEST_ID])
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from None


async def stream_events(
    request: web.Request,
    service: Service,
    generations: Generations,
    chunks: Callable[[list[SequenceDelta]], list[object]],
    last: Callable[[], list[object]],
) -> web.StreamResponse:
    """Answer with a stream: the ``chunks`` of each piece of news, the ``last`` events, ``[DONE]``.

    The response starts with the first news, so that a request that fails before still gets a proper status, and
    clients that time the first event measure the first token.
    """
    writer = EventWriter(request, service)
    try:
        async with aclosing(generations.deltas()) as news:
            async for deltas in news:
                await writer.send(chunks(deltas))
    except GenerationError as error:
        if not writer.response.prepared:
            raise
        await writer.send([], b"data: " + failure(error).body() + b"\n\n")
        return await writer.finish()
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        if not writer.response.prepared:
            raise
        log.exception("request %s failed", request[REQUEST_ID])
        await writer.send([], b"data: " + InternalError("internal error").body() + b"\n\n")
        return await writer.finish()
    await writer.send(last(), DONE)
    return await writer.finish()

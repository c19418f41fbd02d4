"""Writes to clients that may read slowly, or not at all, or that still send a body that was refused."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from time import monotonic

from aiohttp import hdrs, web

from pagewise_gateway.http.client_connection import LINGER_SECONDS, ClientConnection
from pagewise_gateway.http.context import REQUEST_ID, Service
from pagewise_gateway.http.explain import waited_for_client
from pagewise_gateway.http.tracing import about_request

log = logging.getLogger(__name__)

_PIECE = 65_536
"""Bytes that are written at a time, as many as a transport buffers."""


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


async def write_early(request: web.Request, response: web.StreamResponse) -> None:
    """Write a response before the body of its request has been read.

    The connection goes on only if the rest of the body is small: nobody should have to read much for nothing.

    Raises:
        ConnectionError: as in ``in_time``.
    """
    if not _rest_is_small(request):
        response.force_close()
    await response.prepare(request)
    await in_time(request, response.write_eof())


async def discard_body(request: web.Request) -> None:
    """Read and throw away the rest of a body, after the response was written."""
    if not _rest_is_small(request):
        if isinstance(request.transport, ClientConnection):
            await request.transport.linger(request.content_length)
        return
    with contextlib.suppress(TimeoutError, web.RequestPayloadError):
        async with asyncio.timeout(LINGER_SECONDS):
            while await request.content.readany():
                pass


def _rest_is_small(request: web.Request) -> bool:
    return request.content_length is not None and request.content_length <= _PIECE

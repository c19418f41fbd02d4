"""The listening sockets: how many connections there may be, and how long one may be idle."""

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from pagewise_shared.service_process import raise_file_limit

from pagewise_gateway.http.errors import UnavailableError
from pagewise_gateway.http.refused_requests import ServerLog
from pagewise_gateway.http.tls import Certificate
from pagewise_gateway.metrics import Metrics

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
MAX_HEADERS, MAX_LINE = 128, 8190
"""The most headers of a request, and the most bytes of its first line and of each name and value."""
_READ_BYTES = 16_384
"""A connection is not read while twice as many bytes of a body, or a sixteenth as many chunks, wait for its request."""
_PAUSE_SECONDS = 1.0

OTHER_FILES = 256
"""Open files that are not connections of clients: the connection to the scheduler, logs, the model."""


@asynccontextmanager
async def listening(
    app: web.Application,
    metrics: Metrics,
    *,
    host: str,
    port: int,
    max_connections: int,
    keepalive_timeout: float,
    shutdown_timeout: float,
    reuse_port: bool = False,
    certificate: Certificate | None = None,
) -> AsyncIterator[asyncio.Server]:
    """Serve ``app`` until the context is left. To close the server that this returns ends accepting, not serving.

    ``max_connections``: more are answered with a 503 and closed. ``keepalive_timeout``: seconds that a connection may
    be without a request, or take to send the head of one, or for the handshake of TLS. ``shutdown_timeout``: seconds
    that requests in progress get when the context is left. ``reuse_port``: whether other processes may listen on the
    same port.

    Raises:
        OSError: the address cannot be bound.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=shutdown_timeout,
        keepalive_timeout=keepalive_timeout,
        access_log=None,
        logger=ServerLog(),
        auto_decompress=False,  # bodies are inflated in pieces
        lingering_time=0,  # ``discard_body`` reads what is left of a body, and lets others run in between
        read_bufsize=_READ_BYTES,
        max_headers=MAX_HEADERS,
        max_line_size=MAX_LINE,
        max_field_size=MAX_LINE,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        try:
            server = await asyncio.get_running_loop().create_server(
                _limited(runner.server, max_connections, metrics),
                host,
                port,
                ssl=None if certificate is None else certificate.context,
                ssl_handshake_timeout=None if certificate is None else keepalive_timeout,
                backlog=BACKLOG,
                reuse_port=reuse_port,
            )
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from error
        try:
            yield server
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _limited(server: web.Server, most: int, metrics: Metrics) -> Callable[[], asyncio.Protocol]:
    """Return a function that makes the protocol of a new connection: one of ``server`` for up to ``most`` of them."""
    metrics.http_connections.set_function(lambda: len(server.connections))
    warned = False

    def protocol() -> asyncio.Protocol:
        nonlocal warned
        if len(server.connections) < most:
            return server()
        metrics.http_connections_refused.inc()
        if not warned:
            warned = True
            log.warning("%d connections are open, which is the limit: others are answered with 503", most)
        return _TurnAway()

    return protocol


class _TurnAway(asyncio.Protocol):
    """Answers that there are too many connections, and closes the connection after a pause.

    Closing it at once, while the client still sends, would reset it before the client has read the answer.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        asyncio.get_running_loop().call_later(_PAUSE_SECONDS, transport.abort)
        error = UnavailableError("too many connections")
        body = error.body()
        head = (
            f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Retry-After: {error.retry_after}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        if transport.can_write_eof():  # TLS cannot
            transport.write_eof()


def most_connections(wanted: int) -> int:
    """Raise the limit of open files, and return ``wanted``, or fewer connections if the limit has no room for them."""
    files = raise_file_limit()
    if files == resource.RLIM_INFINITY or files - OTHER_FILES >= wanted:
        return wanted
    most = max(1, files - OTHER_FILES)
    log.warning("this process may open %d files: it serves at most %d connections, not %d", files, most, wanted)
    return most

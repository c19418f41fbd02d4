"""The listening socket: how many connections there may be, and for how long one may idle."""

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from pagewise_scheduler.http.errors import UnavailableError
from pagewise_scheduler.metrics import Metrics

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""

OTHER_FILES = 256
"""Open files that are no connections of clients: executors, logs, the model."""


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
) -> AsyncIterator[tuple[str, int]]:
    """Serve ``app`` until the context is left; yields the address.

    ``keepalive_timeout``: seconds that a connection may be without a request, or take to send the head of one.
    ``shutdown_timeout``: seconds that requests in progress have at the end.

    Raises:
        OSError: the address cannot be bound.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        keepalive_timeout=keepalive_timeout,
        shutdown_timeout=shutdown_timeout,
        access_log=None,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        door = _Door(runner.server, max_connections, metrics)
        server = await asyncio.get_running_loop().create_server(door, host, port, backlog=BACKLOG)
        try:
            yield server.sockets[0].getsockname()[:2]
        finally:
            server.close()
    finally:
        await runner.cleanup()


class _Door:
    """Makes the protocol of each new connection: aiohttp's, or one that turns it away."""

    def __init__(self, server: web.Server, most: int, metrics: Metrics) -> None:
        self._server, self._most, self._metrics = server, most, metrics
        self._told = False

    def __call__(self) -> asyncio.Protocol:
        number = len(self._server.connections)
        self._metrics.http_connections.set(number)
        if number < self._most:
            return self._server()
        self._metrics.connections_refused.inc()
        if not self._told:
            self._told = True
            log.warning("%d connections are open, the most there may be: further ones are answered 503", number)
        return _TurnAway()


class _TurnAway(asyncio.Protocol):
    """Says that there are too many connections, and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        error = UnavailableError("too many connections")
        body = error.body()
        head = (
            f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Retry-After: {error.retry_after}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.close()


def raise_file_limit(max_connections: int) -> int:
    """Let the process open as many files as it may; returns how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard - OTHER_FILES >= max_connections:
        return max_connections
    most = max(1, hard - OTHER_FILES)
    log.warning("the process may open %d files: at most %d connections, not %d", hard, most, max_connections)
    return most

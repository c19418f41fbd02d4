"""The listening sockets: how many connections there may be, and how long one may be idle."""

import asyncio
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

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
) -> AsyncIterator["_Acceptor"]:
    """Serve ``app`` until the context is left. To close the acceptor that this returns ends accepting, not serving.

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
        acceptor = _Acceptor(runner.server, metrics, max_connections, certificate, keepalive_timeout)
        try:
            listeners = await _bound(host, port, reuse_port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # of a name
            raise OSError(error.errno, f"cannot listen on {host} port {port}: {reason}") from error
        for listener in listeners:
            acceptor.open(listener)
        try:
            yield acceptor
        finally:
            await acceptor.close()
    finally:
        await runner.cleanup()


async def _bound(host: str, port: int, reuse_port: bool) -> list[socket.socket]:
    """Return a listening socket for each address of ``host``."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as opened:
        sockets = []
        for family, _, _, _, address in found:
            listener = opened.enter_context(
                socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=reuse_port)
            )
            listener.setblocking(False)
            sockets.append(listener)
        opened.pop_all()
        return sockets


class _Acceptor:
    """Accepts connections up to a limit, and answers those beyond it with a 503.

    It accepts all connections that wait. The servers of uvloop accept one in each iteration of the event loop, which is
    a few per second while other connections keep the loop busy. ``address``: host and port of the first socket.
    """

    def __init__(
        self,
        server: web.Server,
        metrics: Metrics,
        most: int,
        certificate: Certificate | None,
        handshake_timeout: float,
    ) -> None:
        self.address = ("", 0)
        self._server, self._metrics, self._most = server, metrics, most
        self._tls: dict[str, Any] = {}
        if certificate is not None:
            self._tls = {"ssl": certificate.context, "ssl_handshake_timeout": handshake_timeout}
        metrics.http_connections.set_function(lambda: len(server.connections))
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._arriving: set[asyncio.Task[None]] = set()
        self._num_connecting = 0
        self._warned = False

    def open(self, listener: socket.socket) -> None:
        """Accept connections of a listening socket from now on."""
        self.address = self.address if self._listeners else listener.getsockname()[:2]
        self._listeners.append(listener)
        self._loop.add_reader(listener, self._accept, listener)

    async def close(self) -> None:
        """Stop accepting. Waiting connections are accepted first, because closing the socket would break them."""
        for listener in self._listeners:
            self._accept(listener)
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        await asyncio.gather(*self._arriving)

    def _accept(self, listener: socket.socket) -> None:
        if listener not in self._listeners:
            return
        for _ in range(BACKLOG):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of files or memory: the waiting connections are accepted later
                log.error("cannot accept connections for %g s: %s", _PAUSE_SECONDS, error)
                self._loop.remove_reader(listener)
                self._loop.call_later(_PAUSE_SECONDS, self._resume, listener)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._take(connection))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    async def _take(self, connection: socket.socket) -> None:
        welcome = len(self._server.connections) + self._num_connecting < self._most
        self._num_connecting += 1  # the server counts a connection once it is made: with TLS, after the handshake
        try:
            protocol = self._server if welcome else self._turn_away
            await self._loop.connect_accepted_socket(protocol, connection, **self._tls)
        except OSError as error:  # the client hung up already, or its TLS handshake failed
            log.debug("a client did not get a connection: %s", error)
            connection.close()
        finally:
            self._num_connecting -= 1

    def _turn_away(self) -> "_TurnAway":
        self._metrics.http_connections_refused.inc()
        if not self._warned:
            self._warned = True
            log.warning("%d connections are open, which is the limit: others are answered with 503", self._most)
        return _TurnAway()


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

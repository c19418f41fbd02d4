"""The listening sockets: how many connections there may be, and how long one may be idle."""

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web
from pagewise_shared.service_process import raise_file_limit

from pagewise_gateway.http.client_connection import ClientConnection, ConnectionFaults
from pagewise_gateway.http.context import Service
from pagewise_gateway.http.errors import UnavailableError
from pagewise_gateway.http.server_log import ServerLog
from pagewise_gateway.http.tls import Certificate
from pagewise_gateway.metrics import Metrics

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""

_AT_ONCE = 128
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
) -> AsyncIterator["Acceptor"]:
    """Serve ``app`` until the context is left.

    ``keepalive_timeout``: seconds that a connection may be without a request, or take to send the head of one.
    ``shutdown_timeout``: seconds that requests in progress get when the context is left. ``reuse_port``: whether other
    processes may listen on the same port.

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
        lingering_time=0,  # ``ClientConnection.linger`` throws away what is left of a body
    )
    await runner.setup()
    assert runner.server is not None
    connection = partial(
        ClientConnection,
        runner.server,
        app[Service.KEY].turns,
        app[Service.KEY].body_memory.largest,
        ConnectionFaults(metrics),
    )
    try:
        sockets = await _bound(host, port, reuse_port)
        acceptor = Acceptor(
            runner.server, connection, max_connections, metrics, certificate, handshake_timeout=keepalive_timeout
        )
        for listener in sockets:
            acceptor.open(listener)
        try:
            yield acceptor
        finally:
            await acceptor.close()
    finally:
        await runner.cleanup()


async def _bound(host: str, port: int, reuse_port: bool) -> list[socket.socket]:
    """A listening socket for each address of ``host``."""
    sockets: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    try:
        for family, kind, protocol, _, address in await loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            listener = socket.socket(family, kind, protocol)
            sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(BACKLOG)
    except OSError as error:
        for listener in sockets:
            listener.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from error
    return sockets


class Acceptor:
    """Accepts connections up to a limit, and answers those beyond it with a 503.

    It accepts up to 128 waiting connections in each iteration of the event loop. libuv accepts one, which is a few per
    second while thousands of streams keep the loop busy; and a thousand at once, with their first requests, would stop
    the streams for a second. ``address``: host and port of its first listening socket.
    """

    def __init__(
        self,
        server: web.Server,
        connection: Callable[[], ClientConnection],
        most: int,
        metrics: Metrics,
        certificate: Certificate | None,
        *,
        handshake_timeout: float,
    ) -> None:
        """``connection``: makes the protocol of a new connection, which belongs to ``server``."""
        self.address = ("", 0)
        self._server, self._connection, self._most, self._metrics = server, connection, most, metrics
        self._certificate, self._handshake_timeout = certificate, handshake_timeout
        metrics.http_connections.set_function(lambda: len(server.connections))
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._arriving: set[socket.socket] = set()
        self._told = False

    def open(self, listener: socket.socket) -> None:
        """Accept connections of a listening socket from now on."""
        if not self._listeners:
            self.address = listener.getsockname()[:2]
        self._listeners.append(listener)
        self._loop.add_reader(listener, self._accept, listener)

    async def close(self) -> None:
        """Stop accepting. Waiting connections are accepted first, because closing the socket would break them."""
        for listener in self._listeners:
            self._accept(listener, BACKLOG)
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, listener: socket.socket, most: int = _AT_ONCE) -> None:
        number = len(self._server.connections) + len(self._arriving)
        for _ in range(most):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:  # out of files or memory: the waiting connections are accepted later
                log.error("cannot accept connections for %g s: %s", _PAUSE_SECONDS, error)
                self._loop.remove_reader(listener)
                self._loop.call_later(_PAUSE_SECONDS, self._resume, listener)
                break
            connection.setblocking(False)
            self._arriving.add(connection)
            task = self._loop.create_task(self._take(connection, number < self._most))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            number += 1

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    async def _take(self, connection: socket.socket, welcome: bool) -> None:
        secure = self._certificate is not None

        def protocol() -> asyncio.Protocol:
            if not secure:  # with TLS this is called before the handshake
                self._arriving.discard(connection)  # the server counts it from here on
            return self._connection() if welcome else _TurnAway()

        try:
            if self._certificate is None:
                await self._loop.connect_accepted_socket(protocol, connection)
            else:
                await self._loop.connect_accepted_socket(
                    protocol,
                    connection,
                    ssl=self._certificate.context(),
                    ssl_handshake_timeout=self._handshake_timeout,
                )
        except OSError as error:  # the client hung up already, or its TLS handshake failed
            log.debug("a client did not get a connection: %s", error)
            connection.close()
        finally:
            self._arriving.discard(connection)
        if not welcome:
            self._metrics.http_connections_refused.inc()
            if not self._told:
                self._told = True
                log.warning("%d connections are open, which is the limit: others are answered with 503", self._most)


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

"""The listening sockets, the limits of connections, and the memory and log of refused requests."""

import asyncio
import gc
import logging
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pagewise_shared.service_process import raise_file_limit, return_freed_memory

from pagewise_gateway.http.credentials import Certificate
from pagewise_gateway.http.errors import UnavailableError
from pagewise_gateway.metrics import Metrics

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
MAX_HEADERS, MAX_LINE = 128, 8190
"""The maximum number of headers of a request, and of bytes of its first line and of each name and value."""
_READ_BYTES = 16_384
"""A connection is not read while twice as many bytes of a body, or a sixteenth as many chunks, wait for its request."""
_PAUSE_SECONDS = 1.0
OTHER_FILES = 256
"""Open files that are not connections of clients: the connection to the scheduler, logs, the model."""
_COLLECT_EVERY = 64
_ALL_AFTER_SECONDS = 15.0
"""Longer than a connection lives after malformed HTTP: the time limits of a part of its body, and of discarding the
rest."""


class RefusedRequests:
    """Frees the memory of refused requests.

    When a request is refused, exceptions, stack frames and the received bytes refer to each other in cycles, mostly
    inside aiohttp. A cycle has few objects but up to 300 KB. The garbage collector counts objects and is set to run
    rarely, so it would let hundreds of megabytes pile up.

    So the youngest generation of objects is collected after every 64 refused requests, and all generations some time
    after one: the garbage of a malformed request is larger, and older when its connection ends.
    """

    def __init__(self) -> None:
        self._count, self._scheduled = 0, False

    def add(self) -> None:
        """Count a refused request."""
        self._count += 1
        if self._count % _COLLECT_EVERY == 0:
            gc.collect(0)
        if not self._scheduled:
            self._collect_later()

    def _collect_later(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_later(_ALL_AFTER_SECONDS, self._collect, self._count)

    def _collect(self, count: int) -> None:
        gc.collect()
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)
        self._scheduled = False
        if self._count > count:  # some of the newer requests may not have ended yet
            self._collect_later()


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's logger, except that a malformed request, which is its client's fault, becomes one debug line."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("aiohttp.server"))
        self._refused = RefusedRequests()

    def log(self, level: int, msg: object, *args: object, **kwargs: object) -> None:
        """Log a message; a malformed request becomes one debug line."""
        error = kwargs.get("exc_info")
        if error and not isinstance(error, BaseException):
            error = sys.exc_info()[1]
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            log.debug("a client sent malformed HTTP: %s", " ".join(str(error).split())[:200])
            error.__traceback__ = None  # breaks a cycle: its frames refer to the error
            self._refused.add()
            return
        super().log(level, msg, *args, **kwargs)  # type: ignore[arg-type]


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
    """Serve ``app`` until the context is left. Closing the acceptor that this yields ends accepting, not serving.

    ``max_connections``: further connections are answered with a 503 and closed. ``keepalive_timeout``: seconds that a
    connection may be without a request, take to send the head of a request, or take for the handshake of TLS.
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
        logger=_ServerLog(),
        auto_decompress=False,  # bodies are inflated in pieces
        lingering_time=0,  # ``discard_body`` reads the rest of a body, and lets other tasks run in between
        read_bufsize=_READ_BYTES,
        max_headers=MAX_HEADERS,
        max_line_size=MAX_LINE,
        max_field_size=MAX_LINE,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        try:
            listeners = await _bound(host, port, reuse_port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # of a name
            raise OSError(error.errno, f"cannot listen on {host} port {port}: {reason}") from error
        acceptor = _Acceptor(runner.server, metrics, max_connections, certificate, keepalive_timeout, listeners)
        try:
            yield acceptor
        finally:
            await acceptor.close()
    finally:
        await runner.cleanup()


async def _bound(host: str, port: int, reuse_port: bool) -> list[socket.socket]:
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
    """Accepts connections up to a limit, and answers further connections with a 503.

    It accepts all waiting connections at once. The servers of uvloop accept one connection in each iteration of the
    event loop, which is a few per second while other connections keep the loop busy.

    Fields:
        address: host and port of the first socket.
    """

    def __init__(
        self,
        server: web.Server,
        metrics: Metrics,
        most: int,
        certificate: Certificate | None,
        handshake_timeout: float,
        listeners: list[socket.socket],
    ) -> None:
        self.address = listeners[0].getsockname()[:2]
        self._server, self._metrics, self._most = server, metrics, most
        self._tls: dict[str, Any] = {}
        if certificate is not None:
            self._tls = {"ssl": certificate.context, "ssl_handshake_timeout": handshake_timeout}
        metrics.http_connections.set_function(lambda: len(server.connections))
        self._loop = asyncio.get_running_loop()
        self._listeners = listeners
        self._arriving: set[asyncio.Task[None]] = set()
        self._num_connecting = 0
        self._warned = False
        for listener in listeners:
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
        accepted = len(self._server.connections) + self._num_connecting < self._most
        self._num_connecting += 1  # the server counts a connection once it is made: with TLS, after the handshake
        try:
            protocol = self._server if accepted else self._turn_away
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

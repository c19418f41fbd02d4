"""Connections to a gateway on which a test controls the bytes sent and the times of reading."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.gateway.server import Server

COMPLETION = "/v1/completions"
LONG = 1_000_000


def http_bytes(path: str, body: bytes, extra: str = "", length: int | None = None) -> bytes:
    """The bytes of a POST request."""
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n{extra}\r\n"
    return head.encode() + body


async def read_late(server: Server, sent: bytes, seconds: float) -> bytes:
    """Return all that a client receives which sends a request, reads nothing for ``seconds``, and then reads all."""
    async with connection(server, sent) as sock:
        await asyncio.sleep(seconds)
        received = bytearray()
        while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
            received += data
    return bytes(received)


@asynccontextmanager
async def connection(server: Server, sent: bytes) -> AsyncIterator[socket.socket]:
    """A raw connection with a small receive buffer; nothing is read unless the test does."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", server.port))
        await loop.sock_sendall(sock, sent)
        yield sock

"""Notices connections that break: a process that is killed closes its sockets, long before it misses a heartbeat."""

import asyncio
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

_SETTLE_SECONDS = 0.05
"""After a connection has broken: what it still brought is read first, and others that break with it are told once."""


async def broken_connections(socket: zmq.asyncio.Socket) -> AsyncGenerator[None, None]:
    """Yield when connections of ``socket`` have broken; it is not known whose. Ends with the task that reads it."""
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        while True:
            await monitor.recv_multipart()
            await asyncio.sleep(_SETTLE_SECONDS)
            while await monitor.poll(0):
                await monitor.recv_multipart()
            yield
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)

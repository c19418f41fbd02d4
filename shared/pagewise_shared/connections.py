"""Watches the connections of a ZeroMQ socket: broken ones, and failed handshakes.

The kernel closes the sockets of a process that is killed, so a broken connection is noticed long before a heartbeat is
missing.
"""

import asyncio
from collections import deque
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

_SETTLE_SECONDS = 0.05
"""Pause before a broken connection is reported: its last frames are read first, and connections that break together are
reported once."""


class HandshakeFailure(NamedTuple):
    """A connection that could not be established.

    ``refused``: the key was refused. ``no_common_mechanism``: one end has keys and the other has none, as seen by the
    end that noticed. ``hung_up``: the peer has closed the connection, or has not answered. If all are false, it has
    another key than expected.
    """

    refused: bool
    no_common_mechanism: bool
    hung_up: bool = False


class Broken(NamedTuple):
    """One or more connections have broken. ZeroMQ does not report which ones."""


class Connections:
    """Watches the connections of ``socket``. Create it before bind or connect, and close it before the socket."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._events: deque[Broken | HandshakeFailure] = deque()
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )

    async def next(self) -> Broken | HandshakeFailure:
        """Wait for the next event."""
        if not self._events:
            broken = await self._read()
            if broken:
                await asyncio.sleep(_SETTLE_SECONDS)
                while await self._monitor.poll(0):
                    await self._read()
                self._events.append(Broken())
        return self._events.popleft()

    async def _read(self) -> bool:
        """Read one event; return whether a connection has broken."""
        message = await recv_monitor_message(self._monitor)
        event = message["event"]
        if event == zmq.EVENT_DISCONNECTED:
            return True
        mismatch = message["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        self._events.append(
            HandshakeFailure(
                refused=event == zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                no_common_mechanism=event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and mismatch,
                hung_up=event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            )
        )
        return False

    def close(self) -> None:
        """Stop watching."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

"""Notices connections that break or never come about: a process that is killed closes its sockets, long before it
misses a heartbeat."""

import asyncio
from collections import deque
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

_SETTLE_SECONDS = 0.05
"""After a connection has broken: what it still brought is read first, and others that break with it are told once."""


class HandshakeFailure(NamedTuple):
    """A connection that did not come about.

    ``refused``: a key was turned away. ``no_common_mechanism``: one end has keys and the other has none, as seen by the
    end that noticed; both are false if the peer hung up or answered to another key.
    """

    refused: bool
    no_common_mechanism: bool


class Broken(NamedTuple):
    """Connections have broken; it is not known whose."""


class Connections:
    """Watches the connections of ``socket``. Made before bind or connect, closed before the socket."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._told: deque[Broken | HandshakeFailure] = deque()
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )

    async def next(self) -> Broken | HandshakeFailure:
        """What happens next to a connection, when it does."""
        if not self._told:
            broken = await self._read()
            if broken:
                await asyncio.sleep(_SETTLE_SECONDS)
                while await self._monitor.poll(0):
                    await self._read()
                self._told.append(Broken())
        return self._told.popleft()

    async def _read(self) -> bool:
        """Take in one event; whether a connection has broken."""
        message = await recv_monitor_message(self._monitor)
        event = message["event"]
        if event == zmq.EVENT_DISCONNECTED:
            return True
        mismatch = message["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        self._told.append(
            HandshakeFailure(
                refused=event == zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                no_common_mechanism=event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and mismatch,
            )
        )
        return False

    def close(self) -> None:
        """Stop watching."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

"""A ROUTER socket that executors or gateways connect to.

The coordinator receives when the socket's file descriptor is readable, without pyzmq's futures, which cost more than
the rest of a frame's handling. ZeroMQ's descriptor is edge-triggered: any call of the socket may consume the edge
(``zmq_getsockopt(3)``, ZMQ_FD), so the coordinator calls ``receive`` again after it has sent a frame.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import zmq
import zmq.asyncio
from pagewise_shared.connections import Connections, HandshakeFailure
from pagewise_shared.curve import Authenticator, Keys
from pagewise_shared.errors import ProtocolError
from pagewise_shared.logs import BoundedLog
from pagewise_shared.protocol import Message, encode
from pagewise_shared.protocol.limits import MAX_FRAME_TO_SCHEDULER

from pagewise_scheduler.metrics import Metrics

log = logging.getLogger(__name__)

PeerKind = Literal["executor", "gateway"]
"""The kind of a process that connects to the scheduler."""
_FRAMES_AT_ONCE = 16
"""Frames of one turn: a peer that never stops sending must not keep the event loop."""
_TURNS_BEFORE_REPORT = 256
"""Turns of ``_FRAMES_AT_ONCE`` frames after which an unreachable peer is reported at the latest. Before that, all
earlier frames are read, because its Goodbye may be among them."""
_PARTS_AT_ONCE = 64
"""Further parts of an invalid message that are dropped in the turn of a frame; a valid message is one frame."""
_PING_MS = 2000


class Received(NamedTuple):
    """A frame from the connection ``identity``.

    ``key``: the public key (Z85 text) that the connection has proved to own, "" without CURVE. ``message``: the decoded
    frame, or the error of decoding it.
    """

    identity: bytes
    key: str
    message: Message | ProtocolError


class ConnectionsBroke(NamedTuple):
    """Some connections have broken; ZeroMQ does not report which."""


class Unreachable(NamedTuple):
    """A message could not be sent to the connection ``identity``. All its earlier frames have been returned before."""

    identity: bytes


Event = Received | ConnectionsBroke | Unreachable


# Plain integers: combining pyzmq's enumerations takes as long as sending a frame.
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
_AT_ONCE, _AND_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)


class SocketContext:
    """The ZeroMQ context of the scheduler's sockets, with one I/O thread, and their authenticator.

    ``keys``: the allow-lists, None: plain text.
    """

    def __init__(self, keys: Keys | None, metrics: Metrics) -> None:
        self.context = zmq.asyncio.Context()
        self.authenticator = (
            Authenticator(self.context, keys, metrics.connections_refused("unknown_key").inc)
            if keys is not None
            else None
        )

    def close(self) -> None:
        """Close all sockets."""
        if self.authenticator is not None:
            self.authenticator.close()
        self.context.destroy(linger=0)


class RouterSocket:
    """One bound socket. ``endpoint``: its address. ``kind``: of the processes that connect to it.

    ``timeout``: seconds without traffic after which ZeroMQ closes a connection.
    """

    def __init__(
        self,
        kind: PeerKind,
        endpoint: str,
        decode: Callable[[bytes], Message],
        metrics: Metrics,
        sockets: SocketContext,
        *,
        timeout: float,
    ) -> None:
        """Bind.

        Raises:
            zmq.ZMQError: the endpoint cannot be bound.
        """
        self.kind = kind
        self._decode = decode
        self._handshakes = metrics.connections_refused("handshake")
        self._complaints = BoundedLog(log)
        self._monitored = sockets.context.socket(zmq.ROUTER)
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitored)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_TO_SCHEDULER)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(timeout * 1000))
        # No high-water mark: libzmq 4.3.5 aborts the process if it handles a ping of a connection that has ended while
        # a full queue holds up reading from it (its issue 4364). So no queue may become full, and peers, which are on
        # the allow-list, are trusted not to flood it.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._has_keys = sockets.authenticator is not None
        if sockets.authenticator is not None:
            sockets.authenticator.secure_server(self._socket, kind)
        self._connections = Connections(self._monitored)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._has_more_parts = False  # of an invalid message whose first frame has been received
        self._turns = 0
        self._broke = False
        self._unreachable: deque[tuple[bytes, int]] = deque()  # with the turn in which each is reported at the latest

    async def run(self, on_event: Callable[[], None]) -> None:
        """Call ``on_event`` whenever ``receive`` may have frames, until cancelled; then close."""
        loop = asyncio.get_running_loop()
        descriptor = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, on_event)
        on_event()
        try:
            while True:
                event = await self._connections.next()
                if not isinstance(event, HandshakeFailure):
                    self._broke = True
                    on_event()
                elif event.hung_up and not self._has_keys:  # a process that was stopping
                    log.debug("a connection ended before its handshake was over")
                elif not event.refused:  # refused keys are counted by the authenticator
                    # With keys, a peer without them may notice the mismatch first and hang up: count that too.
                    self._handshakes.inc()
                    self._complaints.warning(
                        "a handshake failed: no CURVE, meant for a scheduler with another key, or broken off"
                    )
        finally:
            loop.remove_reader(descriptor)
            self.close()

    def close(self) -> None:
        """Close the socket; ``run`` does it when it ends."""
        self._connections.close()
        self._monitored.close()

    def send(self, identity: bytes, message: Message) -> bool:
        """Send one message; return False if the connection is gone, or its other end does not read."""
        return self.send_frame(identity, encode(message))

    def send_frame(self, identity: bytes, frame: bytes) -> bool:
        """Send one encoded message. Never waits: a peer that does not read must not hold up the others."""
        try:
            self._socket.send(identity, _AND_MORE)
            self._socket.send(frame, _AT_ONCE)
        except zmq.ZMQError:
            return False
        return True

    def report_unreachable(self, identity: bytes) -> None:
        """Let ``receive`` report ``Unreachable`` after the frames that were received before: a Goodbye may be among
        them."""
        self._unreachable.append((identity, self._turns + _TURNS_BEFORE_REPORT))

    def receive(self, events: list[Event]) -> bool:
        """Append frames and other events to ``events``; return whether there may be more frames."""
        if self._broke:
            self._broke = False
            events.append(ConnectionsBroke())
        more, due = False, self._turns + _TURNS_BEFORE_REPORT
        for _ in range(_FRAMES_AT_ONCE):
            # Poll first, because receiving nothing costs three times as much.
            if not int(self._socket.getsockopt(_EVENTS)) & _READABLE:
                break
            if self._has_more_parts:
                self._drop_parts()
                continue
            identity, key, frame = self._receive()
            message: Message | ProtocolError
            try:
                message = self._decode(frame)
            except ProtocolError as error:
                message = error
            events.append(Received(identity, key, message))
        else:
            self._turns += 1
            more, due = True, self._turns
        while self._unreachable and self._unreachable[0][1] <= due:
            events.append(Unreachable(self._unreachable.popleft()[0]))
        return more

    def _receive(self) -> tuple[bytes, str, bytes]:
        """Receive a message that is there; return its sender, the key of the connection ("": none), and its frame.

        A message with another number of frames than one yields an empty frame, which cannot be decoded.
        """
        # Not copied: only Frame objects have ``more`` and the key.
        sender = self._socket.recv(_AT_ONCE, copy=False)
        key = str(sender.get("User-Id")) if self._has_keys else ""
        if not sender.more:
            return sender.bytes, key, b""
        frame = self._socket.recv(_AT_ONCE, copy=False)
        self._has_more_parts = bool(frame.more)
        return sender.bytes, key, b"" if frame.more else frame.bytes

    def _drop_parts(self) -> None:
        """Drop some of the further parts of a message; it may have millions, so others have a turn in between."""
        for _ in range(_PARTS_AT_ONCE):
            if not self._socket.recv(_AT_ONCE, copy=False).more:
                self._has_more_parts = False
                return

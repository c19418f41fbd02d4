"""A ROUTER socket that executors or gateways connect to.

The coordinator takes frames from it when its file descriptor is readable, without pyzmq's futures: those cost more than
everything else that is done for a frame. ZeroMQ's file descriptor reports changes only, so frames may be there without
it after every call of the socket (``zmq_getsockopt(3)``, ZMQ_FD): whoever has sent something calls ``receive`` again.
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
"""What a process is that connects to the scheduler."""
_FRAMES_AT_ONCE = 16
"""Frames that are read before others have a turn: where frames never end, reading them would never end either."""
_TURNS_BEFORE_REPORT = 256
"""A peer that cannot be reached is reported when everything received before has been read, because its Goodbye may be
among that, and at the latest after so many turns of ``_FRAMES_AT_ONCE`` frames: others may never stop sending."""
_PARTS_AT_ONCE = 64
"""Further parts of a message that are dropped in the turn of a frame; a message is one frame."""
_PING_MS = 2000


class Received(NamedTuple):
    """A frame has come over the socket for ``kind``, from the connection ``identity``.

    ``key``: the public key (Z85 text) that the connection has proved to own, "" without CURVE. ``message``: what the
    frame says, or why it is no message.
    """

    kind: PeerKind
    identity: bytes
    key: str
    message: Message | ProtocolError


class ConnectionsBroke(NamedTuple):
    """Connections of the socket for ``kind`` have broken; it is not known whose."""

    kind: PeerKind


class Unreachable(NamedTuple):
    """A message could not be sent to the connection ``identity`` of the socket for ``kind``. All that was received
    before has been returned before."""

    kind: PeerKind
    identity: bytes


Event = Received | ConnectionsBroke | Unreachable


# Plain integers: what the enumerations of pyzmq take to be combined is as much as a frame takes to be sent.
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
_AT_ONCE, _AND_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)


class Wire:
    """The ZeroMQ context of the scheduler's sockets: one thread of ZeroMQ's serves them all.

    ``keys``: the allow-lists, None: plain text.
    """

    def __init__(self, keys: Keys | None, metrics: Metrics) -> None:
        self.context = zmq.asyncio.Context()
        self.gate = (
            Authenticator(self.context, keys, metrics.connections_refused("unknown_key").inc)
            if keys is not None
            else None
        )

    def close(self) -> None:
        """Close everything, sockets that were never run too."""
        if self.gate is not None:
            self.gate.close()
        self.context.destroy(linger=0)


class RouterSocket:
    """One bound socket. ``endpoint``: where it is bound. ``kind``: what connects to it.

    ``timeout``: seconds after which ZeroMQ closes a connection that nothing comes through.
    """

    def __init__(
        self,
        kind: PeerKind,
        endpoint: str,
        decode: Callable[[bytes], Message],
        metrics: Metrics,
        wire: Wire,
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
        self._monitored = wire.context.socket(zmq.ROUTER)
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitored)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_TO_SCHEDULER)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(timeout * 1000))
        # No bound on queued messages: libzmq 4.3.5 aborts the process if it pings a connection that has ended, or finds
        # its ping, while a queue that was full holds up reading from it (its issue 4364). So no queue may become full,
        # and peers, which are on the allow-list, are trusted not to flood it.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._has_keys = wire.gate is not None
        if wire.gate is not None:
            wire.gate.secure_server(self._socket, kind)
        self._connections = Connections(self._monitored)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._has_more_parts = False  # of a message that has brought its frame, and is none
        self._turns = 0
        self._broke = False
        self._unreachable: deque[tuple[bytes, int]] = deque()  # with the turn in which each is reported at the latest

    async def run(self, on_event: Callable[[], None]) -> None:
        """Call ``on_event`` whenever ``receive`` may have something, until cancelled; then close."""
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
                elif not event.refused:  # those are counted by the gate
                    # With keys, an end without them may notice first and hang up: that is a mismatch too.
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
        """Send one message; False if the connection is gone, or its other end does not read."""
        return self.send_frame(identity, encode(message))

    def send_frame(self, identity: bytes, frame: bytes) -> bool:
        """The same, for a message that is encoded. Never waits: one that does not read must not hold up others."""
        try:
            self._socket.send(identity, _AND_MORE)
            self._socket.send(frame, _AT_ONCE)
        except zmq.ZMQError:
            return False
        return True

    def report_unreachable(self, identity: bytes) -> None:
        """Let ``receive`` report ``Unreachable`` behind what was received before: it may hold a Goodbye."""
        self._unreachable.append((identity, self._turns + _TURNS_BEFORE_REPORT))

    def receive(self, events: list[Event]) -> bool:
        """Append some of the frames that are there, and other events; return whether there may be more frames."""
        if self._broke:
            self._broke = False
            events.append(ConnectionsBroke(self.kind))
        more, due = False, self._turns + _TURNS_BEFORE_REPORT
        for _ in range(_FRAMES_AT_ONCE):
            # Asked first, because to be refused a frame costs three times as much.
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
            events.append(Received(self.kind, identity, key, message))
        else:
            self._turns += 1
            more, due = True, self._turns
        while self._unreachable and self._unreachable[0][1] <= due:
            events.append(Unreachable(self.kind, self._unreachable.popleft()[0]))
        return more

    def _receive(self) -> tuple[bytes, str, bytes]:
        """The next message, which is there: who sent it, the key of the connection ("": none), and its frame.

        A message is one frame; another number of them is none.
        """
        # Not copied: such frames know what follows them, and which key they came with.
        sender = self._socket.recv(_AT_ONCE, copy=False)
        key = str(sender.get("User-Id")) if self._has_keys else ""
        if not sender.more:
            return sender.bytes, key, b""
        frame = self._socket.recv(_AT_ONCE, copy=False)
        self._has_more_parts = bool(frame.more)
        return sender.bytes, key, b"" if frame.more else frame.bytes

    def _drop_parts(self) -> None:
        """Drop some of the parts that follow; a message may have millions of them, so others have a turn in between."""
        for _ in range(_PARTS_AT_ONCE):
            if not self._socket.recv(_AT_ONCE, copy=False).more:
                self._has_more_parts = False
                return

"""A ROUTER socket that executors or gateways connect to, and the mailbox into which it puts their messages.

The socket is read by a callback of the event loop, without pyzmq's futures: those cost more than everything else that
is done for a frame. ZeroMQ's file descriptor tells of changes only, so whoever has sent something has to look for
frames afterwards (``zmq_getsockopt(3)``, ZMQ_FD).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import zmq
import zmq.asyncio
from pagewise_shared.connections import Connections, HandshakeFailure
from pagewise_shared.curve import Gate, Keys
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
_TURNS_BEFORE_TOLD = 256
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
    """A message could not be sent to the connection ``identity`` of the socket for ``kind``. What was received before
    is in front of this message in the mailbox."""

    kind: PeerKind
    identity: bytes


class Tick(NamedTuple):
    """Time has passed: look for those that are late."""


MailboxMessage = Received | ConnectionsBroke | Unreachable | Tick


class Mailbox:
    """Messages in the order in which they came. Anybody on the event loop may leave one; one task takes them out."""

    def __init__(self) -> None:
        self._messages: list[MailboxMessage] = []
        self._arrived = asyncio.Event()

    def put(self, message: MailboxMessage) -> None:
        """Leave a message; returns at once."""
        self._messages.append(message)
        self._arrived.set()

    async def take_all(self) -> list[MailboxMessage]:
        """All messages that have come in; waits until there is one."""
        await self._arrived.wait()
        self._arrived.clear()
        messages, self._messages = self._messages, []
        return messages


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
            Gate(self.context, keys, metrics.connections_refused("unknown_key").inc) if keys is not None else None
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
        mailbox: Mailbox,
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
        self._mailbox = mailbox
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._will_read = False
        self._has_more_parts = False  # of a message that has brought its frame, and is none
        self._turns = 0
        self._unreachable: deque[tuple[bytes, int]] = deque()  # who is to be told of, and in which turn at the latest

    async def run(self) -> None:
        """Receive until cancelled, then close."""
        loop = self._loop = asyncio.get_running_loop()
        descriptor = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, self._read)
        self._read_soon()
        try:
            while True:
                event = await self._connections.next()
                if not isinstance(event, HandshakeFailure):
                    self._mailbox.put(ConnectionsBroke(self.kind))
                elif event.hung_up and not self._has_keys:  # a process that was stopping
                    log.debug("a connection ended before its handshake was over")
                elif not event.refused:  # those are counted by the gate
                    # With keys, an end without them may notice first and hang up: that is a mismatch too.
                    self._handshakes.inc()
                    self._complaints.warning(
                        "a handshake failed: no CURVE, meant for a scheduler with another key, or broken off"
                    )
        finally:
            self._loop = None
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
        self._read_soon()
        try:
            self._socket.send(identity, _AND_MORE)
            self._socket.send(frame, _AT_ONCE)
        except zmq.ZMQError:
            return False
        return True

    def tell_unreachable(self, identity: bytes) -> None:
        """Put ``Unreachable`` into the mailbox behind what was received before: it may hold a Goodbye."""
        self._unreachable.append((identity, self._turns + _TURNS_BEFORE_TOLD))
        self._read_soon()

    def _read_soon(self) -> None:
        if not self._will_read and self._loop is not None:
            self._will_read = True
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._will_read = False
        self._read()

    def _read(self) -> None:
        """Take in some of the frames that are there."""
        if self._loop is None:
            return
        for _ in range(_FRAMES_AT_ONCE):
            # Asked first, because to be refused a frame costs three times as much.
            if not int(self._socket.getsockopt(_EVENTS)) & _READABLE:
                while self._unreachable:
                    self._mailbox.put(Unreachable(self.kind, self._unreachable.popleft()[0]))
                return
            if self._has_more_parts:
                self._drop_parts()
                continue
            identity, key, frame = self._receive()
            message: Message | ProtocolError
            try:
                message = self._decode(frame)
            except ProtocolError as error:
                message = error
            self._mailbox.put(Received(self.kind, identity, key, message))
        self._turns += 1
        while self._unreachable and self._unreachable[0][1] <= self._turns:
            self._mailbox.put(Unreachable(self.kind, self._unreachable.popleft()[0]))
        self._read_soon()

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

"""What a socket may have received and its process has not read, over real connections."""

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from pagewise_shared.curve import EXECUTOR, SCHEDULER, Gate, Keys
from pagewise_shared.unread_bytes import UnreadBytes

from tests.shared.key_pairs import make_key_pairs

MOST = 512 * 1024
DEADLINE = 20.0


class Server:
    """A ROUTER socket, what it has read, and how many connections it has closed."""

    def __init__(self, endpoint: str, folder: Path | None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: list[zmq.Socket[bytes]] = []
        self._peers_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._folder = folder
        self._gate: Gate | None = None
        socket = self.socket = self.context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.rcvhwm = 0
        if folder is not None:
            self._gate = Gate(self.context, Keys(folder, SCHEDULER), lambda: None)
            self._gate.secure_server(socket)
        socket.bind(endpoint)
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.closed = 0
        self.unread = UnreadBytes(socket, MOST, self._count)
        self.messages: list[tuple[bytes, int]] = []

    def _count(self) -> None:
        self.closed += 1

    def peer(self, name: bytes, *, ping_ms: int = 0, through: str = "") -> "zmq.Socket[bytes]":
        """A socket that is connected, and has got through with one message. ``through``: a relay's endpoint."""
        socket = self._peers_context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = 0
        socket.identity = name
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if ping_ms:
            socket.setsockopt(zmq.HEARTBEAT_IVL, ping_ms)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        if self._folder is not None:
            Keys(self._folder, EXECUTOR).secure_client(socket)
        socket.connect(through or self.endpoint)
        self._peers.append(socket)
        socket.send(b"first")
        self.until(lambda: (name, 5) in self.messages)
        return socket

    def read(self) -> None:
        """Read all messages that are there."""
        while self.socket.poll(0):
            name = self.socket.recv()
            size, more = 0, True
            while more:
                frame = self.socket.recv(copy=False)
                self.unread.read(frame, len(frame))
                size, more = size + len(frame), bool(frame.more)
            self.messages.append((name, size))

    def until(self, holds: Callable[[], Any], *, reading: bool = True) -> None:
        """Check and, unless told otherwise, read, until something holds."""
        until = time.monotonic() + DEADLINE
        while not holds():
            assert time.monotonic() < until, "it has not happened"
            if reading:
                self.read()
            self.unread.check()
            time.sleep(0.01)

    @property
    def num_unread(self) -> int:
        """Bytes that are unread now, of all connections."""
        self.unread.check()
        return sum(connection.unread for connection in self.unread._connections.values())

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._peers_context.term()
        self.socket.close()
        if self._gate is not None:
            self._gate.close()
        self.context.term()


@pytest.fixture(params=["with keys", "without keys"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    folder = make_key_pairs(tmp_path, SCHEDULER, EXECUTOR) if request.param == "with keys" else None
    with contextlib.closing(Server("tcp://127.0.0.1:*", folder)) as server:
        yield server


@contextlib.contextmanager
def relay(endpoint: str, most: int) -> Iterator[str]:
    """An endpoint behind which is another one, which gets no more than ``most`` bytes of the connection, a few at a
    time: whatever is sent, the rest never comes."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def forward(source: socket.socket, target: socket.socket, most: int) -> None:
            with contextlib.suppress(OSError):
                while most > 0 and (data := source.recv(min(most, 16_384))):
                    target.sendall(data)
                    most -= len(data)
                if most:
                    target.shutdown(socket.SHUT_RDWR)

        def run() -> None:
            client, _ = listening.accept()
            with client, socket.create_connection((host, int(port))) as server:
                back = threading.Thread(target=forward, args=(server, client, sys.maxsize))
                back.start()
                forward(client, server, most)
                back.join()

        thread = threading.Thread(target=run)
        thread.start()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def send_endless(socket: "zmq.Socket[bytes]", part: bytes, total: int) -> None:
    """Send a message of very many parts. ZeroMQ sends nothing before the message is whole, so it has an end, but far
    behind the bound, and a relay never lets it through."""
    for _ in range(total // (len(part) + 2)):
        socket.send(part, zmq.SNDMORE)
    socket.send(b"end")


@pytest.mark.parametrize("size", [0, 1, 40, 300, 200_000])
def test_a_message_that_does_not_end_is_cut_off_and_nobody_else_is(
    server: Server, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with relay(server.endpoint, 2 * MOST) as endpoint, caplog.at_level(logging.WARNING):
        good, bad = server.peer(b"good"), server.peer(b"bad", through=endpoint)
        send_endless(bad, b"x" * size, 4 * MOST)
        server.until(lambda: server.closed)
    assert server.closed == 1
    assert "closed the connection from 127.0.0.1 port" in caplog.text
    for number in range(100):
        good.send(b"x" * number)
    server.until(lambda: (b"good", 99) in server.messages)
    assert [(name, size) for name, size in server.messages if name == b"bad"] == [(b"bad", 5)]
    assert len(server.messages) == 102
    server.until(lambda: server.num_unread <= 2 * 8192)  # what was unfinished is gone
    assert server.closed == 1


def test_the_connection_with_most_that_waits_to_be_read_is_closed(server: Server) -> None:
    small, large = server.peer(b"small"), server.peer(b"large")
    for _ in range(10):
        small.send(b"x" * 1000)
        large.send(b"x" * MOST)
    server.until(lambda: server.closed, reading=False)
    small.send(b"still")
    server.until(lambda: (b"small", 5) in server.messages[2:])
    assert server.messages.count((b"small", 1000)) == 10
    assert server.closed == 1


def test_many_connections_that_each_bring_little_are_bounded_together(server: Server) -> None:
    good, *bad = (server.peer(b"%d" % number) for number in range(9))
    for peer in bad:
        send_endless(peer, b"x" * 1000, MOST // 6)  # eight of them: more than MOST
    server.until(lambda: server.closed, reading=False)
    assert 1 <= server.closed <= 4, "no more than needed"
    good.send(b"still")
    server.until(lambda: (b"0", 5) in server.messages[9:])


def test_what_is_read_in_time_may_be_any_amount(server: Server) -> None:
    peers = [server.peer(b"%d" % number, ping_ms=1) for number in range(3)]
    frame = b"x" * 50_000
    for number in range(60):
        for peer in peers:
            peer.send_multipart([frame] * (1 + number % 2))
        server.until(lambda number=number: len(server.messages) == 3 * (number + 2))
    assert sum(size for _, size in server.messages) > 10 * MOST
    assert server.closed == 0


def test_small_frames_and_pings_do_not_add_up(server: Server) -> None:
    peer = server.peer(b"peer", ping_ms=1)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        before = len(server.messages)
        for _ in range(1000):
            peer.send(b"")
        server.until(lambda before=before: len(server.messages) == before + 1000)

    def few_are_left() -> bool:
        # What came before a message that has been read is not unread, if there was nothing to read before that.
        server.unread.check()
        peer.send(b"more")
        server.socket.poll(int(1000 * DEADLINE))
        server.read()
        return server.num_unread <= 2 * 8192

    server.until(few_are_left)
    assert server.closed == 0


def test_a_peer_whose_identity_is_taken_cannot_queue_without_end(server: Server) -> None:
    """ZeroMQ neither refuses such a connection nor lets the process read what it brings."""
    owner = server.peer(b"taken")
    other = server._peers_context.socket(zmq.DEALER)
    other.linger = 0
    other.sndhwm = 0
    other.identity = b"taken"
    other.setsockopt(zmq.RECONNECT_IVL, -1)
    if server._folder is not None:
        Keys(server._folder, EXECUTOR).secure_client(other)
    other.connect(server.endpoint)
    server._peers.append(other)
    for _ in range(20):
        other.send(b"x" * (MOST // 10))
    server.until(lambda: server.closed)
    owner.send(b"mine")
    server.until(lambda: (b"taken", 4) in server.messages)
    assert len(server.messages) == 2


def test_a_new_connection_begins_with_nothing(server: Server) -> None:
    """Descriptors are used again: what the one before has brought or read does not count for the next."""
    for number in range(10):
        peer = server.peer(b"%d" % number)
        peer.send(b"x" * (MOST // 3))
        server.until(lambda number=number: (b"%d" % number, MOST // 3) in server.messages)
        peer.disconnect(server.endpoint)
    assert server.closed == 0
    assert server.num_unread <= 8192


def test_unix_sockets_are_left_alone(tmp_path: Path) -> None:
    with contextlib.closing(Server(f"ipc://{tmp_path}/socket", None)) as server:
        peer = server.peer(b"peer")
        peer.send(b"x" * 4 * MOST)
        server.until(lambda: (b"peer", 4 * MOST) in server.messages)
        assert server.num_unread == 0

"""Bounds what a socket has received over TCP and its process has not read.

libzmq bounds neither the parts of a message, all of which it keeps until the last one has come, nor, with ``RCVHWM`` 0,
the messages that wait to be read. It does not say either how much it keeps. But the kernel says how much a connection
has received (``tcp(7)``, TCP_INFO), and a frame which connection it came through (``zmq_msg_get(3)``, ZMQ_SRCFD).

Unix domain sockets have no such count. Who may connect to one is for the permissions of its folder to say.
"""

import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq

from pagewise_shared.logs import BoundedLog

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.5
"""How often ``UnreadBytes.check`` is to be called. What comes in between may exceed the bound."""

_SOURCE = int(zmq.SRCFD)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
_RECEIVED = 128
"""Offset of ``tcpi_bytes_received``, 64 bits, in ``struct tcp_info``."""
_TRIES = 4
"""How often the kernel is asked at most for two numbers that belong together."""
_OVERHEAD = 2
"""The header of a small frame; that of a large one has 9 bytes."""
_CURVE_OVERHEAD = 33
"""Name, nonce, authentication tag and flags of a CURVE message."""
_BATCH = 8192
"""Bytes that ZeroMQ takes from a connection before it hands on the messages in them (ZMQ_IN_BATCH_SIZE)."""
_ZERO_COPY_RECV = 10
"""``ZMQ_ZERO_COPY_RECV``, which pyzmq has no name for."""


@dataclass(slots=True)
class _Connection:
    """A connection, which is one as long as its descriptor has the same inode.

    ``taken``: bytes that ZeroMQ had taken from the kernel at the last check. ``unread``: those that were not read yet.
    """

    inode: int
    taken: int = 0
    unread: int = 0
    closed: bool = False


def prepare(context: "zmq.Context[Any]") -> None:
    """Make the sockets of ``context`` copy small frames out of the buffer that they were received in.

    To be called before there is one. Otherwise each frame keeps its whole buffer of 18 KiB, even if it is all that came
    in it: small frames that a peer sends one by one took 230 times their bytes, instead of 4.4 times.
    """
    context.set(_ZERO_COPY_RECV, 0)


class UnreadBytes:
    """Counts what the connections of a socket have brought and is not read yet, and closes those with the most.

    ZeroMQ drops the unfinished message of a connection that ends. Whole messages are still read. To be used on the
    thread of the socket. Does nothing if the socket is not bound to TCP.
    """

    def __init__(self, bound: "zmq.Socket[Any]", most: int, on_closed: Callable[[], None]) -> None:
        """``bound``: the socket, bound already. ``most``: bytes, as they come over the network, of all connections
        together. ``on_closed`` is called for every connection that is closed."""
        self._socket = bound
        self._most = most
        self._on_closed = on_closed
        self._overhead = _OVERHEAD + (_CURVE_OVERHEAD if bound.getsockopt(zmq.MECHANISM) == zmq.CURVE else 0)
        endpoint = bound.getsockopt_string(zmq.LAST_ENDPOINT)
        self._port = int(endpoint.rpartition(":")[2]) if endpoint.startswith("tcp:") else None
        if self._port is not None and sys.platform != "linux":
            log.warning("what %s receives has no bound on %s: only Linux tells how much it is", endpoint, sys.platform)
            self._port = None
        self._connections: dict[int, _Connection] = {}
        self._other_files: dict[int, int] = {}  # descriptor: inode
        self._read: dict[int, int] = {}  # bytes since the last check, by the descriptor of their connection
        self._was_empty = False
        self._complaints = BoundedLog(log)
        self._told_of_kernel = False

    def read(self, frame: zmq.Frame, size: int) -> None:
        """Note that a frame of ``size`` bytes was read. ``frame``: it, or another one of the same message."""
        if self._port is not None:
            descriptor = int(frame.get(_SOURCE))
            self._read[descriptor] = self._read.get(descriptor, 0) + size + self._overhead

    def check(self) -> None:
        """Close connections, those with the most unread bytes first, until the bound holds."""
        if self._port is None:
            return
        try:
            found = list(self._look())
        except OSError as error:  # too many open files
            self._complaints.warning("what was received and not read cannot be counted now: %s", error)
            return
        connections = {}
        for descriptor, inode, taken in found:
            connection = self._connections.get(descriptor)
            if connection is None or connection.inode != inode:
                connection = _Connection(inode)
            self._update(connection, taken, self._read.get(descriptor, 0))
            connections[descriptor] = connection
        self._connections, self._read = connections, {}
        # Asked after the connections have been looked at: what is read from now on came, or ended, after that.
        self._was_empty = not int(self._socket.getsockopt(_EVENTS)) & _READABLE
        self._close_excess()

    def _look(self) -> Iterator[tuple[int, int, int]]:
        """Yield descriptor, inode, and bytes that ZeroMQ has taken, of every connection that the socket has accepted.

        Raises:
            OSError: too many files are open.
        """
        others = {}
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            try:
                status = os.fstat(descriptor)
            except OSError:  # that of this folder
                continue
            if not stat.S_ISSOCK(status.st_mode) or self._other_files.get(descriptor) == status.st_ino:
                others[descriptor] = status.st_ino
                continue
            try:
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, os.dup(descriptor)) as duplicate:
                    if not self._is_connection(duplicate):
                        others[descriptor] = status.st_ino
                        continue
                    taken = _bytes_taken(duplicate)
            except OSError as error:
                if error.errno == errno.EMFILE:
                    raise
                continue  # it has ended
            yield descriptor, status.st_ino, taken
        self._other_files = others

    def _is_connection(self, duplicate: socket.socket) -> bool:
        """Return whether this is a connection that the socket has accepted."""
        name = duplicate.getsockname()
        return (
            isinstance(name, tuple)
            and name[1] == self._port
            and not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )

    def _update(self, connection: _Connection, taken: int, read: int) -> None:
        new = taken - connection.taken
        connection.unread = max(0, connection.unread + new - read)
        if read and self._was_empty:
            # What was read now ended after the last check, and nothing that came before it is still there. So ZeroMQ's
            # own handshakes and pings, which nobody reads, do not add up.
            connection.unread = min(connection.unread, new + _BATCH)
        connection.taken = taken
        if read and not taken and not self._told_of_kernel:
            self._told_of_kernel = True
            log.warning("this kernel does not tell how much a connection has received: what is not read has no bound")

    def _close_excess(self) -> None:
        live = {descriptor: found for descriptor, found in self._connections.items() if not found.closed}
        excess = sum(connection.unread for connection in live.values()) - self._most
        while excess > 0:
            descriptor = max(live, key=lambda descriptor: live[descriptor].unread)
            self._close(descriptor, connection := live.pop(descriptor))
            excess -= connection.unread

    def _close(self, descriptor: int, connection: _Connection) -> None:
        """End a connection; ZeroMQ notices that as if its peer had done so."""
        connection.closed = True
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if os.fstat(duplicate.fileno()).st_ino != connection.inode:  # it has ended already
                return
            peer = duplicate.getpeername()
            duplicate.shutdown(socket.SHUT_RDWR)
            self._on_closed()
            self._complaints.warning(
                "closed the connection from %s port %d: %d bytes of it were received and not read (a message that does "
                "not end, or too many at once); at most %d may be, of all connections together",
                *peer[:2],
                connection.unread,
                self._most,
            )


def _bytes_taken(connection: socket.socket) -> int:
    """Return how many bytes of a TCP connection this process has taken from the kernel.

    That is what was received less what is waiting, which the kernel tells one after the other. If more comes meanwhile,
    both are asked again, and if it comes all the time, the result is up to that much too high. If it were too low, what
    has been read of it could not be subtracted, and would count as unread later.
    """
    received = _bytes_received(connection)
    for _ in range(_TRIES):
        waiting = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)))[0]
        before, received = received, _bytes_received(connection)
        if received == before:
            break
    return received - int(waiting) if received else 0


def _bytes_received(connection: socket.socket) -> int:
    """Return how many bytes the kernel has received on a TCP connection; 0 if it does not tell."""
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED + 8)
    if len(information) < _RECEIVED + 8:
        return 0
    received: int = struct.unpack_from("Q", information, _RECEIVED)[0]
    return received

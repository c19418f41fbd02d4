"""The ZeroMQ connection between node 0 and another node of an executor, which carries the frames of that node's ranks.

A message has two parts, a mark and a frame. The mark is one byte, the number of the rank that has sent the frame or
receives it; or it is empty, and the frame is a message between the nodes themselves (``messages.FromNode``,
``messages.ToNode``).
"""

import contextlib
import socket
import subprocess  # nosec B404
import sys
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import encode
from pagewise_shared.protocol.limits import MAX_FRAME_FROM_SCHEDULER

from pagewise_executor.ranks.messages import RankSpec

OWN = b""
"""The mark of a message between nodes."""

HEARTBEAT_MS = 500
"""How often node 0 sends ``Heartbeat`` to each node: sending fails if the connection has ended."""
JOIN_SECONDS = 600.0
"""How long nodes wait for each other when they start."""
SAY_SECONDS = 30.0
"""How often a node logs that it still waits."""
END_SECONDS = 10.0
"""How long a rank may take to end before it is killed."""
_PING_MS = 1000
_SILENT_MS = 5000
"""After so long a silence ZeroMQ closes a connection. Its threads answer pings while Python is busy."""


def prepare_socket(socket: "zmq.Socket[Any]") -> None:
    """Set the options that the sockets at both ends of the connection have in common."""
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_FROM_SCHEDULER)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
    # Queues have no bound, because libzmq aborts the process if it is pinged while a queue is full (its issue 4364).
    # The number of steps in flight, which is two, bounds their length.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)  # milliseconds, so that a rank's reason for failing is still sent


def of_rank(rank: int) -> bytes:
    """Return the mark of the frames of a rank."""
    return bytes([rank])


def start_rank(spec: RankSpec, config: ExecutorConfig) -> tuple[Connection, "subprocess.Popen[bytes]"]:
    """Start a process that runs one rank (``pagewise_executor.follower``).

    Returns the connection with the process, and the process, which ends when the connection is closed.
    """
    own, theirs = socket.socketpair()
    with theirs:
        # A session of its own keeps Ctrl-C from the rank. Rank 0 gets the signal, and ends the other ranks.
        process = subprocess.Popen(  # noqa: S603  # nosec B603 # our own module
            [sys.executable, "-m", "pagewise_executor.follower", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    connection = Connection(own.detach())
    with contextlib.suppress(OSError):  # the process has ended, which the reader of the connection notices
        connection.send_bytes(encode(spec))
        connection.send_bytes(msgspec.msgpack.encode(config))
    return connection, process


def end_rank(process: "subprocess.Popen[bytes]") -> None:
    """Wait until the process of a rank has ended, and kill it if it does not end within ``END_SECONDS``."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

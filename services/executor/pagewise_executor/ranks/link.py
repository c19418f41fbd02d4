"""The socket between node 0 of an executor and another node, which carries the frames of that node's ranks.

A message has two parts. The first is the number of the rank that the frame in the second part is from or for, in one
byte; or it is empty, and the frame is the node's own (``messages.FromNode``, ``messages.ToNode``).
"""

from typing import Any

import zmq
from pagewise_shared.protocol.limits import MAX_FRAME_FROM_SCHEDULER

OWN = b""
"""In front of frames of a node, and not of a rank."""

NOTED_MS = 500
"""How often node 0 says that it is there, and so looks whether the others are."""
JOIN_SECONDS = 600.0
"""How long nodes wait for each other at the start."""
SAY_SECONDS = 30.0
"""How often the log of a node says that it still waits."""
_PING_MS = 1000
_SILENT_MS = 5000
"""After so long a silence ZeroMQ, whose threads do not depend on what Python does, closes a connection."""


def prepare_socket(socket: "zmq.Socket[Any]") -> None:
    """Set what both ends of the link have in common."""
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_FROM_SCHEDULER)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
    # No bound on what is queued: a full queue and a ping abort the process (libzmq's issue 4364). What is under way is
    # bounded by the steps that are: two.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)  # so that what a rank has failed of is still sent


def of_rank(rank: int) -> bytes:
    """Return what is in front of a rank's frames."""
    return bytes([rank])

"""Starts the processes of ranks other than rank 0."""

import socket
import subprocess  # nosec B404
import sys
from multiprocessing.connection import Connection


def start_rank() -> tuple[Connection, "subprocess.Popen[bytes]"]:
    """Start a process that runs one rank (``pagewise_executor.follower``).

    Returns the connection with the process, and the process. The caller sends a ``Seat`` and then the configuration.
    The process ends when the connection is closed.
    """
    own, theirs = socket.socketpair()
    with theirs:
        # A session of its own keeps Ctrl-C from the rank. Rank 0 gets it, and tells the other ranks to end.
        process = subprocess.Popen(  # noqa: S603  # nosec B603 # our own module
            [sys.executable, "-m", "pagewise_executor.follower", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return Connection(own.detach()), process

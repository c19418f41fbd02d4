"""Starts the process of a rank other than rank 0."""

import socket
import subprocess  # nosec B404
import sys
from multiprocessing.connection import Connection


def start_rank() -> tuple[Connection, "subprocess.Popen[bytes]"]:
    """Start a process that follows rank 0 (``pagewise_executor.follower``).

    Returns the connection with it, which takes its seat and its configuration first, and the process. It ends when the
    connection does.
    """
    own, theirs = socket.socketpair()
    with theirs:
        # A session of its own: Ctrl-C is for rank 0, which then tells the others.
        process = subprocess.Popen(  # noqa: S603  # nosec B603 # our own module
            [sys.executable, "-m", "pagewise_executor.follower", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return Connection(own.detach()), process

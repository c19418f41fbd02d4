"""Runs a command as an ordinary user, and without a network if it is started in a network namespace of its own.

``python confined.py USER COMMAND...``; needs root, and nothing but the standard library.
"""

import fcntl
import os
import socket
import struct
import sys

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _UP = 0x8913, 0x8914, 1


def raise_loopback() -> None:
    """In a new network namespace the loopback interface is down, and processes could not reach each other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        _, flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        if not flags & _UP:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


if __name__ == "__main__":
    user, *command = sys.argv[1:]
    raise_loopback()
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    os.execvp(command[0], command)

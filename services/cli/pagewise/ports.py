"""Who has a TCP port, and which one is free (Linux; elsewhere nobody is named)."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ESTABLISHED, LISTENING = 1, 10
_TRIED = 100


class TcpSocket(NamedTuple):
    """A TCP socket: its local and its remote port, its state (``ESTABLISHED`` or another one), its inode."""

    local: int
    remote: int
    state: int
    inode: str


def tcp_sockets() -> Iterator[TcpSocket]:
    """Yield all TCP sockets in this network namespace (Linux)."""
    for table in filter(Path.exists, (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))):
        for line in table.read_text().splitlines()[1:]:
            _, *ends, state, _, _, _, _, _, inode = line.split()[:10]
            local, remote = (int(end.rpartition(":")[2], 16) for end in ends)
            yield TcpSocket(local, remote, int(state, 16), inode)


def holder_of(port: int) -> str:
    """Return which process listens on a port, as ``name (pid)``; "" if it cannot be seen, as another user's cannot."""
    sockets = {f"socket:[{one.inode}]" for one in tcp_sockets() if one.state == LISTENING and one.local == port}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                return f"{_name(words) or (process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:  # it has ended, or is another user's
            continue
    return ""


def next_free(host: str, port: int) -> int | None:
    """Return the first port after ``port`` that can be bound on ``host``; None if none of the next ones can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for other in range(port + 1, min(port + _TRIED, 65536)):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, other))
                probe.listen(1)
            except OSError:
                continue
            return other
    return None


def _name(words: list[str]) -> str:
    """Return what a command line runs: the module after ``-m``, or the file's name."""
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return Path(words[0]).name if words[0] else ""

"""TCP ports of this machine (Linux): their processes, free ones, and HTTP requests to gateways on them."""

import http.client
import os
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ESTABLISHED, LISTENING = 1, 10
_TRIED = 100

# One context, without the certificates of authorities: ``ssl.create_default_context`` reads a file of them for 30 ms,
# and these requests are repeated while a server starts on the same cores.
_UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_UNVERIFIED.check_hostname = False  # the certificate is for the name that clients use, not for this address
_UNVERIFIED.verify_mode = ssl.CERT_NONE


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
    """Return the process that listens on a port, as ``name (pid)``; "" for another user's process."""
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
    """Return the program in a command line: the module after ``-m``, or the file's name."""
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return Path(words[0]).name if words[0] else ""


def text_of(url: str, key: str = "") -> str | None:
    """Return the body of a GET of ``url``, with an API key if there is one; None: no 200 within two seconds."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=2, context=_UNVERIFIED) as answer:  # noqa: S310  # nosec B310 # our own server
            return str(answer.read().decode()) if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None


def answers(url: str) -> bool:
    """Return whether a GET of ``url`` is answered with 200 within two seconds. Certificates are not verified."""
    return text_of(url) is not None

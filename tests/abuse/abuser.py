"""The requests of tests of abuse, with the key ABUSER."""

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.processes import Served
from tests.abuse.bystander import ABUSER

MIB = 1024 * 1024


@dataclass
class Answer:
    """An answer: its status, its headers in lower case, and its body as JSON, or as text from a proxy."""

    status: int
    headers: dict[str, str]
    body: Any
    size: int

    @property
    def message(self) -> str:
        """The text of the error."""
        return self.body if isinstance(self.body, str) else str(self.body["error"]["message"])


def post(server: Served, path: str, body: bytes | dict[str, Any], key: str = ABUSER) -> Answer:
    """Send this body, all of it, and read the answer. A server that answers earlier is fine."""
    body = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        text = answer.read()
        lower = {name.lower(): value for name, value in answer.getheaders()}
        own = lower.get("server") == "nginx" and lower.get("content-type") == "text/html"
        return Answer(answer.status, lower, text.decode() if own else json.loads(text), len(text))
    finally:
        connection.close()


def proxied(server: Served) -> bool:
    """Whether nginx stands in front of the gateway, and refuses some requests before the gateway."""
    return server.url != server.gateway_url


def at_once(server: Served, path: str, body: bytes | dict[str, Any], count: int) -> list[Answer]:
    """The same request ``count`` times at the same time."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: post(server, path, body), range(count)))


def charged(server: Served) -> float:
    """Requests that have counted against the abuser's limits; a key without limits has none that count."""
    return server.metric("key_requests_total", key="abuser")


def begin(server: Served, path: str, announced: int, sent: int, *, chunked: bool = False) -> socket.socket:
    """Announce a body of so many bytes, send ``sent`` of them, and leave it at that. Returns the connection."""
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname or "", address.port or 0), timeout=120)
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {announced}"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {ABUSER}\r\n{length}\r\n\r\n"
    )
    part = b'{"prompt": "' + b"a" * (sent - 12)
    connection.sendall(head.encode() + (b"%x\r\n%b\r\n" % (len(part), part) if chunked else part))
    return connection


def filled(begin: bytes, unit: bytes, end: bytes, size: int) -> bytes:
    """A body of about ``size`` bytes: ``unit``, with a comma behind it, again and again."""
    count = (size - len(begin) - len(end)) // (len(unit) + 1)
    return begin + b",".join([unit] * count) + end

"""Legal uses of HTTP, compressed bodies, tiny chunks, endless heads, many connections, affect no other client."""

import contextlib
import http.client
import json
import socket
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from benchmarks.processes import Served
from tests.abuse.abuser import MIB, charged
from tests.abuse.bystander import ABUSER, unharmed

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
_SECONDS = 3.0
"""How long a flood of requests lasts: longer than the gap that is too long for a bystander."""


def gzip_bomb(mib: int) -> bytes:
    """A body that inflates to so many MiB."""
    compress = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [compress.compress(b'{"prompt":"')] + [compress.compress(b"a" * MIB) for _ in range(mib)]
    return b"".join([*parts, compress.flush()])


def head(key: str, *fields: str, path: str = COMPLETION) -> bytes:
    """The head of a POST; without a key if ``key`` is empty."""
    lines = [f"POST {path} HTTP/1.1", "Host: server", "Content-Type: application/json", *fields]
    return "\r\n".join([*lines, *([f"Authorization: Bearer {key}"] if key else []), "", ""]).encode()


def connect(server: Served) -> socket.socket:
    """A new connection."""
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=30)


def send(server: Served, data: bytes) -> bytes:
    """Send this on a connection of its own, all of it if the server takes it, and return the answer."""
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError, TimeoutError):
            connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while b'"code":' not in answer and (part := connection.recv(65536)):
                answer += part
        return answer


def send_all(server: Served, data: bytes, count: int) -> list[bytes]:
    """The same on so many connections at the same time."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: send(server, data), range(count)))


def flood(server: Served, connections: int, method: str, path: str, body: bytes | None = None) -> Counter[int]:
    """Send the same request again and again over so many connections. Returns how many answers had which status."""
    address = urlsplit(server.url)
    end = time.monotonic() + _SECONDS
    headers = {"Authorization": f"Bearer {ABUSER}", "Content-Type": "application/json"}

    def one(_: int) -> list[int]:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        statuses = []
        while time.monotonic() < end:
            connection.request(method, path, body, headers)
            with connection.getresponse() as answer:
                answer.read()
                statuses.append(answer.status)
        connection.close()
        return statuses

    with ThreadPoolExecutor(connections) as pool:
        return Counter(status for statuses in pool.map(one, range(connections)) for status in statuses)


def test_bodies_that_inflate_without_a_key(server: Served) -> None:
    """They are not even read."""
    bomb = gzip_bomb(1000)
    data = head("", "Content-Encoding: gzip", f"Content-Length: {len(bomb)}") + bomb
    with unharmed(server):
        answers = send_all(server, data, 16)
    assert all(answer.startswith(b"HTTP/1.1 401 ") for answer in answers)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_bodies_that_inflate(server: Served, encoding: str) -> None:
    bomb = gzip_bomb(64)
    bomb = bomb if encoding == "gzip" else bomb[10:-8]  # deflate without a header, as some clients send it
    before = charged(server)
    data = head(ABUSER, f"Content-Encoding: {encoding}", f"Content-Length: {len(bomb)}") + bomb
    with unharmed(server):
        answers = [answer for _ in range(8) for answer in send_all(server, data, 2)]
    statuses = Counter(answer[9:12] for answer in answers)
    assert statuses.keys() <= {b"413", b"429"}
    assert statuses[b"413"] >= 8
    assert all(b"4194304" in answer for answer in answers if answer[9:12] == b"413")
    assert charged(server) == before + statuses[b"413"]


@pytest.mark.parametrize("key", [ABUSER, ""])
def test_tiny_chunks(unlimited: Served, key: str) -> None:
    """2 MB in chunks of one byte are 12 MB, and 2 million chunks."""
    chunks = b"1\r\na\r\n" * 2_000_000
    data = head(key, "Transfer-Encoding: chunked") + b'b\r\n{"prompt":"\r\n' + chunks + b'2\r\n"}\r\n0\r\n\r\n'
    with unharmed(unlimited):
        answers = send_all(unlimited, data, 8)
    statuses = {answer[9:12] for answer in answers if answer}  # a busy machine does not get to all of them in time
    assert statuses <= ({b"400", b"408", b"429"} if key else {b"401"})


@pytest.mark.parametrize(
    "data",
    [
        b"5;" + b"x" * 10 * MIB,
        pytest.param(
            b"2\r\n{}\r\n0\r\n" + b"".join(b"t%d: %b\r\n" % (number, b"y" * 4000) for number in range(2500)),
            marks=pytest.mark.long,
        ),
        b"2\r\n{}\r\n0\r\nt: " + b"y" * 10 * MIB,
    ],
    ids=["an extension", "trailers", "a trailer"],
)
def test_endless_framing(unlimited: Served, data: bytes) -> None:
    with unharmed(unlimited, growth_mb=30):
        connections = [connect(unlimited) for _ in range(16)]
        for connection in connections:
            connection.settimeout(1)
            with contextlib.suppress(ConnectionError, TimeoutError):
                connection.sendall(head(ABUSER, "Transfer-Encoding: chunked") + data)
        for connection in connections:
            connection.close()


def test_endless_heads(unlimited: Served) -> None:
    fields = b"".join(b"h%d: %b\r\n" % (number, b"y" * 4000) for number in range(5000))
    with unharmed(unlimited, growth_mb=30):
        send_all(unlimited, b"POST /v1/completions HTTP/1.1\r\n" + fields, 16)


def test_the_document_of_all_limits_again_and_again(server: Served) -> None:
    with unharmed(server):
        assert flood(server, 64, "GET", "/openapi.json")[200] > 100


SMALL = {
    "bodies": (COMPLETION, b'{"prompt":[' + b"[1]," * 16_000 + b"[1]]}"),
    "texts": ("/tokenize", json.dumps({"prompt": "一言" * 1000}).encode()),
    "chats": (CHAT, json.dumps({"messages": [{"role": "user", "content": "一" * 60}] * 32, "max_tokens": 1}).encode()),
}
"""Each is too small to take a turn with large ones."""


@pytest.mark.parametrize("kind", SMALL)
def test_small_requests_on_many_connections(unlimited: Served, kind: str) -> None:
    path, body = SMALL[kind]
    with unharmed(unlimited):
        statuses = flood(unlimited, 128, "POST", path, body)
    assert sum(statuses.values()) >= 128


def test_many_connections_with_unfinished_bodies(unlimited: Served) -> None:
    with unharmed(unlimited):
        connections = []
        for number in range(3000):
            connection = connect(unlimited)
            connection.sendall(
                head(ABUSER if number % 2 else "", "Content-Length: 4000000") + b'{"prompt":"' + b"a" * 1000
            )
            connections.append(connection)
        time.sleep(1)
        for connection in connections:
            connection.close()


def test_requests_that_are_begun_and_left(unlimited: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 100, "stream": True}).encode()
    with unharmed(unlimited):
        for _ in range(8):
            connections = [connect(unlimited) for _ in range(200)]
            for connection in connections:
                connection.sendall(head(ABUSER, f"Content-Length: {len(body)}") + body)
            time.sleep(0.1)
            for connection in connections:
                connection.close()

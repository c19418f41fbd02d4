"""Bodies that are large, have much structure, or never end: they affect their sender alone."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from benchmarks.processes import GATEWAY, Served
from tests.abuse.abuser import MIB, begin, charged, filled, post, proxied
from tests.abuse.bystander import resident, serving_two_keys, unharmed

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGE = b'{"role":"user","content":"a"}'

_HEAD = b'{"messages":[' + MESSAGE + b'],"chat_template_kwargs":{"a":['
_SIZE = 4 * MIB - 1


def large() -> list[tuple[str, bytes]]:
    """Bodies that have blocked the event loop for seconds, or whose answers took 31 MB."""
    return [
        (COMPLETION, filled(b'{"prompt":[', b"[]", b"]}", 15_600_000)),
        (CHAT, filled(b'{"messages":[' + MESSAGE + b'],"chat_template_kwargs":{"a":[', b"1", b"]}}", 10_000_000)),
        (CHAT, filled(b'{"messages":[', MESSAGE, b"]}", 380_000 * (len(MESSAGE) + 1))),
        (COMPLETION, b'{"' + b"a" * 15_000_000 + b'":1}'),
    ]


@cache
def allowed() -> list[tuple[str, bytes, str]]:
    """Bodies of the size that is allowed, and the limit that their error names."""
    return [
        (COMPLETION, filled(b'{"prompt":[', b"[]", b"]}", _SIZE), "16384"),
        (COMPLETION, filled(b'{"prompt":"a","tools":[', b"{}", b"]}", _SIZE), "16384"),
        (COMPLETION, filled(b'{"prompt":[', b'""', b"]}", _SIZE), "65536"),
        (COMPLETION, filled(b'{"prompt":"a","logit_bias":{', b'"1":1', b"}}", _SIZE), "65536"),
        (COMPLETION, filled(b'{"prompt":[', b"9" * 4299, b"]}", _SIZE), "2147483647"),
        (COMPLETION, filled(b'{"prompt":[', b"1", b"]}", _SIZE), "1048576"),
        (COMPLETION, filled(b'{"prompt":[', b"300", b"]}", _SIZE), "maximum context length is 8192"),
        (COMPLETION, b'{"' + b"a" * (_SIZE - 8) + b'":1}', "Unrecognized request argument"),
        (COMPLETION, b'{"prompt":"' + b"\\ud83d\\ude00" * (_SIZE // 12 - 2) + b'"}', "maximum context length is 8192"),
        (CHAT, filled(_HEAD, b"123", b"]}}", _SIZE), "65536"),
        (CHAT, filled(_HEAD, b"[]", b"]}}", _SIZE), "16384"),
        (CHAT, filled(b'{"messages":[', MESSAGE, b"]}", _SIZE), "65536"),
        (CHAT, filled(b'{"messages":[', MESSAGE, b"]}", 5000 * (len(MESSAGE) + 1)), "4096"),
        ("/detokenize", filled(b'{"tokens":[', b"256", b"]}", _SIZE), "65536"),
    ]


def test_large_bodies_are_refused_before_they_are_read(server: Served) -> None:
    before = charged(server)
    bodies = large()
    with unharmed(server):
        for path, body in bodies:
            answer = post(server, path, body)
            assert answer.status == 413
            if not proxied(server):
                assert answer.body["error"]["code"] == "body_too_large"
                assert "4194304" in answer.message
    assert charged(server) == before + (0 if proxied(server) else len(bodies))


def test_bodies_with_much_structure_are_refused_soon(server: Served) -> None:
    before = charged(server)
    with unharmed(server):
        for path, body, limit in allowed():
            answer = post(server, path, body)
            assert (answer.status, limit in answer.message) == (400, True), answer.message
            assert answer.size < 4096
    assert charged(server) == before + len(allowed())


def test_the_same_from_many_connections(unlimited: Served) -> None:
    """The key's share of the memory for bodies has room for four; others are refused with this reason."""
    with unharmed(unlimited), ThreadPoolExecutor(8) as pool:
        path, body, _ = allowed()[6]
        answers = list(pool.map(lambda _: post(unlimited, path, body), range(32)))
    assert {answer.status for answer in answers} <= {400, 429}
    assert sum(answer.status == 400 for answer in answers) >= 4


def test_code_of_the_greatest_size_is_read(server: Served) -> None:
    body = b'{"prompt":"' + b'a[i] = {x: [\\"1\\"]}; ' * (_SIZE // 21 - 2) + b'"}'
    assert len(body) > 4_000_000
    with unharmed(server):
        answer = post(server, COMPLETION, body)
    assert (answer.status, answer.body["error"]["code"]) == (400, "context_length_exceeded")


def gateway_mb(server: Served) -> float:
    """Resident MB of the gateway."""
    return sum(size for name, size in resident(server).items() if name.startswith(GATEWAY))


def first_line(connection: socket.socket) -> bytes:
    """The status line of an answer, or nothing if none has come."""
    connection.settimeout(0.2)
    try:
        return connection.recv(65536)
    except (TimeoutError, ConnectionResetError):
        return b""


@pytest.mark.parametrize("chunked", [False, True])
def test_unfinished_bodies_of_a_key_that_may_have_two_requests(server: Served, chunked: bool) -> None:
    before, memory = charged(server), gateway_mb(server)
    with unharmed(server):
        connections = [begin(server, COMPLETION, 4 * MIB, 4_000_000, chunked=chunked) for _ in range(60)]
        time.sleep(1)
        assert gateway_mb(server) < memory + 100
        answers = [first_line(connection) for connection in connections]
        for connection in connections:
            connection.close()
    refused = [answer for answer in answers if answer]
    if proxied(server):  # It sends no body on before it has the whole of it.
        assert (refused, charged(server)) == ([], before)
        return
    assert len(refused) == 58
    for answer in refused:
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"Retry-After: " in answer
        assert b"the limit of concurrent requests is 2" in answer
    assert charged(server) == before + 2


@pytest.mark.parametrize("chunked", [False, True])
def test_unfinished_bodies_of_a_key_without_limits(unlimited: Served, chunked: bool) -> None:
    server, memory = unlimited, gateway_mb(unlimited)
    refusals = server.metric("gateway_requests_refused_total", reason="key_body_memory")
    with unharmed(server):
        connections = [begin(server, COMPLETION, 4 * MIB, 4_000_000, chunked=chunked) for _ in range(60)]
        time.sleep(1)
        assert gateway_mb(server) < memory + 100
        answers = [first_line(connection) for connection in connections]
        held = server.metric("http_body_bytes")
        for connection in connections:
            connection.close()
    refused = [answer for answer in answers if answer]
    if proxied(server):
        assert (refused, held) == ([], 0)
        return
    assert len(refused) == 56
    for answer in refused:
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"Retry-After: " in answer
        assert b"--max-body-memory" in answer
        assert b"16777216" in answer
    assert 15_000_000 < held <= 16 * MIB
    assert server.metric("gateway_requests_refused_total", reason="key_body_memory") == refusals + 56
    server.wait_for_metric("http_body_bytes", 0)


def test_refused_requests_use_up_the_limit_per_minute(tmp_path: Path) -> None:
    with serving_two_keys(tmp_path, "--simulate", abuser="requests-per-minute=4") as server:
        statuses = [post(server, COMPLETION, b"{").status for _ in range(3)]
        statuses.append(post(server, COMPLETION, b"[]" * 4 * MIB).status)
        answer = post(server, COMPLETION, b'{"prompt": "fox"}')
        assert statuses == [400, 400, 400, 413]
        assert answer.status == 429
        assert "4 requests per minute" in answer.message
        assert "retry-after" in answer.headers

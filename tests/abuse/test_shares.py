"""Requests that take all rows or all KV blocks for long, beside another key's stream."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.processes import Served
from tests.abuse.abuser import post
from tests.abuse.bystander import ABUSER, Serve, unharmed

COMPLETIONS = "/v1/completions"
SECONDS = 5.0


def opened(server: Served, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion has been asked for."""
    address, content = urlsplit(server.url), json.dumps(body).encode()
    connection = socket.create_connection((address.hostname or "", address.port or 0), timeout=30)
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: server\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {ABUSER}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@contextlib.contextmanager
def streamed(server: Served, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A completion of the abuser's that streams, and has begun."""
    with contextlib.closing(opened(server, body | {"ignore_eos": True, "stream": True})) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        yield connection


def read_for(connection: socket.socket, seconds: float) -> int:
    """Read incoming bytes; return how many."""
    end, size = time.monotonic() + seconds, 0
    while time.monotonic() < end and (part := connection.recv(1 << 20)):
        size += len(part)
    return size


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "options"),
    [
        pytest.param(2, 4000, ("--num-blocks=65536",), id="all rows"),
        pytest.param(8, 4000, (), id="all rows, and all blocks again and again"),
        pytest.param(4, 4000, ("--num-blocks=1024", "--max-num-seqs=512"), id="all blocks"),
    ],
)
def test_a_key_that_runs_nothing_waits_for_no_others_end(
    serve: Serve, tmp_path: Path, prompts: int, max_tokens: int, options: tuple[str, ...]
) -> None:
    body = {"prompt": ["a"] * prompts, "n": 128, "max_tokens": max_tokens}
    with (
        serve(tmp_path, "--simulate", *options, abuser="concurrent=1") as server,
        unharmed(server) as seen,
        streamed(server, body) as connection,
    ):
        assert read_for(connection, SECONDS) > 1_000_000
    assert seen.tokens > 64, "more than one completion, so that it has come from waiting to running"


def test_wide_beam_searches_hurt_nobody(serve: Serve, tmp_path: Path) -> None:
    body = {"prompt": ["a"] * 8, "n": 128, "use_beam_search": True, "max_tokens": 16, "ignore_eos": True}
    with serve(tmp_path, "--simulate", abuser="concurrent=2") as server, unharmed(server):
        answer = post(server, COMPLETIONS, body)
        assert answer.status == 200, answer.body
        assert len(answer.body["choices"]) == 8 * 128


def test_the_most_sequences_begun_and_cancelled_hurt_nobody(serve: Serve, tmp_path: Path) -> None:
    body = {"prompt": ["a"] * 32, "n": 128, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with serve(tmp_path, "--simulate") as server, unharmed(server):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            connections = [opened(server, body) for _ in range(8)]
            time.sleep(0.05)
            for connection in connections:
                connection.close()

"""The HTTP surface of real processes, with requests made from its own document, and with bytes that are hardly HTTP."""

import json
import random
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.processes import GATEWAY, SCHEDULER, Served, serving
from tests.fuzz.effort import EFFORT, examples
from tests.fuzz.narrowed import narrowed

pytestmark = pytest.mark.timeout(300 * EFFORT)

MODEL, VOCAB_SIZE = "pagewise-demo", 4096
GROWTH = 64 * 2**20
"""Bytes that the scheduler may have more after requests than before: far less than the requests' bytes."""
REFUSED_GROWTH = 16 * 2**20
"""The same for requests that are refused at once."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--simulate", "--executors", "2", "--max-model-len", "512") as server:
        yield server


def get(server: Served, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=20) as answer:
        return json.load(answer)


def check_rest(server: Served, memory: float, growth: float = GROWTH) -> None:
    """Nothing of the fuzzing is left: no request, no block without a pin, no memory, and no failure of ours in the
    log."""
    server.wait_for_metric("http_requests_in_progress", 1)  # the one that asks
    server.wait_for_metric("num_requests_running", 0)
    server.wait_for_metric("num_requests_waiting", 0)
    if not server.metric("kv_blocks_pinned"):
        server.wait_for_metric("kv_cache_usage_perc", 0)
    assert server.metric("kv_blocks", tier="device", state="in_use") <= server.metric("kv_blocks_pinned")
    assert server.metric("executors_ready") == 2
    assert server.metric("step_errors_total") == 0
    assert resident(server) - memory < growth
    assert [line for line in server.output if "Traceback" in line or " ERROR " in line] == []


def resident(server: Served) -> float:
    """Bytes of the gateway and the scheduler together."""
    pids = [pid for module in (GATEWAY, SCHEDULER) for pid in server.pids(module)]
    return float(sum(psutil.Process(pid).memory_info().rss for pid in pids))


CONFIGURATION = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
"""
"""The usual ones and 413: a list with one message too many may have more bytes than a body."""


def schemathesis(server: Served, document: Any, directory: Path, *options: str) -> None:
    (directory / "openapi.json").write_text(json.dumps(document))
    (directory / "schemathesis.toml").write_text(CONFIGURATION)
    seed = "1" if EFFORT == 1 else str(random.randrange(2**31))  # the suite tries the same each time
    command = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", server.url, "--seed", seed]
    command += ["--continue-on-failure", "--request-timeout", "60", "--suppress-health-check", "all", "--no-color"]
    # A request may be refused for reasons that no schema can express: fields that exclude each other, for instance.
    command += ["--exclude-checks", "positive_data_acceptance", *options]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=200 + 60 * EFFORT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_requests_made_from_the_document(server: Served, tmp_path: Path) -> None:
    memory = resident(server)
    document = get(server, "/openapi.json")
    schemathesis(server, document, tmp_path, "--phases", "coverage", "--max-time", str(15 * EFFORT))
    if EFFORT > 1:
        schemathesis(server, document, tmp_path, "--phases", "fuzzing", "-n", "2000", "--max-time", str(15 * EFFORT))
    check_rest(server, memory)


def test_requests_that_get_past_the_first_checks(server: Served, tmp_path: Path) -> None:
    memory = resident(server)
    document = narrowed(get(server, "/openapi.json"), MODEL, VOCAB_SIZE)
    options = ["--mode", "positive", "-n", str(30 * EFFORT), "--max-time", str(12 * EFFORT)]
    schemathesis(server, document, tmp_path, "--phases", "fuzzing", *options)
    check_rest(server, memory)


BODY = b'{"prompt": "a", "max_tokens": 3}'
PIECES = [
    b"POST /v1/completions HTTP/1.1",
    b"GET /v1/models HTTP/1.1",
    b"GET /debug/requests/%00%ff?limit=%ff HTTP/1.1",
    b"GET http://[::bad HTTP/1.1",
    b"\r\n",
    b"\r\n\r\n",
    b"Host: a",
    b"Content-Type: application/json",
    b"Content-Length: 32",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Transfer-Encoding: chunked",
    b"Content-Encoding: gzip",
    b"Content-Encoding: br",
    b"Expect: 100-continue",
    b"Connection: Upgrade\r\nUpgrade: websocket",
    b"Authorization: Bearer \xff\xfe",
    b"X-Request-Id: \x00",
    b"X: " + b"y" * 9000,
    b"5\r\nabcde\r\n",
    b"zz\r\n",
    b"0\r\n\r\n",
    BODY,
]

JSON_POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
NO_HTTP = [
    b"GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
    b"GET http://[::bad HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    JSON_POST + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
    JSON_POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
]
HEADERS = b"X: " + b"y" * 8000 + b"\r\n"


@st.composite
def nearly_http(draw: st.DrawFn) -> bytes:
    """A request of a client that knows some HTTP, put together wrongly, and perhaps damaged."""
    header_lines = draw(st.lists(st.sampled_from(PIECES[6:19]), max_size=5))
    start = draw(st.sampled_from(PIECES[:4]))
    rest = draw(st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=12)), max_size=4))
    data = bytearray(b"\r\n".join([start, *header_lines]) + b"\r\n\r\n" + b"".join(rest))
    for _ in range(draw(st.integers(0, 2))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def talk(server: Served, data: bytes, seconds: float) -> bytes:
    """The first bytes of the answer within so many seconds; empty if the server waits for more."""
    target = urlsplit(server.url)
    with socket.create_connection((target.hostname, target.port), timeout=seconds) as connection:
        try:
            connection.sendall(data)
            return connection.recv(65536)
        except (TimeoutError, ConnectionError):
            return b""


@pytest.fixture(scope="module")
def resident_before_bytes(server: Served) -> float:
    """The scheduler's memory after it has seen all input that is no HTTP, and has loaded the code that answers it."""
    for data in (*PIECES, *NO_HTTP):
        talk(server, data + b"\r\n\r\n", 0.1)
    return resident(server)


@examples(100)
@given(st.one_of(nearly_http(), nearly_http(), st.binary(max_size=200)))
def test_bytes_that_are_hardly_http(server: Served, resident_before_bytes: float, data: bytes) -> None:
    answer = talk(server, data, 0.1)
    statuses = [line.split(b" ")[1] for line in answer.split(b"\r\n") if line.startswith((b"HTTP/1.0 ", b"HTTP/1.1 "))]
    assert not [status for status in statuses if status.startswith(b"5")], answer


def test_nothing_is_left_of_them(server: Served, resident_before_bytes: float) -> None:
    # Sixty megabytes of them: memory kept for each connection, or for its bytes, would be seen.
    for _ in range(400):
        for data in NO_HTTP:
            start, rest = data.split(b"\r\n", 1)
            talk(server, start + b"\r\n" + 4 * HEADERS + rest, 20)
    check_rest(server, resident_before_bytes, REFUSED_GROWTH)


@pytest.mark.parametrize("data", NO_HTTP, ids=["nul", "url", "length", "gzip", "chunk"])
def test_what_is_no_http_is_a_400_and_no_traceback(server: Served, data: bytes) -> None:
    answer = talk(server, data, 20)
    assert answer.split(b" ")[1] == b"400", answer
    assert [line for line in server.output if "Traceback" in line] == []

"""Answers with very many choices, tokens or log-probabilities: they are made in turns, or are refused by name."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.processes import GATEWAY, Served
from tests.abuse.abuser import at_once, post
from tests.abuse.bystander import ABUSER, Serve, unharmed

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MANY = ["a"] * 32
USER = [{"role": "user", "content": "a"}]
IDS = [1 + number % 200 for number in range(8000)]


SECONDS = 4.0
"""How long a stream is read, or left unread, at most: twice the gap that is too long for a bystander."""


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("keys"), "--simulate", "--num-blocks=65536", "--max-num-seqs=512") as server:
        yield server


def stream(server: Served, body: dict[str, Any], seconds: float, *, read: bool = True) -> bytes:
    """Send a request for a stream, and read it, or not, for so long at most. Returns the last bytes."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ABUSER}"}
    connection.request("POST", COMPLETION, json.dumps({**body, "stream": True, "ignore_eos": True}), headers)
    assert isinstance(connection.sock, socket.socket)
    last, deadline = b"", time.monotonic() + seconds
    with connection.sock:
        if not read:
            time.sleep(seconds)
            return last
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        while time.monotonic() < deadline and (data := answer.read1(1 << 20)):
            last = (last + data)[-2000:]
    return last


@pytest.mark.parametrize(
    ("path", "body", "choices"),
    [
        (COMPLETION, {"prompt": MANY, "n": 12, "max_tokens": 150, "logprobs": 20}, 384),
        (CHAT, {"messages": USER, "n": 128, "max_tokens": 256, "logprobs": True, "top_logprobs": 20}, 128),
        (COMPLETION, {"prompt": IDS[:600], "n": 128, "max_tokens": 1, "echo": True, "logprobs": 20}, 128),
        (COMPLETION, {"prompt": [IDS] * 8, "n": 128, "max_tokens": 1, "echo": True}, 1024),
        pytest.param(
            *(COMPLETION, {"prompt": [IDS] * 8, "n": 128, "max_tokens": 1, "return_token_ids": True}, 1024),
            marks=pytest.mark.long,
        ),
    ],
    ids=["completion", "chat", "echo with logprobs", "echo", "ids"],
)
def test_a_large_answer_is_made_in_turns(server: Served, path: str, body: dict[str, Any], choices: int) -> None:
    with unharmed(server):
        answer = post(server, path, {**body, "ignore_eos": True})
        assert answer.status == 200, answer.message
        assert [choice["index"] for choice in answer.body["choices"]] == list(range(choices))
        del answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": MANY, "n": 128, "max_tokens": 64, "logprobs": 20}),
        (CHAT, {"messages": USER, "n": 128, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20}),
        (COMPLETION, {"prompt": IDS[:2000], "n": 128, "max_tokens": 1, "echo": True, "logprobs": 20}),
        (COMPLETION, {"prompt": [IDS] * 32, "n": 128, "max_tokens": 1, "echo": True}),
        (COMPLETION, {"prompt": [IDS] * 32, "n": 128, "max_tokens": 1, "return_token_ids": True}),
        (COMPLETION, {"prompt": MANY, "n": 128, "max_tokens": 4000}),
    ],
    ids=["completion", "chat", "echo with logprobs", "echo", "ids", "tokens"],
)
def test_a_larger_one_is_refused_by_name(server: Served, path: str, body: dict[str, Any]) -> None:
    with unharmed(server, growth_mb=30):
        for answer in at_once(server, path, body, 4):
            assert answer.status == 400
            assert "--max-answer-memory" in answer.message


def test_large_answers_at_once_are_let_in_as_far_as_there_is_memory(server: Served) -> None:
    body = {"prompt": ["a"] * 8, "n": 128, "max_tokens": 32, "logprobs": 20, "ignore_eos": True}
    refused = server.metric("gateway_requests_refused_total", reason="key_answer_memory")
    with unharmed(server):
        answers = at_once(server, COMPLETION, body, 8)
        statuses = sorted(answer.status for answer in answers)
        assert statuses[0] == 200
        assert set(statuses[4:]) == {429}, "each may take a third of what the key has"
        messages = {answer.message.partition(":")[0] for answer in answers if answer.status == 429}
        assert "API key abuser" in messages
        del answers
    assert server.metric("gateway_requests_refused_total", reason="key_answer_memory") > refused


@pytest.mark.parametrize("read", [True, False])
def test_a_stream_of_very_many_log_probabilities(server: Served, read: bool) -> None:
    with unharmed(server):
        body = {"prompt": MANY, "n": 12, "max_tokens": 300, "logprobs": 20}  # rows are left for others
        last = stream(server, body, SECONDS, read=read)
        assert not read or b"data: " in last


def test_a_stream_that_repeats_a_long_prompt_in_every_choice(server: Served) -> None:
    with unharmed(server):
        stream(server, {"prompt": IDS[:2000], "n": 128, "max_tokens": 4, "echo": True, "logprobs": 20}, SECONDS)


def test_token_counts_in_every_chunk_of_very_many_choices(server: Served) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    with unharmed(server):
        # Fewer than may wait: sequences of the test before may not be gone.
        stream(server, {"prompt": MANY, "n": 120, "max_tokens": 12, "stream_options": usage}, SECONDS)


def test_many_streams_of_few_log_probabilities_each(server: Served) -> None:
    """None of them is large."""
    body = {"prompt": "a", "n": 8, "max_tokens": 200, "logprobs": 20, "stream": True, "ignore_eos": True}
    sockets = []
    with unharmed(server):
        address, text = urlsplit(server.url), json.dumps(body).encode()
        head = (
            f"POST {COMPLETION} HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Authorization: Bearer {ABUSER}\r\nContent-Length: {len(text)}\r\n\r\n"
        ).encode()
        for _ in range(48):  # 384 sequences: rows are left
            sockets.append(socket.create_connection((address.hostname or "", address.port or 0), timeout=120))
            sockets[-1].sendall(head + text)
        deadline = time.monotonic() + 6
        for one in sockets:
            with one:
                while time.monotonic() < deadline and one.recv(1 << 20):
                    pass


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": IDS[:2048], "max_tokens": 1, "echo": True, "logprobs": 5},
        {"prompt": [IDS[:2048]] * 32, "max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt": "a", "n": 128, "max_tokens": 1000},
        {"prompt": MANY, "max_tokens": 2000},
    ],
    ids=["evaluation", "evaluation in batches", "samples", "batch"],
)
def test_what_honest_clients_ask_for_is_answered(server: Served, body: dict[str, Any]) -> None:
    answer = post(server, COMPLETION, {**body, "ignore_eos": True})
    assert answer.status == 200, answer.message
    tokens = body["max_tokens"] * len(answer.body["choices"])
    assert answer.body["usage"]["completion_tokens"] == tokens
    server.wait_for_metric("http_answer_bytes", 0)  # the last write may return after the client has read it
    assert len(server.pids(GATEWAY)) == 1

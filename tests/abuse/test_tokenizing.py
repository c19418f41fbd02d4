"""Texts that take long to tokenize: the threads for it are shared fairly, and their work is bounded."""

import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.processes import Served
from tests.abuse.abuser import MIB, charged, post, proxied
from tests.abuse.bystander import BYSTANDER, Serve, unharmed
from tests.free_cores import FreeCores

COMPLETION = "/v1/completions"
LIMIT = 131_072
"""Characters that the simulated model's context of 8,192 tokens allows: sixteen for each."""


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on which a limit that no test reaches makes the abuser's requests count."""
    with serve(tmp_path_factory.mktemp("keys"), "--simulate", abuser="concurrent=64") as server:
        assert post(server, COMPLETION, b'{"prompt": "fox"}').status == 200
        yield server


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def text(characters: int) -> str:
    return ("the quick brown fox jumps over the lazy dog " * (characters // 44 + 1))[:characters]


def test_texts_that_are_too_long_are_refused_before_they_are_tokenized(server: Served) -> None:
    before = charged(server)
    huge, large = text(15_000_000), text(4 * MIB - 200)
    message = [{"role": "user", "content": large}]
    with unharmed(server), ThreadPoolExecutor(4) as pool:
        for status, limit, path, sent in (
            (413, "4194304", "/tokenize", body(prompt=huge)),
            (413, "4194304", "/tokenize", body(prompt=huge, return_token_strs=True)),
            (400, str(LIMIT), "/tokenize", body(prompt=large)),
            (400, str(LIMIT), "/tokenize", body(prompt=large, return_token_strs=True)),
            (400, str(LIMIT), "/tokenize", body(messages=message)),
            (400, str(LIMIT), COMPLETION, body(prompt=large, truncate_prompt_tokens=10)),
            (400, str(LIMIT), "/v1/chat/completions", body(messages=message, truncate_prompt_tokens=-1)),
        ):
            for answer in pool.map(lambda _, path=path, sent=sent: post(server, path, sent), range(4)):
                assert answer.status == status, answer.message
                assert limit in answer.message or (proxied(server) and status == 413)
    assert charged(server) == before + 4 * (5 if proxied(server) else 7)


def test_texts_of_the_greatest_length_from_many_connections(server: Served) -> None:
    """Another key's text waits for one of them, not for all."""
    waits: list[float] = []
    ends = threading.Event()
    own = body(prompt=text(10_000))

    def bystander() -> None:
        while not ends.is_set():
            began = time.monotonic()
            assert post(server, "/tokenize", own, BYSTANDER).status == 200
            waits.append(time.monotonic() - began)
            time.sleep(0.05)

    before = charged(server)
    longest = [
        ("/tokenize", body(prompt=text(LIMIT))),
        ("/tokenize", body(prompt=text(LIMIT), return_token_strs=True)),
        (COMPLETION, body(prompt=text(LIMIT), truncate_prompt_tokens=16, max_tokens=1)),
    ]
    cores = FreeCores()
    with unharmed(server), ThreadPoolExecutor(33) as pool:
        watching = pool.submit(bystander)
        answers = list(pool.map(lambda number: post(server, *longest[number % 3]), range(60)))
        ends.set()
        watching.result()
        share = cores.share()
    assert {answer.status for answer in answers} == {200}
    assert len(waits) >= 3
    assert statistics.median(waits) * share < 1.0, waits
    assert charged(server) == before + 60


def test_long_conversations_are_rendered_beside_other_clients(server: Served) -> None:
    """As many messages, parts and template variables as are allowed: templates are Python, which holds the GIL."""
    before = charged(server)
    one = {"role": "user", "content": "a"}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}] * 1024}
    longest = [
        body(messages=[one] * 4096),
        body(messages=[parts] * 12),
        body(messages=[one], max_tokens=1, chat_template_kwargs={"a": [[1]] * 10_000}),
    ]
    with unharmed(server), ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: post(server, "/v1/chat/completions", longest[number % 3]), range(36)))
    assert [answer.status for answer in answers] == [400, 400, 200] * 12
    for answer in (answers[0], answers[1]):
        assert "maximum context length is 8192 tokens" in answer.message
    assert charged(server) == before + 36


def test_bad_words_are_tokenized_beside_other_clients(server: Served) -> None:
    before = charged(server)
    slow = body(prompt="a", max_tokens=1, bad_words=["x" + " " * 1023] * 128)
    with unharmed(server), ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda _: post(server, COMPLETION, slow), range(32)))
    assert {answer.status for answer in answers} == {200}, answers[0].message
    assert charged(server) == before + 32

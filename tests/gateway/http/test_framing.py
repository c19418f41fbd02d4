"""The framing of requests: it is followed byte by byte, bounded, and what is wrong with it is refused at once."""

import asyncio
import logging
from contextlib import AsyncExitStack, suppress

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpProcessingError, HttpRequestParser
from hypothesis import example, given
from hypothesis import strategies as st
from pagewise_gateway.http.client_connection import BODY_PER_FRAMING, MAX_FRAMING_BYTES, Framing

from tests.gateway.raw_connections import connection, http_bytes
from tests.gateway.server import Server, serving

CHUNKED_HEAD = (
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunked(pieces: list[bytes], extension: bytes, trailers: bytes) -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return CHUNKED_HEAD + chunks + b"0\r\n" + trailers + b"\r\n"


def with_length(body: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body


bodies = st.binary(max_size=40)
requests = st.one_of(
    st.just(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    bodies.map(with_length),
    st.builds(
        chunked,
        st.lists(st.binary(min_size=1, max_size=40), max_size=5),
        st.sampled_from([b"", b";a", b';a=b;c="d e"']),
        st.sampled_from([b"", b"A: b\r\n", b"A:\r\nB: c\r\n"]),
    ),
)


@given(st.lists(st.tuples(st.sampled_from([b"", b"\r\n"]), requests), max_size=5), st.data())
def test_valid_requests_pass_whole_wherever_they_are_cut(sent: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    stream = b"".join(before + request for before, request in sent)
    framing = Framing()
    passed, rest = b"", stream
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        passed += framing.read(rest[:size])
        rest = rest[size:]
    assert (passed, framing.problem) == (stream, "")
    assert (framing.heads, framing.left) == (len(sent), 0)


@given(
    st.lists(st.sampled_from([b"5", b"0", b"\r\n", b"\n", b"abcde", b";", b"a=b", b'"', b"g", b": ", b" ", b"\x00"]))
)
@example([b"5", b"\r\n", b"abcde", b"abcde"])
@example([b"0", b"\r\n", b"a=b", b"\r\n", b"\r\n"])
def test_the_parser_gets_nothing_within_a_body_that_it_would_refuse(parts: list[bytes]) -> None:
    """Because it would leave the body without an end and without an error, and its request waiting."""

    async def parse() -> None:
        loop = asyncio.get_running_loop()
        parser = HttpRequestParser(BaseProtocol(loop), loop, 2**16)
        framing = Framing()
        [(_, content)], _, _ = parser.feed_data(framing.read(CHUNKED_HEAD))
        for part in parts:
            if content.is_eof():
                return  # the next head is the parser's to refuse
            if passed := framing.read(part):
                try:
                    parser.feed_data(passed)
                except HttpProcessingError:
                    assert content.is_eof()
                    return

    asyncio.run(parse())


def test_chunks_may_have_an_eighth_of_framing_beyond_the_limit() -> None:
    small, large = b"1\r\na\r\n", b"%x\r\n%b\r\n" % (80, b"a" * 80)
    for chunk, allowed in ((small, False), (large, True)):
        framing = Framing()
        count = 4 * MAX_FRAMING_BYTES // len(chunk) * (1 if allowed else 2)
        framing.read(CHUNKED_HEAD + chunk * count)
        assert bool(framing.problem) != allowed
    assert len(large) - 80 < 80 / BODY_PER_FRAMING


async def answer(server: Server, *sent: bytes) -> bytes:
    """All that comes back on a connection of its own until the server closes it."""
    async with connection(server, sent[0]) as sock, asyncio.timeout(10):
        loop = asyncio.get_running_loop()
        for more in sent[1:]:
            await asyncio.sleep(0.02)
            await loop.sock_sendall(sock, more)
        received = bytearray()
        while data := await loop.sock_recv(sock, 65536):
            received += data
    return bytes(received)


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        (b"zz\r\n{}\r\n0\r\n\r\n", b"is not the size of a chunk"),
        (b"1\r\n{}\r\n0\r\n\r\n", b"longer than its size says"),
        (b"2\n{}\r\n0\r\n\r\n", b"does not end with CR and LF"),
        (b"2\r\n{}\r\n0\r\nno trailer\r\n\r\n", b"is not a header"),
    ],
    ids=["size", "content", "line end", "trailer"],
)
async def test_malformed_chunks_are_refused_with_a_reason_and_at_once(chunks: bytes, reason: bytes) -> None:
    async with serving() as server:
        for sent in ((CHUNKED_HEAD + chunks,), (CHUNKED_HEAD, chunks)):
            answered = await answer(server, *sent)
            assert answered.startswith(b"HTTP/1.1 400 ")
            assert reason in answered


@pytest.mark.parametrize("end", [b"", b"\r\n", b"\r"], ids=["within a line", "behind a line", "within a line end"])
async def test_a_head_that_is_too_long_is_refused_behind_the_requests_before_it(end: bytes) -> None:
    get, field = b"GET /version HTTP/1.1\r\nHost: a\r\n", b"X: " + b"y" * 4000 + b"\r\n"
    head = (get + field * 17)[: MAX_FRAMING_BYTES - len(end)] + end
    async with serving() as server:
        answered = await answer(server, get + b"\r\n" + head, b"more")
        assert answered.startswith(b"HTTP/1.1 200 ")
        assert [status[:8] for status in answered.split(b"HTTP/1.")[2:]] == [b"0 400 Ba"]
        assert b"The head of a request may have 65536 bytes" in answered


async def test_a_fault_ends_the_connection_with_its_requests_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = Framing.read

    def faulty(framing: Framing, data: bytes) -> bytes:
        if b"fault" in data:
            raise AttributeError("an attribute that another version has")
        return read(framing, data)

    monkeypatch.setattr(Framing, "read", faulty)
    async with serving() as server, AsyncExitStack() as others:
        stream = http_bytes("/v1/completions", b'{"prompt": "the quick", "max_tokens": 50, "stream": true}')
        other = await others.enter_async_context(connection(server, b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"))
        loop = asyncio.get_running_loop()
        for _ in range(2):
            async with connection(server, stream) as sock, asyncio.timeout(10):
                assert b" 200 " in await loop.sock_recv(sock, 65536)
                await loop.sock_sendall(sock, b"fault")
                with suppress(ConnectionError):
                    while await loop.sock_recv(sock, 65536):
                        pass
        assert b" 200 " in await loop.sock_recv(other, 65536)
        await loop.sock_sendall(other, b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 200 " in await loop.sock_recv(other, 65536)
        assert 'http_connection_faults_total{model_name="fake/model"} 2.0' in server.shown()
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info is not None for record in errors] == [True]


async def test_hundreds_of_connections_at_once_are_all_answered() -> None:
    """So many bytes arrive at once that connections wait for their turns, and with parts of their bodies."""
    body = b'{"prompt": "%b", "max_tokens": 2}' % (b"the fox jumps " * 3000)
    async with serving(max_connections=400) as server:

        async def ask() -> bytes:
            request = http_bytes("/v1/completions", body, "Connection: close\r\n")
            return await answer(server, request)

        answers = await asyncio.gather(*(ask() for _ in range(256)))
    assert {each.split(b" ", 2)[1] for each in answers} <= {b"200", b"400", b"429"}
    assert all(each.endswith((b"}", b"\r\n\r\n")) for each in answers)

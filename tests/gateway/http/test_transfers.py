"""How bodies are sent: compressed, in chunks, or to a server that does not want them."""

import asyncio
import gzip
import json
import zlib
from contextlib import suppress

import pytest

from tests.gateway.server import Server, serving

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
COMPLETION = "/v1/completions"
BODY = json.dumps({"prompt": "the fox", "max_tokens": 3}).encode()
KEYS = {"api_keys": "alice:sk-alice,bob:sk-bob"}


def raw_deflate(data: bytes) -> bytes:
    """Deflate without the header of zlib."""
    compress = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compress.compress(data) + compress.flush()


async def compressed(server: Server, body: bytes, encoding: str) -> tuple[int, str]:
    """Status and text of the answer."""
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with server.http.post(server.url + COMPLETION, data=body, headers=headers) as response:
        return response.status, await response.text()


async def raw(server: Server, data: bytes, more: bytes = b"") -> tuple[bytes, bytes]:
    """Send these bytes, all of them, and then read to the end. Returns head and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    await writer.drain()
    writer.write(more)
    with suppress(ConnectionError):
        await writer.drain()
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


GZIPPED = gzip.compress(BODY, mtime=0)


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", GZIPPED),
        ("GZIP", GZIPPED),
        ("x-gzip", GZIPPED),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("identity", BODY),
    ],
    ids=["gzip", "GZIP", "x-gzip", "zlib", "deflate", "identity"],
)
async def test_compressed_bodies(encoding: str, packed: bytes) -> None:
    async with serving() as server:
        status, text = await compressed(server, packed, encoding)
        assert (status, json.loads(text)["object"]) == (200, "text_completion")


async def test_large_compressed_body() -> None:
    """Pieces in any sizes become the same body."""
    body = json.dumps({"prompt": [5] * 100, "user": None, "max_tokens": 3, "stop": None}).encode() + b" " * 900_000
    async with serving() as server:
        assert (await compressed(server, gzip.compress(body), "gzip"))[0] == 200
        assert (await compressed(server, gzip.compress(body, 0), "gzip"))[0] == 200
        assert 'http_body_bytes{model_name="fake/model"} 0' in server.shown()


@pytest.mark.parametrize(
    ("encoding", "packed", "status", "message"),
    [
        ("gzip", BODY, 400, "not valid gzip"),
        ("deflate", b"\x08\x00", 400, "not valid deflate"),
        ("gzip", GZIPPED[:-9], 400, "has no end"),
        ("gzip", GZIPPED + b"more", 400, "behind the end"),
        ("gzip", GZIPPED * 2, 400, "behind the end"),
        ("br", BODY, 415, "encoded as br"),
        ("gzip, gzip", gzip.compress(GZIPPED, mtime=0), 415, "encoded as gzip, gzip"),
        ("gzip", gzip.compress(b" " * 2_000_000 + BODY, mtime=0), 413, "inflates to more than 1048576 bytes"),
    ],
    ids=["no gzip", "no deflate", "cut", "more behind it", "twice", "br", "gzip in gzip", "too large"],
)
async def test_compressed_bodies_that_are_refused(encoding: str, packed: bytes, status: int, message: str) -> None:
    async with serving() as server:
        found, text = await compressed(server, packed, encoding)
        assert (found, message in text) == (status, True), text


@pytest.mark.parametrize("size", [1, 10, 1000])
async def test_chunked_body(size: int) -> None:
    """Chunks may be as small as they like while the body is small."""
    parts = [BODY[start : start + size] for start in range(0, len(BODY), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    head = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving() as server:
        answer, _ = await raw(server, head, chunks + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_large_body_in_chunks_of_some_bytes() -> None:
    chunk = b"40\r\n" + b"a" * 64 + b"\r\n"
    head = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = head + b'b\r\n{"prompt":"\r\n' + chunk * 15_000 + b'2\r\n"}\r\n0\r\n\r\n'
    async with serving() as server:
        answer, body = await raw(server, data)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"context_length_exceeded" in body  # it was read


@pytest.mark.parametrize("data", [b"zz\r\n{}\r\n0\r\n\r\n", b"1\r\n{}\r\n0\r\n\r\n"], ids=["size", "content"])
async def test_malformed_chunks_are_refused(data: bytes) -> None:
    async with serving() as server:
        answer, _ = await raw(server, POST + b"Transfer-Encoding: chunked\r\n\r\n" + data)
        assert answer.startswith(b"HTTP/1.0 400 ")


@pytest.mark.parametrize("length", [b"Content-Length: 3000000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("key", [b"sk-alice", b"none"])
async def test_a_client_that_sends_everything_first_reads_why_its_body_was_refused(length: bytes, key: bytes) -> None:
    head = POST + b"Authorization: Bearer " + key + b"\r\n" + length + b"\r\n\r\n"
    data = b"a" * 3_000_000
    data = data if length.startswith(b"Content") else b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    async with serving(**KEYS) as server:
        began = asyncio.get_running_loop().time()
        answer, body = await raw(server, head + data[:1_500_000], data[1_500_000:])
        assert asyncio.get_running_loop().time() - began < 4
        assert answer.startswith(b"HTTP/1.1 413 " if key == b"sk-alice" else b"HTTP/1.1 401 ")
        assert b"Connection: close" in answer
        assert json.loads(body)["error"]["code"] in ("body_too_large", "invalid_api_key")


async def test_a_refused_body_that_does_not_end_is_left() -> None:
    head = POST + b"Content-Length: 1000000000\r\n\r\n"
    async with serving(max_body_bytes=100_000) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head)
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        sent = 0
        async with asyncio.timeout(20):
            with suppress(ConnectionError):
                while True:
                    writer.write(b"a" * 10_000)
                    await writer.drain()
                    sent += 10_000
        assert sent > 400_000
        writer.close()


async def test_connection_goes_on_after_a_small_body_was_refused() -> None:
    async with serving(**KEYS) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = POST + b"Content-Length: %d\r\n" % len(BODY)
        for key, status in ((b"none", b"401"), (b"sk-alice", b"200")):
            writer.write(head + b"Authorization: Bearer " + key + b"\r\n\r\n")
            await asyncio.sleep(0.1)
            writer.write(BODY)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.split(b" ")[1] == status
            await reader.readexactly(int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
        writer.close()


async def test_errors_of_clients_are_counted_by_key() -> None:
    """Also for keys that have no limits, and whatever the error is."""
    async with serving(**KEYS) as server:
        for body in ({"prompt": ""}, {"prompt": "a", "model": "other"}, {"prompt": "the fox", "max_tokens": 1}):
            await server.post(COMPLETION, body, Authorization="Bearer sk-alice")
        await server.post(COMPLETION, {"prompt": ""}, Authorization="Bearer none")
        counted = [line for line in server.shown().splitlines() if "key_client_errors_total{" in line]
        assert len(counted) == 1
        assert 'key="alice"' in counted[0]
        assert counted[0].endswith(" 2.0")


@pytest.mark.parametrize("levels", [64, 65, 900])
async def test_levels_of_template_arguments(levels: int) -> None:
    """The limit is named, and not that of Python's stack."""
    messages = [{"role": "user", "content": "the fox"}]
    deep = json.loads('{"a":' * levels + "1" + "}" * levels)
    body = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": deep}
    async with serving() as server:
        status, answer = await server.post("/v1/chat/completions", body)
        assert status == (200 if levels == 64 else 400), answer
        assert levels == 64 or "the limit is 64" in str(answer)

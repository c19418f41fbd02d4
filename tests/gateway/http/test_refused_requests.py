"""The memory of refused requests does not wait for the garbage collector, which runs rarely."""

import asyncio
import gc
from collections.abc import Iterator

import pytest
from aiohttp import web
from pagewise_gateway.scheduler_client import LiveRequest

from tests.gateway.server import Server, serving

TAIL = b"z" * 100_000


@pytest.fixture
def calm_collector() -> Iterator[None]:
    """As in the service, and calmer: this test makes few objects."""
    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(1_000_000)
    yield
    gc.set_threshold(*before)


async def refused(server: Server, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    try:
        assert (await reader.readline()).split(b" ")[1] in (b"400", b"404", b"405")
        await reader.read()
    except ConnectionError:  # it was closed with bytes unread
        pass
    writer.close()


@pytest.mark.usefixtures("calm_collector")
@pytest.mark.parametrize(
    "data",
    [
        b"GET /nowhere HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"POST /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: a/b\r\nContent-Length: 100000\r\n\r\n"
        + TAIL,
        b"GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n" + TAIL,
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Encoding: gzip\r\nContent-Length: 100000\r\n\r\n" + TAIL,
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n",
    ],
    ids=["no such path", "method", "no HTTP", "no gzip", "small chunks"],
)
async def test_connections_that_were_refused_do_not_stay(data: bytes) -> None:
    async with serving() as server:
        for _ in range(200):
            await refused(server, data)
        assert sum(type(each) is web.RequestHandler for each in gc.get_objects()) < 100


@pytest.mark.usefixtures("calm_collector")
@pytest.mark.parametrize(
    "fields",
    [{}, {"stream": True}, {"stream": True, "n": 3}, {"prompt": ["a", "b"]}, {"stream": True, "stop": "fox"}],
    ids=["whole", "stream", "outputs", "prompts", "stopped"],
)
async def test_requests_that_were_served_do_not_stay(fields: dict[str, object]) -> None:
    async with serving() as server:
        for _ in range(50):
            body = {"prompt": "the fox jumps", **fields}
            async with server.http.post(server.url + "/v1/completions", json=body) as response:
                assert response.status == 200
                await response.read()
        assert sum(type(each) is LiveRequest for each in gc.get_objects()) < 10

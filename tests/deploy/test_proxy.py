"""nginx with ``deploy/proxy/nginx.conf`` before a gateway: streams pass at once, and slow clients do not reach it."""

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.raw_connections import COMPLETION, LONG, connection, http_bytes
from tests.gateway.server import Server, serving
from tests.proxy import needs_nginx, nginx

JSON = {"Content-Type": "application/json"}
pytestmark = needs_nginx


@asynccontextmanager
async def behind_proxy(folder: Path, scheduler: FakeScheduler, **changes: str) -> AsyncIterator[tuple[Server, Server]]:
    """Yields a gateway, and the same gateway as clients reach it through nginx."""
    async with serving(scheduler) as gateway:
        with nginx(folder, f"127.0.0.1:{gateway.port}", **changes) as port:
            yield gateway, replace(gateway, url=f"http://127.0.0.1:{port}", port=port)


async def all_of(sock: socket.socket) -> bytes:
    received = b""
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionResetError):  # after a time-out
            while data := await asyncio.get_running_loop().sock_recv(sock, 65536):
                received += data
    return received


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "the fox", "stream": True, "ignore_eos": True, **fields}).encode()


async def test_tokens_pass_at_once_and_a_client_that_hangs_up_ends_its_request(tmp_path: Path) -> None:
    scheduler = FakeScheduler(max_model_len=LONG, step_seconds=0.01)
    async with behind_proxy(tmp_path, scheduler) as (_, proxy):
        async with proxy.http.post(proxy.url + COMPLETION, data=body(max_tokens=3), headers=JSON) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
        async with connection(proxy, http_bytes(COMPLETION, body(max_tokens=100_000))) as sock, asyncio.timeout(20):
            received = b""
            while b"data: " not in received:
                received += await asyncio.get_running_loop().sock_recv(sock, 65536)
            await scheduler.until_running()
        await scheduler.until_idle()
        assert len(scheduler.aborts) == 1


async def test_slow_heads_and_bodies_reach_no_gateway(tmp_path: Path) -> None:
    slow = {
        "client_header_timeout 10s": "client_header_timeout 1s",
        "client_body_timeout 10s": "client_body_timeout 1s",
    }
    async with behind_proxy(tmp_path, FakeScheduler(), **slow) as (gateway, proxy):
        head = b"GET /version HTTP/1.1\r\nHost"
        async with connection(proxy, head) as one, connection(proxy, http_bytes(COMPLETION, b"{", length=99)) as two:
            await asyncio.sleep(0.3)
            assert 'http_connections{model_name="fake/model"} 0.0' in gateway.shown()
            assert await all_of(one) == await all_of(two) == b""
        assert gateway.scheduler.submits == []


async def test_chunks_arrive_as_one_body_and_large_ones_do_not(tmp_path: Path) -> None:
    async with behind_proxy(tmp_path, FakeScheduler()) as (_, proxy):
        whole = body(max_tokens=2, stream=False)
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in whole) + b"0\r\n\r\n"
        head = (
            f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        async with connection(proxy, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks) as sock:
            assert (await all_of(sock)).startswith(b"HTTP/1.1 200 ")
        async with proxy.http.post(proxy.url + COMPLETION, data=io.BytesIO(b" " * 5 * 2**20), headers=JSON) as response:
            assert response.status == 413


async def test_an_address_has_so_many_requests_at_a_time(tmp_path: Path) -> None:
    scheduler = FakeScheduler(max_model_len=LONG, step_seconds=0.01)
    async with behind_proxy(tmp_path, scheduler, **{"addresses 256": "addresses 1"}) as (_, proxy):
        async with connection(proxy, http_bytes(COMPLETION, body(max_tokens=100_000))):
            await scheduler.until_running()
            async with proxy.http.post(proxy.url + COMPLETION, data=body(), headers=JSON) as response:
                assert response.status == 429
        await scheduler.until_idle()

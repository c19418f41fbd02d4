"""The HTTP surface on a real socket, over a fake gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from openai import AsyncOpenAI
from pagewise_gateway.http import create_app, listening
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.config import SchedulerConfig

from tests.gateway.http.fake_gateway import FakeGateway
from tests.gateway.text.tokenizer_builders import CHAT_TEMPLATE, byte_level_backend

MODEL = "fake/model"
TOKENIZER = Tokenizer(byte_level_backend(), eos_token_ids=frozenset({0}), chat_template=CHAT_TEMPLATE)


@dataclass
class Server:
    """A running server and ways to talk to it."""

    url: str
    port: int
    gateway: FakeGateway
    metrics: Metrics
    http: aiohttp.ClientSession
    openai: AsyncOpenAI

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, dict[str, object]]:
        """Status and JSON of a POST."""
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def post_bytes(self, path: str, body: bytes, content_type: str) -> tuple[int, dict[str, object]]:
        """The same for bytes as they are."""
        headers = {"Content-Type": content_type}
        async with self.http.post(self.url + path, data=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict[str, object]]:
        """Status and JSON of a GET."""
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def serving(
    gateway: FakeGateway | None = None,
    *,
    tokenizer: Tokenizer = TOKENIZER,
    slow_reader_seconds: float = 30.0,
    max_body_bytes: int = 1024 * 1024,
    max_n: int = 8,
    max_connections: int = 100,
    keepalive_timeout: float = 75.0,
    **options: Any,
) -> AsyncIterator[Server]:
    """Serve until the context is left; nothing may run by then."""
    gateway = gateway or FakeGateway(tokenizer)
    config = SchedulerConfig(
        served_model_name=MODEL,
        max_body_bytes=max_body_bytes,
        max_n=max_n,
        write_timeout=slow_reader_seconds,
        **options,
    )
    metrics = Metrics(MODEL)
    app = create_app(gateway, tokenizer, config, metrics)
    async with listening(
        app,
        metrics,
        host="127.0.0.1",
        port=0,
        max_connections=max_connections,
        keepalive_timeout=keepalive_timeout,
        shutdown_timeout=60.0,
    ) as (_, port):
        url = f"http://127.0.0.1:{port}"
        async with (
            aiohttp.ClientSession() as http,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai,
        ):
            yield Server(url, port, gateway, metrics, http, openai)
        await gateway.until_idle()

"""A gateway on real sockets, over a fake scheduler."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from openai import AsyncOpenAI
from pagewise_gateway.http import create_app, listening, load_certificate
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client import SchedulerClient
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.config import GatewayConfig
from pagewise_shared.generation_config import GenerationConfig
from pagewise_shared.tracing import Tracing

from tests.gateway.fake_scheduler import FakeScheduler, render
from tests.gateway.text.tokenizer_builders import CHAT_TEMPLATE, byte_level_backend

MODEL = "fake/model"
TOKENIZER = Tokenizer(byte_level_backend(), eos_token_ids=frozenset({0}), chat_template=CHAT_TEMPLATE)


@dataclass
class Server:
    """A running gateway, and methods to talk to it."""

    url: str
    port: int
    scheduler: FakeScheduler
    scheduler_client: SchedulerClient
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

    def shown(self) -> str:
        """The gateway's metrics, as text."""
        return render(self.metrics.snapshot()).decode()

    async def until_joined(self) -> None:
        """Wait until a scheduler has let the gateway in and reported the capacity of its executors."""
        async with asyncio.timeout(10):
            while not self.scheduler_client.answers or (
                self.scheduler.ready and not self.scheduler_client.ready_executors
            ):
                await asyncio.sleep(0.002)


@asynccontextmanager
async def serving(
    scheduler: FakeScheduler | None = None,
    *,
    tokenizer: Tokenizer = TOKENIZER,
    slow_reader_seconds: float = 30.0,
    max_body_bytes: int = 1024 * 1024,
    max_n: int = 8,
    max_connections: int = 100,
    keepalive_timeout: float = 75.0,
    **options: Any,
) -> AsyncIterator[Server]:
    """Serve over a scheduler of its own until the context is left; nothing may run by then."""
    async with (scheduler or FakeScheduler()).listening() as fake:
        async with gateway(
            fake.endpoint,
            fake,
            tokenizer=tokenizer,
            write_timeout=slow_reader_seconds,
            max_body_bytes=max_body_bytes,
            max_n=max_n,
            max_connections=max_connections,
            keepalive_timeout=keepalive_timeout,
            **options,
        ) as server:
            await server.until_joined()
            yield server
        await fake.until_idle()


@asynccontextmanager
async def gateway(
    endpoint: str,
    scheduler: FakeScheduler,
    *,
    tokenizer: Tokenizer = TOKENIZER,
    tracing: Tracing | None = None,
    generation: GenerationConfig = GenerationConfig(),  # noqa: B008
    **options: Any,
) -> AsyncIterator[Server]:
    """A gateway of the scheduler at an endpoint, whether there is one or not; ``scheduler``: the one to look at."""
    options = {"max_n": 8, "scheduler_timeout": 10.0, "gateway_id": "gateway", **options}
    config = GatewayConfig(served_model_name=MODEL, scheduler=endpoint, port=0, **options)
    metrics = Metrics(MODEL, "gateway")
    scheduler_client = SchedulerClient(
        endpoint, tokenizer, metrics, gateway_id="gateway", model_name=MODEL, timeout=config.scheduler_timeout
    )
    certificate = load_certificate(config.ssl_certfile, config.ssl_keyfile, metrics)
    linked = asyncio.create_task(scheduler_client.run())
    try:
        async with listening(
            create_app(scheduler_client, tokenizer, config, metrics, tracing, generation),
            metrics,
            host="127.0.0.1",
            port=0,
            max_connections=config.max_connections,
            keepalive_timeout=config.keepalive_timeout,
            shutdown_timeout=60.0,
            reuse_port=config.reuse_port,
            certificate=certificate,
        ) as listener:
            port = listener.address[1]
            url = f"http{'s' if certificate else ''}://127.0.0.1:{port}"
            async with (
                aiohttp.ClientSession() as http,
                AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai,
            ):
                yield Server(url, port, scheduler, scheduler_client, metrics, http, openai)
            await listener.close()
            await scheduler_client.close(5.0, asyncio.Event())
        assert not linked.done(), linked.exception()
    finally:
        linked.cancel()
        await asyncio.gather(linked, return_exceptions=True)

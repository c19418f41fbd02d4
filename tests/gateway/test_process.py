"""``pagewise-gateway`` as a process of its own, over a fake scheduler."""

import asyncio
import json
import signal
import ssl
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.http.certificates import write_certificate

BODY = {"prompt": "Once upon a time", "max_tokens": 40, "stream": True, "ignore_eos": True}


def scheduler(**fields: Any) -> FakeScheduler:
    return FakeScheduler(**{"vocab_size": 4096, "max_model_len": 100_000, "step_seconds": 0.01, **fields})


@dataclass
class Gateway:
    """A process: the address on which it listens, and its log."""

    process: Process
    url: str = ""
    log: list[str] = field(default_factory=list)

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.log.append(line.decode())

    async def until_ready(self, http: aiohttp.ClientSession, **options: Any) -> None:
        async with asyncio.timeout(20):
            while True:
                async with http.get(self.url + "/health", **options) as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def started(*arguments: str, listens: bool = True) -> AsyncIterator[Gateway]:
    """A gateway, on a free port by default; it has ended when the context has."""
    options = [] if "--port" in arguments else ["--port", "0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagewise_gateway.main", *options, *arguments, stdout=PIPE, stderr=PIPE
    )
    gateway = Gateway(process)
    reading = asyncio.create_task(gateway.read_log())
    try:
        if listens:
            assert process.stdout is not None
            async with asyncio.timeout(30):
                words = (await process.stdout.readline()).decode().split()
            assert words[:1] == ["listening"], gateway.log
            gateway.url = words[1]
        yield gateway
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading
        process._transport.close()  # type: ignore[attr-defined]


async def stopped(gateway: Gateway, seconds: float = 10) -> int:
    async with asyncio.timeout(seconds):
        return await gateway.process.wait()


async def text_of(response: aiohttp.ClientResponse) -> str:
    """The text of a stream that ends well."""
    *events, done, rest = (await response.text()).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


async def test_it_listens_before_there_is_a_scheduler_and_ends_in_peace() -> None:
    async with scheduler().listening() as fake:
        endpoint = fake.endpoint
    patience = ("--scheduler-timeout", "2")
    async with started("--scheduler", endpoint, *patience) as gateway, aiohttp.ClientSession() as http:
        assert gateway.url.startswith("http://127.0.0.1:")
        async with http.get(gateway.url + "/health") as response:
            assert response.status == 503
        async with http.post(gateway.url + "/v1/completions", json=BODY) as response:
            assert response.status == 503
            assert (await response.json())["error"]["message"] == "no scheduler answers"
        async with scheduler().listening(endpoint) as fake:
            await gateway.until_ready(http)
            async with http.post(gateway.url + "/v1/completions", json=BODY) as response:
                assert response.status == 200
                assert await text_of(response)
            gateway.process.send_signal(signal.SIGTERM)
            assert await stopped(gateway) == 0
            await fake.until(lambda: fake.goodbyes)
        assert [line for line in gateway.log if "Traceback" in line or " ERROR " in line] == []


async def test_streams_go_on_after_sigterm() -> None:
    async with scheduler().listening() as fake, aiohttp.ClientSession() as http:
        async with started("--scheduler", fake.endpoint, "--shutdown-timeout", "20") as gateway:
            await gateway.until_ready(http)
            body = {**BODY, "max_tokens": 100}
            async with http.post(gateway.url + "/v1/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
                gateway.process.send_signal(signal.SIGTERM)
                assert await text_of(response)
            assert await stopped(gateway) == 0
        assert fake.aborts == []
        assert fake.goodbyes == ["stopped"]


async def test_streams_that_take_too_long_after_sigterm_are_ended_properly() -> None:
    async with (
        scheduler().listening() as fake,
        aiohttp.ClientSession() as http,
        started("--scheduler", fake.endpoint, "--shutdown-timeout", "0.5") as gateway,
    ):
        await gateway.until_ready(http)
        body = {**BODY, "max_tokens": 50_000, "stream_options": {"include_usage": True}}
        whole = asyncio.create_task(answer_of(http, gateway.url, {**BODY, "max_tokens": 50_000, "stream": False}))
        async with http.post(gateway.url + "/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            gateway.process.send_signal(signal.SIGTERM)
            *_, last, usage, done = (await response.text()).strip().split("\n\n")
        (choice,) = json.loads(last.removeprefix("data: "))["choices"]
        assert choice["finish_reason"] == "abort"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] > 1
        assert done == "data: [DONE]"
        status, answer = await whole
        error = answer["error"]
        assert status == 503
        assert (error["code"], error["message"]) == ("service_unavailable", "the gateway is shutting down")
        assert await stopped(gateway) == 0
        await fake.until(lambda: fake.goodbyes == ["stopped"])
        assert len(fake.aborts) == 2


async def test_a_stream_without_a_token_gets_an_error_that_asks_to_come_back() -> None:
    async with (
        scheduler(paused=True).listening() as fake,
        aiohttp.ClientSession() as http,
        started("--scheduler", fake.endpoint, "--shutdown-timeout", "0.5") as gateway,
    ):
        await gateway.until_ready(http)
        answer = asyncio.create_task(http.post(gateway.url + "/v1/completions", json=BODY))
        await fake.until(lambda: fake.submits)
        gateway.process.send_signal(signal.SIGTERM)
        async with await answer as response:
            assert (response.status, response.headers.get("Retry-After")) == (503, "2"), await response.text()
        assert await stopped(gateway) == 0


async def test_new_requests_are_told_to_come_back_while_streams_end() -> None:
    async with (
        scheduler().listening() as fake,
        aiohttp.ClientSession() as http,
        started("--scheduler", fake.endpoint, "--shutdown-timeout", "20") as gateway,
    ):
        await gateway.until_ready(http)
        async with http.post(gateway.url + "/v1/completions", json={**BODY, "max_tokens": 200}) as stream:
            await stream.content.readuntil(b"\n\n")
            gateway.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                while True:
                    async with http.post(gateway.url + "/v1/completions", json={**BODY, "max_tokens": 1}) as response:
                        if response.status == 503:
                            break
            assert response.headers["Retry-After"] == "2"
            assert response.headers["Connection"] == "close"
            async with http.get(gateway.url + "/health") as response:
                assert (response.status, (await response.json())["status"]) == (503, "the gateway is shutting down")
            async with http.get(gateway.url + "/version") as response:
                assert response.status == 200
            assert await text_of(stream)
        assert await stopped(gateway) == 0


async def test_a_second_signal_ends_streams_at_once() -> None:
    async with (
        scheduler().listening() as fake,
        aiohttp.ClientSession() as http,
        started("--scheduler", fake.endpoint, "--shutdown-timeout", "60") as gateway,
    ):
        await gateway.until_ready(http)
        async with http.post(gateway.url + "/v1/completions", json={**BODY, "max_tokens": 50_000}) as response:
            await response.content.readuntil(b"\n\n")
            gateway.process.send_signal(signal.SIGINT)
            async with asyncio.timeout(20):  # two signals that come before the first is handled are one
                while True:
                    async with http.get(gateway.url + "/health") as health:
                        if health.status == 503:
                            break
            gateway.process.send_signal(signal.SIGINT)
            assert '"finish_reason":"abort"' in await response.text()
        assert await stopped(gateway) == 0


async def test_one_of_two_on_a_port_leaves_it_to_the_other() -> None:
    async with scheduler().listening() as fake, aiohttp.ClientSession() as http:
        arguments = ["--scheduler", fake.endpoint, "--reuse-port", "--shutdown-timeout", "20"]
        async with started(*arguments) as one:
            await one.until_ready(http)
            async with http.post(one.url + "/v1/completions", json={**BODY, "max_tokens": 50_000}) as stream:
                await stream.content.readuntil(b"\n\n")
                async with started(*arguments, "--port", one.url.rpartition(":")[2]) as two:
                    await fake.until(lambda: len(fake.members) == 2)
                    one.process.send_signal(signal.SIGTERM)
                    while any(
                        found.status == psutil.CONN_LISTEN
                        for found in psutil.Process(one.process.pid).net_connections()
                    ):
                        await asyncio.sleep(0.02)
                    for _ in range(20):
                        async with (
                            aiohttp.ClientSession() as another,
                            another.post(two.url + "/v1/completions", json=BODY) as response,
                        ):
                            assert response.status == 200
                    assert one.process.returncode is None
                    one.process.send_signal(signal.SIGTERM)
                    assert (await stream.text()).endswith("data: [DONE]\n\n")
            assert await stopped(one) == 0


async def answer_of(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with http.post(url + "/v1/completions", json=body) as response:
        return response.status, await response.json()


async def test_two_of_them_on_one_port() -> None:
    async with scheduler().listening() as fake, aiohttp.ClientSession() as http:
        arguments = ["--scheduler", fake.endpoint, "--reuse-port"]
        async with started(*arguments, "--gateway-id", "one") as one:
            port = one.url.rpartition(":")[2]
            async with started(*arguments, "--gateway-id", "two", "--port", port) as two:
                assert two.url == one.url
                await fake.until(lambda: len(fake.members) == 2)
                await one.until_ready(http)
                headers = {"Connection": "close"}
                while len({member.hello.gateway_id for member in fake.members.values() if member.runs}) < 2:
                    async with http.post(one.url + "/v1/completions", json=BODY, headers=headers) as response:
                        assert await text_of(response)
                assert {hello.gateway_id for hello in fake.hellos} == {"one", "two"}
        async with started("--scheduler", fake.endpoint) as alone:
            port = alone.url.rpartition(":")[2]
            async with started("--scheduler", fake.endpoint, "--port", port, listens=False) as refused:
                assert await stopped(refused, 30) == 2
            assert "cannot listen on" in "".join(refused.log)


async def test_https(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "first")
    context = ssl.create_default_context(cafile=str(certificate))
    options = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    async with scheduler().listening() as fake, aiohttp.ClientSession() as http:
        async with started("--scheduler", fake.endpoint, *options) as gateway:
            assert gateway.url.startswith("https://127.0.0.1:")
            await gateway.until_ready(http, ssl=context)
            async with http.post(gateway.url + "/v1/completions", json=BODY, ssl=context) as response:
                assert await text_of(response)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            writer.close()
            gateway.process.send_signal(signal.SIGTERM)
            assert await stopped(gateway) == 0
        assert [line for line in gateway.log if "Traceback" in line or " ERROR " in line] == []


async def test_a_gateway_that_is_refused_says_why() -> None:
    async with (
        scheduler(refuse_gateways="it speaks protocol 1, this scheduler speaks 2").listening() as fake,
        started("--scheduler", fake.endpoint, listens=False) as gateway,
    ):
        assert await stopped(gateway, 30) == 2
    assert "refused this gateway: it speaks protocol 1, this scheduler speaks 2" in "".join(gateway.log)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--ssl-certfile", "/nowhere"], "/nowhere"),
        (["--api-keys-file", "/nowhere"], "/nowhere"),
        (["--scheduler", "tcp://192.0.2.1:5758"], "there are no keys"),
        (["--keys", "/nowhere"], "/nowhere"),
    ],
)
async def test_what_it_cannot_start_with(arguments: list[str], named: str) -> None:
    async with started(*arguments, listens=False) as gateway:
        assert await stopped(gateway, 30) == 2
    (line,) = [line for line in gateway.log if "cannot" in line]
    assert named in line

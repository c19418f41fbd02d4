"""``--log-requests``: the content of a request's line, and that no client writes a line of its own."""

import asyncio
import json
import logging
import re

import aiohttp
import pytest

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, Server, serving

COMPLETION = "/v1/completions"
BODY = {"model": MODEL, "prompt": "a secret fox", "max_tokens": 4, "ignore_eos": True}
LOGGER = "pagewise_gateway.http.request_log"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """The fields of each line."""
    said = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert all("\n" not in text and text.isprintable() for text in said)
    return [
        {name: json.loads(value) if value[0] == '"' else value for name, value in fields(text)}
        for text in (one.removeprefix("request ") for one in said)
    ]


def fields(text: str) -> list[tuple[str, str]]:
    found = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|[^" ]+)(?: |$)', text)
    assert " ".join(f"{name}={value}" for name, value in found) == text
    return found


async def a_line(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """The one that there is, or will be in a moment: a client may have its answer before."""
    async with asyncio.timeout(20):
        while not (found := lines(caplog)):
            await asyncio.sleep(0.01)
    (one,) = found
    caplog.clear()
    return one


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_tells_tokens_times_and_ids(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    keys = {"api_keys": "alice: sk-1", "log_requests": True}
    async with serving(FakeScheduler(step_seconds=0.02), **keys) as server:
        headers = {"Authorization": "Bearer sk-1", "X-Request-Id": "order-17"}
        body = {**BODY, "prompt": ["a secret fox", "another"], "n": 2, "stream": stream}
        async with server.http.post(server.url + COMPLETION, json=body, headers=headers) as response:
            text = await response.text()
        line = await a_line(caplog)
    answer = json.loads(text.split("\n\n")[0].removeprefix("data: ") if stream else text)
    assert answer["id"] == f"cmpl-{line['id']}"
    told = ("client_id", "key", "endpoint", "status", "output_tokens", "finish")
    assert [line[name] for name in told] == ["order-17", "alice", "POST /v1/completions", "200", "16", "length"]
    assert int(line["prompt_tokens"]) > int(line["cached_tokens"]) >= 0
    if not stream:
        assert int(line["prompt_tokens"]) == answer["usage"]["prompt_tokens"]
        assert int(line["cached_tokens"]) == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= float(line["queue"]) <= float(line["duration"])
    assert 0 <= float(line["first_token"]) <= float(line["duration"])
    assert "secret" not in caplog.text


async def test_refused_requests_have_lines_too(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = FakeScheduler(refuse=("overloaded", "the queue is full", 3))
    async with serving(scheduler, api_keys="alice: sk-1", log_requests=True) as server:
        good = {"Authorization": "Bearer sk-1"}
        for path, body, headers, status, key in (
            (COMPLETION, BODY, {}, "401", "-"),
            (COMPLETION, {**BODY, "max_tokens": -1}, good, "400", "alice"),
            (COMPLETION, BODY, good, "429", "alice"),
            ("/no/such/path", {}, good, "404", "alice"),
        ):
            assert str((await server.post(path, body, **headers))[0]) == status
            line = await a_line(caplog)
            assert (line["status"], line["key"], line["client_id"]) == (status, key, "-")
            assert line["endpoint"] == f"POST {path}"
            assert float(line["duration"]) >= 0


async def test_a_client_that_hangs_up_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeScheduler(step_seconds=0.01, max_model_len=100_000), log_requests=True) as server:
        async with aiohttp.ClientSession() as http:
            body = {**BODY, "max_tokens": 50_000, "stream": True}
            async with http.post(server.url + COMPLETION, json=body) as response:
                await response.content.readuntil(b"\n\n")
        line = await a_line(caplog)
    assert (line["status"], line["finish"]) == ("499", "abort")
    assert 1 <= int(line["output_tokens"]) < 50_000


async def test_what_clients_send_cannot_write_lines_or_fields(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(log_requests=True) as server:
        for path, sent in (("/x", 'a"status=500'), ("/%0arequest%20id=forged", "b"), ("/" + "y" * 4000, "c" * 128)):
            async with server.http.get(server.url + path, headers={"X-Request-Id": sent}) as response:
                assert response.status == 404
            line = await a_line(caplog)
            assert (line["status"], line["client_id"]) == ("404", sent)
            assert len(line["endpoint"]) <= 200
        await send_raw(server, b"GET /z HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xe2\x80\xa8forged\r\n\r\n")
        assert (await a_line(caplog))["client_id"] == "-"


async def send_raw(server: Server, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_probes_have_no_lines_and_without_the_option_nothing_has(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(log_requests=True) as server:
        assert (await server.get("/health"))[0] == 200
        assert (await server.get("/version"))[0] == 200
        assert (await server.get("/v1/models"))[0] == 200
        assert (await a_line(caplog))["endpoint"] == "GET /v1/models"
    async with serving() as server:
        assert (await server.post(COMPLETION, BODY))[0] == 200
    assert lines(caplog) == []

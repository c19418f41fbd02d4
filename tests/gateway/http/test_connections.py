"""Clients that leave, stall, or send slowly; request ids; and operators' endpoints."""

import asyncio
import json
import logging
import shutil
from asyncio.subprocess import PIPE, STDOUT
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pagewise_gateway.http import parsing
from pagewise_gateway.http.credentials import Client
from pagewise_gateway.http.errors import OverloadedError
from pagewise_gateway.http.intake import AnswerMemory
from pagewise_gateway.metrics import Metrics
from pagewise_shared.protocol import KeyLimits

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.raw_connections import COMPLETION, LONG, connection, http_bytes, read_late
from tests.gateway.server import MODEL, Server, serving

METRICS = """
prompt_tokens_total request_success_total time_to_first_token_seconds_bucket inter_token_latency_seconds_count
e2e_request_latency_seconds_sum request_queue_time_seconds_sum request_prefill_time_seconds_sum
request_decode_time_seconds_sum http_requests_in_progress http_connections http_connections_refused_total
http_unauthorized_total http_slow_readers_total key_reloads_total certificate_reloads_total
gateway_frames_dropped_total gateway_rejoins_total gateway_cpu_seconds_total gateway_resident_memory_bytes
gateway_tasks
"""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["the fox"], ["the fox", "the dog", "0123"]])
async def test_a_client_that_hangs_up_is_forgotten(stream: bool, prompts: list[str]) -> None:
    scheduler = FakeScheduler(max_model_len=LONG, step_seconds=0.01)
    body = json.dumps({"prompt": prompts, "max_tokens": 100_000, "stream": stream, "n": 2}).encode()
    async with serving(scheduler) as server:
        async with connection(server, http_bytes(COMPLETION, body)) as sock:
            await scheduler.until_running()
            if stream:
                await asyncio.get_running_loop().sock_recv(sock, 1000)
        async with asyncio.timeout(20):
            await scheduler.until_idle()
        assert len(scheduler.aborts) == 1


async def test_openai_client_that_hangs_up() -> None:
    scheduler = FakeScheduler(max_model_len=LONG, step_seconds=0.005)
    async with serving(scheduler) as server:
        stream = await server.openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "a"}],
            max_tokens=10_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(3):
            await anext(stream)
        await stream.close()
        await scheduler.until_idle()
        assert len(scheduler.aborts) == 1


@pytest.mark.parametrize("prompts", [["the fox"], ["the fox", "the dog"]])
async def test_a_client_that_stops_reading_is_cut_off(prompts: list[str]) -> None:
    scheduler = FakeScheduler(max_model_len=LONG, step_seconds=0.0001)
    request = {"prompt": prompts, "max_tokens": 400_000, "stream": True, "n": 8, "logprobs": 20}
    async with serving(scheduler, slow_reader_seconds=0.3) as server:
        async with connection(server, http_bytes(COMPLETION, json.dumps(request).encode())):
            async with asyncio.timeout(20):
                await scheduler.until_running()
                await scheduler.until_idle()
            assert len(scheduler.aborts) == 1
        assert 'http_slow_readers_total{model_name="fake/model"} 1.0' in server.shown()


async def test_a_slow_client_that_does_read_is_not_cut_off() -> None:
    scheduler = FakeScheduler(max_model_len=LONG)
    request = {"prompt": "the fox", "max_tokens": 180, "stream": True, "n": 8, "logprobs": 20}
    async with serving(scheduler, slow_reader_seconds=5) as server:
        sent = http_bytes(COMPLETION, json.dumps(request).encode(), "Connection: close\r\n")
        received = await read_late(server, sent, 0.5)
        assert b"data: [DONE]\n\n" in received
        assert scheduler.aborts == []


TOKENIZE = json.dumps({"prompt": "zq" * 400_000, "return_token_strs": True}).encode()
"""Its answer has more bytes than the buffers of sockets."""


async def test_a_large_answer_counts_until_it_is_read_or_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keys = {"api_keys": "a: ka concurrent=1", "log_requests": True}
    async with serving(FakeScheduler(max_model_len=LONG), slow_reader_seconds=0.5, **keys) as server:
        sent = http_bytes("/tokenize", TOKENIZE, "Authorization: Bearer ka\r\n")
        async with connection(server, sent) as sock, asyncio.timeout(20):
            assert (await asyncio.get_running_loop().sock_recv(sock, 100)).startswith(b"HTTP/1.1 200")
            assert server.scheduler_client.num_live == 1
            await server.scheduler.until(lambda: server.scheduler.aborts)
            await server.scheduler.until(lambda: 'http_connections{model_name="fake/model"} 0.0' in server.shown())
        assert 'http_slow_readers_total{model_name="fake/model"} 1.0' in server.shown()
    assert " status=499 " in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_counts_until_its_answer_is_read(stream: bool) -> None:
    large = {"prompt": "zq" * 400_000, "echo": True, "max_tokens": 4, "n": 8, "stream": stream}
    small, key = {"prompt": "the fox", "max_tokens": 1}, {"Authorization": "Bearer ka"}
    scheduler = FakeScheduler(max_model_len=LONG)
    async with serving(scheduler, api_keys="a: ka concurrent=2, b: kb concurrent=2") as server:
        sent = http_bytes(COMPLETION, json.dumps(large).encode(), "Authorization: Bearer ka\r\n")
        async with connection(server, sent), connection(server, sent):
            await scheduler.until(lambda: len(scheduler.submits) == 4)
            await scheduler.until_idle()
            async with server.http.post(server.url + COMPLETION, json=small, headers=key) as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "2")
                message = (await response.json())["error"]["message"]
            assert "API key a" in message
            assert "wait to be read" in message
            assert message.endswith("the limit of concurrent requests is 2")
            assert (await server.post(COMPLETION, small, Authorization="Bearer kb"))[0] == 200
        await scheduler.until(lambda: 'http_requests_in_progress{model_name="fake/model"} 0.0' in server.shown())
        assert (await server.post(COMPLETION, small, **key))[0] == 200
        assert 'requests_refused_total{model_name="fake/model",reason="key_unread"} 1.0' in server.shown()


async def test_answers_that_are_being_written_delay_the_next_request_and_do_not_refuse_it() -> None:
    answers, one = AnswerMemory(1, Metrics("m")), Client("a", KeyLimits(concurrent=1))
    await answers.begin_answer(one)
    second = asyncio.create_task(answers.begin_answer(one))
    await asyncio.sleep(0.005)
    answers.end_answer(one)
    await second
    with pytest.raises(OverloadedError):
        await answers.begin_answer(one)


async def test_a_large_answer_to_a_slow_client_is_complete(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(FakeScheduler(max_model_len=LONG), slow_reader_seconds=0.5, log_requests=True) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(2):
            writer.write(http_bytes("/tokenize", TOKENIZE))
            head = await reader.readuntil(b"\r\n\r\n")
            left, received = int(head.lower().partition(b"content-length: ")[2].split()[0]), bytearray()
            while len(received) < left:
                received += await reader.read(min(100_000, left - len(received)))
                await asyncio.sleep(0.01)
            answer = json.loads(received)
            assert len(answer["tokens"]) == len(answer["token_strs"]) == answer["count"] > 100_000
        writer.write(b"HEAD /openapi.json HTTP/1.1\r\nHost: x\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(2):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
        assert 'http_slow_readers_total{model_name="fake/model"} 0.0' in server.shown()
    assert caplog.text.count(" status=200 ") == 3


async def test_a_client_that_reads_none_of_many_small_answers_is_cut_off() -> None:
    get = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serving(slow_reader_seconds=0.5) as server, connection(server, get * 1000), asyncio.timeout(20):
        await server.scheduler.until(lambda: 'http_connections{model_name="fake/model"} 1.0' in server.shown())
        await server.scheduler.until(lambda: 'http_connections{model_name="fake/model"} 0.0' in server.shown())
        assert 'http_slow_readers_total{model_name="fake/model"} 1.0' in server.shown()


async def test_a_body_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "BODY_SECONDS", 0.2)
    async with serving() as server, connection(server, http_bytes(COMPLETION, b'{"prompt"', length=100)) as sock:
        async with asyncio.timeout(20):
            answer = await asyncio.get_running_loop().sock_recv(sock, 10_000)
        assert answer.startswith(b"HTTP/1.1 408")


async def test_request_ids() -> None:
    async with serving() as server:
        body = {"prompt": "the fox"}
        ids, returned = set(), []
        for sent in ("mine", "mine", "x" * 200, "tab\tand space", ""):
            headers = {"X-Request-Id": sent} if sent else {}
            async with server.http.post(server.url + COMPLETION, json=body, headers=headers) as response:
                returned.append(response.headers["X-Request-Id"])
                ids.add((await response.json())["id"])
        assert returned[:2] == ["mine", "mine"]
        assert all(len(generated) == 32 for generated in returned[2:])
        assert len(ids) == len({request.request_id for request in server.scheduler.submits}) == 5
        headers = {"X-Request-Id": "mine"}
        for path, sent_body in (("/nowhere", {}), (COMPLETION, {}), (COMPLETION, {**body, "stream": True})):
            async with server.http.post(server.url + path, json=sent_body, headers=headers) as response:
                assert response.headers["X-Request-Id"] == "mine"


async def test_health_and_version() -> None:
    async with serving(FakeScheduler(ready=0, max_model_len=0)) as server:
        health = {"status": "no executor is ready", "executors": 0, "scheduler": True, "problems": []}
        assert await server.get("/health") == (503, health)
        await server.scheduler.announce(2)
        await server.until_joined()
        fine = {"status": "ok", "executors": 2, "scheduler": True, "problems": []}
        assert await server.get("/health") == (200, fine)
        server.scheduler.problems = ("executor-1: it ended 4 times in a row",)
        await server.scheduler.announce(2)
        await server.scheduler.until(lambda: server.scheduler_client.problems != ())
        degraded = fine | {"status": "degraded", "problems": ["executor-1: it ended 4 times in a row"]}
        assert await server.get("/health") == (200, degraded)
        server.scheduler.problems = ()
        await server.scheduler.announce(0)
        await server.scheduler.until(lambda: server.scheduler_client.ready_executors == 0)
        assert await server.get("/health") == (503, health)
        server.scheduler.silent = True
        await server.scheduler.until(lambda: not server.scheduler_client.answers)
        health = {"status": "no scheduler answers", "executors": 0, "scheduler": False, "problems": []}
        assert await server.get("/health") == (503, health)
        status, answer = await server.get("/version")
        assert status == 200
        assert answer["version"]


async def test_metrics() -> None:
    async with serving() as server:
        server.metrics.request_success("stop").inc()
        async with server.http.get(server.url + "/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = await response.text()
    missing = [name for name in METRICS.split() if f"\npagewise_{name}{{" not in text]
    assert missing == []
    assert 'pagewise_request_success_total{finished_reason="stop",model_name="fake/model"} 1.0' in text
    if (promtool := shutil.which("promtool")) is not None:
        check = await asyncio.create_subprocess_exec(
            promtool, "check", "metrics", stdin=PIPE, stdout=PIPE, stderr=STDOUT
        )
        complaints, _ = await check.communicate(text.encode())
        assert (check.returncode, complaints) == (0, b"")


async def test_openapi_document() -> None:
    async with serving() as server:
        status, document = await server.get("/openapi.json")
        _, missing = await server.get("/nowhere")
    error: Any = missing["error"]
    endpoints = {named.split(" ")[1] for named in error["message"].partition("there are ")[2].split(", ")}
    assert status == 200
    paths: Any = document["paths"]
    schemas: Any = document["components"]
    schemas = schemas["schemas"]

    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*(references(value) for value in node.values()))
        return set().union(*(references(value) for value in node)) if isinstance(node, list) else set()

    assert {reference.rsplit("/", 1)[1] for reference in references(document)} <= set(schemas)
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/metrics"} <= set(paths)
    for path in ("/v1/completions", "/v1/chat/completions"):
        operation = paths[path]["post"]
        assert {"200", "400", "404", "413", "429", "500", "503"} <= set(operation["responses"])
        assert "text/event-stream" in operation["responses"]["200"]["content"]
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert schemas[name]["additionalProperties"] is False
        assert {"max_tokens", "temperature", "logit_bias", "truncate_prompt_tokens"} <= set(schemas[name]["properties"])
    assert set(schemas["ErrorDetail"]["properties"]) == {"message", "type", "param", "code"}
    for path, error in (("/v1/responses", "ErrorResponse"), ("/v1/messages", "MessageError")):
        responses = paths[path]["post"]["responses"]
        assert responses["400"]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{error}")
        assert "event" in responses["200"]["content"]["text/event-stream"]["itemSchema"]["required"]
    assert set(paths) == {path for path in endpoints if path != "/v1/embeddings"}


async def test_a_client_that_hangs_up_under_a_write_is_no_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(response: web.StreamResponse, data: bytes) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", write)
    async with serving() as server:
        body = json.dumps({"model": MODEL, "prompt": "the quick", "max_tokens": 50, "stream": True}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(http_bytes(COMPLETION, body))
        await asyncio.sleep(0.3)
        writer.close()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def answer_of(server: Server, sent: bytes) -> bytes:
    async with connection(server, sent) as sock, asyncio.timeout(10):
        received = bytearray()
        while data := await asyncio.get_running_loop().sock_recv(sock, 65536):
            received += data
    return bytes(received)


async def test_connections_over_the_limit_are_turned_away() -> None:
    async with serving(max_connections=2) as server:
        get = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
        async with connection(server, get) as first, connection(server, get) as second:
            for sock in (first, second):
                assert (await asyncio.get_running_loop().sock_recv(sock, 1000)).startswith(b"HTTP/1.1 200")
            answer = await answer_of(server, b"")
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"Retry-After: 2\r\n" in answer
            assert b'"too many connections"' in answer
            assert 'http_connections{model_name="fake/model"} 2.0' in server.shown()
        async with asyncio.timeout(20):
            while b"200 OK" not in await answer_of(server, get.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")):
                await asyncio.sleep(0.05)
        assert 'http_connections_refused_total{model_name="fake/model"} 0.0' not in server.shown()


@pytest.mark.parametrize("sent", [b"", b"GET /version HTTP/1.1\r\nHost"])
async def test_a_head_that_never_ends(sent: bytes) -> None:
    async with serving(keepalive_timeout=0.3) as server:
        assert await answer_of(server, sent) == b""


@pytest.mark.parametrize("field", [b"X: " + b"y" * 10_000 + b"\r\n", b"X: y\r\n" * 200], ids=["length", "number"])
async def test_headers_are_bounded(field: bytes) -> None:
    get = b"GET /version HTTP/1.1\r\nHost: a\r\n"
    async with serving() as server:
        assert (await answer_of(server, get + field + b"\r\n")).startswith(b"HTTP/1.0 400 ")


async def test_hundreds_of_connections_at_once_are_all_answered() -> None:
    """So many bytes arrive at once that requests wait for their turns, and with parts of their bodies."""
    body = b'{"prompt": "%b", "max_tokens": 2}' % (b"the fox jumps " * 3000)
    async with serving(max_connections=400) as server:
        request = http_bytes(COMPLETION, body, "Connection: close\r\n")
        answers = await asyncio.gather(*(answer_of(server, request) for _ in range(256)))
    assert {each.split(b" ", 2)[1] for each in answers} <= {b"200", b"400", b"429"}
    assert all(each.endswith((b"}", b"\r\n\r\n")) for each in answers)

"""Streams that are silent for long: comments and pings, read by the clients' own libraries."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from pagewise_gateway.http.writing import SilenceWatch

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.http.tool_model import TOKENIZER, reply
from tests.gateway.server import MODEL, Server, serving

ASKED: list[Any] = [{"role": "user", "content": "Wie wird das Wetter?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the fox", "max_tokens": 5},
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/responses": {"input": "the fox"},
    "/v1/messages": {"messages": ASKED, "max_tokens": 20},
}
COMMENT, PING = b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'


def silent(**options: Any) -> Any:
    """A gateway whose scheduler generates nothing yet. A stream begins there with a comment, or not at all."""
    scheduler = FakeScheduler(paused=True, replies=[reply("eins zwei drei")], max_model_len=4096)
    return serving(scheduler, tokenizer=TOKENIZER, **{"sse_keep_alive_interval": 0.005, **options})


def claude(server: Server) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=server.url, api_key="secret", max_retries=0)


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_without_tokens_gets_comments_and_then_its_events(path: str) -> None:
    comment = PING if path == "/v1/messages" else COMMENT
    async with silent() as server:
        body = {"model": MODEL, "stream": True, **BODIES[path]}
        async with server.http.post(server.url + path, json=body) as answer:
            assert answer.status == 200
            begin = await answer.content.readexactly(3 * len(comment))
            server.scheduler.paused = False
            rest = await answer.content.read()
    assert begin == comment * 3
    events = rest.replace(comment, b"")
    assert events.startswith((b"data: {", b"event: response.created", b"event: message_start"))
    assert events.endswith((b"data: [DONE]\n\n", b"}\n\n"))


async def test_a_stream_that_stops_in_the_middle_gets_comments() -> None:
    async with silent() as server:
        server.scheduler.paused, server.scheduler.step_seconds = False, 0.002
        body = {"model": MODEL, "stream": True, "prompt": "the fox", "max_tokens": 400, "ignore_eos": True}
        async with server.http.post(server.url + "/v1/completions", json=body) as answer:
            await answer.content.readuntil(b"data: {")
            server.scheduler.paused = True
            await answer.content.readuntil(COMMENT * 3)
            server.scheduler.paused = False
            rest = await answer.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_clients_of_all_apis_read_past_them() -> None:
    async with silent() as server, claude(server) as client:
        server.scheduler.replies = [reply("eins zwei drei")] * 3
        # Each of these returns when the response has begun, which only a comment does here.
        chat = await server.openai.chat.completions.create(model=MODEL, messages=ASKED, stream=True)
        response = await server.openai.responses.create(model=MODEL, input="a", stream=True)
        async with client.messages.stream(model=MODEL, messages=ASKED, max_tokens=50) as message:
            server.scheduler.paused = False
            assert "".join([text async for text in message.text_stream]) == "eins zwei drei"
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chat]) == "eins zwei drei"
        texts = [event.delta async for event in response if event.type == "response.output_text.delta"]
        assert "".join(texts) == "eins zwei drei"


async def test_a_failure_behind_comments_is_an_event_that_clients_know() -> None:
    async with silent() as server, claude(server) as client:
        server.scheduler.replies *= 3
        server.scheduler.fail_after, server.scheduler.fail_kind = 0, "unavailable"
        chat = await server.openai.chat.completions.create(model=MODEL, messages=ASKED, stream=True)
        response = await server.openai.responses.create(model=MODEL, input="a", stream=True)
        message = await client.messages.create(model=MODEL, messages=ASKED, max_tokens=50, stream=True)
        server.scheduler.paused = False
        with pytest.raises(openai.APIError, match="caught fire"):
            await anext(aiter(chat))
        with pytest.raises(anthropic.APIStatusError, match="caught fire"):
            await anext(aiter(message))
        kinds = [event.type async for event in response]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]


async def test_requests_that_are_refused_at_once_keep_their_status() -> None:
    async with silent(sse_keep_alive_interval=60) as server:
        server.scheduler.refuse = ("overloaded", "the queue is full", 3)
        for path, fields in BODIES.items():
            status, answer = await server.post(path, {"model": MODEL, "stream": True, **fields})
            assert status == 429, answer
        status, answer = await server.post("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 10**6})
        assert status == 400, answer


async def test_a_silent_client_that_leaves_aborts_its_request() -> None:
    async with silent() as server:
        body = {"model": MODEL, "stream": True, **BODIES["/v1/completions"]}
        async with server.http.post(server.url + "/v1/completions", json=body) as answer:
            await answer.content.readexactly(len(COMMENT))
        async with asyncio.timeout(10):
            while not server.scheduler.aborts:
                await asyncio.sleep(0.002)


@dataclass
class Written:
    """The part of a writer that is watched."""

    wrote: bool = False


async def test_only_silence_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer runs when the test says so."""
    writer: Any = Written()
    reported: list[None] = []
    timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(delay: float, callback: Callable[[], None]) -> asyncio.Handle:
        timers.append((delay, callback))
        return asyncio.get_running_loop().call_soon(int)

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    with SilenceWatch(writer, 15.0, lambda: reported.append(None)):
        assert [delay for delay, _ in timers] == [7.5]
        for wrote, silences in ((True, 0), (True, 0), (False, 1), (True, 1), (False, 2), (False, 3)):
            writer.wrote = wrote
            timers.pop()[1]()
            assert (len(reported), timers[0][0], writer.wrote) == (silences, 7.5, False)
    timers.clear()
    with SilenceWatch(writer, 0.0, reported.clear):
        assert not timers

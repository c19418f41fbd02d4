"""/v1/messages, read by Anthropic's own client."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message
from pagewise_gateway.http.messages_api import MessageAnswer

from tests.adapter_files import write_adapter
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.http.tool_model import ARGUMENTS, CALLS, HERMES, PARAMETERS, TOKENIZER, reply
from tests.gateway.server import MODEL, Server, serving

TOOLS: list[Any] = [
    {"name": "get_weather", "description": "Weather", "input_schema": PARAMETERS},
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}},
]
TEXT = f"<think>\nEr will das Wetter.\n</think>\n\nIch sehe nach.\n{CALLS}"
BILLING = "x-anthropic-billing-header: cc_version=1.2.3; cch=0a1b2"


@asynccontextmanager
async def messages(*replies: list[int], **options: Any) -> AsyncIterator[tuple[Server, AsyncAnthropic]]:
    scheduler = FakeScheduler(replies=list(replies), max_model_len=4096)
    async with (
        serving(scheduler, tokenizer=TOKENIZER, **{**HERMES, **options}) as server,
        AsyncAnthropic(base_url=server.url, api_key="secret", max_retries=0) as client,
    ):
        yield server, client


async def whole(client: AsyncAnthropic, **options: Any) -> Message:
    return await client.messages.create(**{"model": MODEL, "max_tokens": 200, **options})


async def streamed(client: AsyncAnthropic, **options: Any) -> Message:
    async with client.messages.stream(**{"model": MODEL, "max_tokens": 200, **options}) as stream:
        events = [event.type async for event in stream]
        assert (events[0], events[-1]) == ("message_start", "message_stop")
        return await stream.get_final_message()


BOTH = pytest.mark.parametrize("ask", [whole, streamed])
ASKED: list[Any] = [{"role": "user", "content": "Wie wird das Wetter?"}]


def prompt(server: Server) -> str:
    return TOKENIZER.decode(server.scheduler.last_prompt, skip_special_tokens=False)


@BOTH
async def test_blocks(ask: Any) -> None:
    async with messages(reply(TEXT)) as (server, client):
        answer = await ask(client, messages=ASKED, system="Kurz.", tools=TOOLS)
        assert "<|user|>system: Kurz.<|end|><|user|>user: Wie wird das Wetter?<|end|>" in prompt(server)
        num_tokens = len(server.scheduler.last_prompt)
    thought, text, weather, clock = answer.content
    assert thought.thinking == "Er will das Wetter."
    assert text.text == "Ich sehe nach."
    assert [(block.type, block.name, block.input) for block in (weather, clock)] == [
        ("tool_use", "get_weather", json.loads(ARGUMENTS)),
        ("tool_use", "get_time", {}),
    ]
    assert (answer.stop_reason, answer.role, answer.model) == ("tool_use", "assistant", MODEL)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (num_tokens - 1, 1)
    assert usage.output_tokens == len(reply(TEXT))


@BOTH
async def test_blocks_go_back_into_the_template(ask: Any) -> None:
    async with messages(reply(TEXT), reply("Sonne.")) as (server, client):
        first = await ask(client, messages=ASKED, tools=TOOLS)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "17 Grad"}]}
            for block in first.content
            if block.type == "tool_use"
        ]
        said = [block.model_dump(exclude_none=True) for block in first.content]
        history = [*ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
        answer = await ask(client, messages=history, tools=TOOLS)
        assert [block.text for block in answer.content] == ["Sonne."]
        assert answer.stop_reason == "end_turn"
        asked = prompt(server)
        counted = await client.messages.count_tokens(model=MODEL, messages=history, tools=TOOLS)
        assert counted.input_tokens == len(server.scheduler.last_prompt)
    assert '<|user|>assistant: Ich sehe nach.<tool_call>{"name": "get_weather", "arguments": {"city"' in asked
    assert asked.count("<|user|>tool: 17 Grad<|end|>") == 2


@BOTH
async def test_what_changes_with_every_request_is_no_part_of_the_prompt(ask: Any) -> None:
    async with messages(*[reply("a")] * 4) as (server, client):
        prompts = []
        systems: list[Any] = [
            "You help.\nBe short.",
            f"{BILLING}\nYou help.\nBe short.",
            [{"type": "text", "text": BILLING}, {"type": "text", "text": "You help.\nBe short."}],
            [{"type": "text", "text": "You help.\nBe short.", "cache_control": {"type": "ephemeral"}}],
        ]
        for system in systems:
            await ask(client, messages=ASKED, system=system)
            prompts.append(prompt(server))
    assert len(set(prompts)) == 1
    assert "billing" not in prompts[0]


@BOTH
async def test_why_a_message_ends(ask: Any) -> None:
    async with messages(reply("eins zwei drei"), reply("eins zwei drei"), reply(CALLS)) as (_, client):
        answer = await ask(client, messages=ASKED, stop_sequences=["zwei"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "zwei")
        assert answer.content[0].text == "eins "
        answer = await ask(client, messages=ASKED, max_tokens=3)
        assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
        answer = await whole(client, messages=ASKED, tools=TOOLS, max_tokens=40)
        assert (answer.stop_reason, answer.content[0].input) == ("max_tokens", {})


async def test_thinking_and_choices() -> None:
    async with messages(reply("a</think>b"), reply("<think>a</think>b"), reply(CALLS)) as (server, client):
        answer = await whole(client, messages=ASKED, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in answer.content] == ["thinking", "text"]
        answer = await whole(client, messages=ASKED, thinking={"type": "disabled"})
        assert [block.type for block in answer.content] == ["text"]
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        answer = await whole(client, messages=ASKED, tools=TOOLS, tool_choice=choice)
        assert [block.name for block in answer.content] == ["get_weather"]
        assert server.scheduler.last.params.sampling.grammar


RESULT = {"type": "tool_result", "tool_use_id": "a"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "messages[0].content[0]"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "a"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": []}], "system": "a"}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"speed": "fast"}, "speed"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"mcp_servers": [{"type": "url", "name": "a", "url": "https://a"}]}, "mcp_servers"),
    ({"messages": [{"role": "system", "content": [RESULT]}]}, "messages[0].content[0]"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: repr(value)[:50])
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    async with messages() as (server, client):
        with pytest.raises(anthropic.BadRequestError) as raised:
            await whole(client, messages=ASKED, extra_body=fields)
        body: Any = raised.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["error"]["param"].startswith(param), body
        assert server.scheduler.submits == []


async def test_the_key_is_sent_as_clients_send_it() -> None:
    async with messages(reply("a"), api_keys="secret") as (server, client):
        assert (await whole(client, messages=ASKED)).content
        with pytest.raises(anthropic.AuthenticationError):
            await whole(client.with_options(api_key="wrong"), messages=ASKED)
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        async with server.http.get(server.url + "/metrics", headers={"X-Api-Key": "secret"}) as answer:
            assert answer.status == 401


async def test_every_error_has_their_shape() -> None:
    async with messages(api_keys="secret") as (server, client):
        headers = {"Authorization": "Bearer secret"}
        for method, path, sent, status, kind in [
            ("POST", "/v1/messages", {}, 401, "authentication_error"),
            ("POST", "/v1/messages/count_tokens", {"X-Api-Key": "wrong"}, 401, "authentication_error"),
            ("POST", "/v1/messages/batches", headers, 404, "not_found_error"),
            ("GET", "/v1/messages", headers, 405, "invalid_request_error"),
            ("POST", "/v1/messages", {**headers, "Content-Type": "text/plain"}, 415, "invalid_request_error"),
        ]:
            async with server.http.request(method, server.url + path, headers=sent, data=b"{}") as answer:
                body: Any = await answer.json()
                assert (answer.status, body["type"], body["error"]["type"]) == (status, "error", kind)
                assert answer.headers["request-id"] == answer.headers["X-Request-Id"] == body["request_id"]
        with pytest.raises(anthropic.AuthenticationError) as raised:
            await whole(client.with_options(api_key="wrong"), messages=ASKED)
        wrong: Any = raised.value.body
        assert wrong["error"]["type"] == "authentication_error"
        assert raised.value.request_id == wrong["request_id"]


@pytest.mark.parametrize(
    ("kind", "error"), [("internal", "api_error"), ("unavailable", "overloaded_error")], ids=["failed", "nobody"]
)
async def test_a_failure_in_a_stream_is_an_event_that_clients_know(kind: Any, error: str) -> None:
    async with messages(reply("eins zwei drei")) as (server, client):
        server.scheduler.fail_after, server.scheduler.fail_kind = 3, kind
        received = []

        async def read() -> None:
            async with client.messages.stream(model=MODEL, max_tokens=200, messages=ASKED) as stream:
                async for event in stream:
                    received.append(event.type)  # noqa: PERF401 - events before the error count

        with pytest.raises(anthropic.APIStatusError, match="caught fire") as raised:
            await read()
        body: Any = raised.value.body
        assert (body["type"], body["error"]["type"]) == ("error", error)
        assert (received[0], received[-1]) == ("message_start", "text")


async def test_a_message_that_is_ended_early_is_an_error() -> None:
    """A gateway that stops ends streams where they are. Such a message is not complete."""
    async with messages(reply("eins zwei drei")) as (server, client):
        server.scheduler.step_seconds = 0.02
        received: list[str] = []

        async def read() -> None:
            async with client.messages.stream(model=MODEL, max_tokens=200, messages=ASKED) as stream:
                async for event in stream:
                    received.append(event.type)
                    if received.count("text") == 1:
                        server.scheduler.paused = True
                        await server.scheduler_client.close(0.0, asyncio.Event())

        with pytest.raises(anthropic.APIStatusError, match="shutting down") as raised:
            await read()
        body: Any = raised.value.body
        assert body["error"]["type"] == "overloaded_error"
        assert "message_stop" not in received


@BOTH
async def test_a_call_that_a_stop_sequence_cuts_off(ask: Any) -> None:
    async with messages(reply(CALLS), reply(f"{CALLS} Ende.")) as (_, client):
        answer = await ask(client, messages=ASKED, tools=TOOLS, stop_sequences=["days"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "days")
        answer = await ask(client, messages=ASKED, tools=TOOLS, stop_sequences=["Ende"])
        assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
        assert [block.name for block in answer.content] == ["get_weather", "get_time"]


async def test_the_answer_names_the_adapter(tmp_path: Path) -> None:
    async with messages(reply("a"), reply("b"), enable_lora=True, allow_runtime_lora_updating=True) as (server, client):
        path = write_adapter(tmp_path / "one")
        load = {"lora_name": "one", "lora_path": str(path)}
        async with server.http.post(server.url + "/v1/load_lora_adapter", json=load) as loaded:
            assert loaded.status == 200
        assert (await whole(client, messages=ASKED, model="one")).model == "one"
        assert (await streamed(client, messages=ASKED, model="one")).model == "one"


async def test_of_what_a_stream_has_told_nothing_is_kept() -> None:
    scheduler = FakeScheduler(replies=[reply("abcdefghi\n" * 1000)], max_model_len=20_000)
    async with (
        serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server,
        AsyncAnthropic(base_url=server.url, api_key="secret", max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=12_000, messages=ASKED) as stream,
    ):
        told = 0
        async for event in stream:
            told += len(event.text) if event.type == "text" else 0
            if told > 5000:
                break
        (answer,) = (each for each in gc.get_objects() if type(each) is MessageAnswer)
        assert (answer._text, answer._message.content) == ([], [])
        assert (await stream.get_final_text()) == "abcdefghi\n" * 1000

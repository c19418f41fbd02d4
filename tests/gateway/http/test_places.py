"""The places that conversations declare to the scheduler: where system prompts and tools end, and cache breakpoints."""

from typing import Any

import pytest
from pagewise_gateway.http.places import PlaceFinder
from pagewise_gateway.http.schema import ChatMessage, ChatRequest
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.protocol import unpack_int32s

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.http.tool_model import HERMES, PARAMETERS, TOKENIZER
from tests.gateway.server import MODEL, Server, serving
from tests.gateway.text.strict_templates import TEMPLATES
from tests.gateway.text.tokenizer_builders import byte_level_backend, sentencepiece_backend

CACHED = {"type": "ephemeral", "ttl": "1h"}
RULES = "Be short. \n"
TOOL = {"name": "get_weather", "input_schema": PARAMETERS}


def text(content: str, cached: bool = True) -> dict[str, Any]:
    return {"type": "text", "text": content} | ({"cache_control": CACHED} if cached else {})


def pieces(server: Server) -> list[str]:
    """The text of the last prompt, cut at its places."""
    (prompt,) = server.scheduler.last.prompts
    tokens, places = [*prompt.token_ids], sorted({0, *unpack_int32s(prompt.places)})
    stops = [*places[1:], len(tokens)]
    cut = [tokens[start:stop] for start, stop in zip(places, stops, strict=True)]
    return [TOKENIZER.decode(one, skip_special_tokens=False) for one in cut]


async def ask(server: Server, path: str, **body: Any) -> None:
    status, answer = await server.post(path, {"model": MODEL, **body})
    assert status == 200, answer


def with_snapshots() -> FakeScheduler:
    return FakeScheduler(max_model_len=4096, has_snapshots=True)


async def test_a_chat_declares_where_its_system_prompt_and_tools_end() -> None:
    async with serving(with_snapshots(), tokenizer=TOKENIZER, **HERMES) as server:
        for again in range(2):  # the number of tokens is known the second time
            messages = [{"role": "system", "content": RULES}, {"role": "user", "content": f"Hello {again}"}]
            await ask(server, "/v1/chat/completions", messages=messages)
            assert pieces(server) == [
                f"<|user|>system: {RULES}<|end|><|user|>user: ",
                f"Hello {again}<|end|><|assistant|>",
            ]
        tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
        await ask(server, "/v1/chat/completions", messages=messages[1:], tools=tools)
        before, _ = pieces(server)
        assert before.startswith("<|user|>tools: ")
        assert before.endswith("<|end|><|user|>user: ")
        await ask(server, "/v1/responses", instructions=RULES, input="Hello")
        assert len(pieces(server)) == 2
        assert server.scheduler.last.prompts[0].places


async def test_nothing_is_declared_without_a_beginning_or_without_snapshots() -> None:
    async with serving(with_snapshots(), tokenizer=TOKENIZER) as server:
        await ask(server, "/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}])
        assert not server.scheduler.last.prompts[0].places
        system = [{"role": "system", "content": RULES}, {"role": "user", "content": "Hello"}]
        await ask(server, "/v1/chat/completions", messages=system, truncate_prompt_tokens=5)
        assert not server.scheduler.last.prompts[0].places
    async with serving(FakeScheduler(max_model_len=4096), tokenizer=TOKENIZER) as server:
        await ask(server, "/v1/chat/completions", messages=system)
        assert not server.scheduler.last.prompts[0].places


async def test_breakpoints_of_messages() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "17", "cache_control": CACHED}
    history: list[Any] = [
        {"role": "user", "content": [text("first"), text("second", cached=False)]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    async with serving(with_snapshots(), tokenizer=TOKENIZER, **HERMES) as server:
        given = {"system": [text("One."), text("Two.", cached=False)], "tools": [TOOL | {"cache_control": CACHED}]}
        await ask(server, "/v1/messages", max_tokens=4, messages=history, **given)
        tools, rest, first, second, end = pieces(server)
        assert tools.endswith("system: One.")
        assert rest == "\nTwo.<|end|><|user|>user: "
        assert first == "first"
        assert second.startswith("\nsecond<|end|>")
        assert second.endswith("<|user|>tool: 17")
        assert end == "<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"system": [text("a")] * 3, "messages": [{"role": "user", "content": [text("b")] * 2}]}, "Found 5."),
        ({"system": [text("a") | {"cache_control": CACHED | {"type": "ever"}}]}, "system[0].cache_control.type"),
        ({"system": [text("a") | {"cache_control": CACHED | {"ttl": "2h"}}]}, "system[0].cache_control.ttl"),
        ({"tools": [TOOL | {"cache_control": "ephemeral"}]}, "tools[0].cache_control"),
        ({"cache_control": 5}, "cache_control"),
    ],
)
async def test_wrong_breakpoints_are_refused(fields: dict[str, Any], error: str) -> None:
    async with serving(with_snapshots(), tokenizer=TOKENIZER, **HERMES) as server:
        body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}], **fields}
        status, answer = await server.post("/v1/messages", body)
        told: Any = answer["error"]
        assert (status, told["type"]) == (400, "invalid_request_error")
        assert error in told["message"]


async def test_prompt_cache_keys_reach_the_scheduler() -> None:
    async with serving(with_snapshots(), tokenizer=TOKENIZER) as server:
        messages = [{"role": "user", "content": "Hello"}]
        await ask(server, "/v1/chat/completions", messages=messages, prompt_cache_key="mine")
        assert server.scheduler.last.params.reuse.cache_key == "mine"
        await ask(server, "/v1/completions", prompt="Hello", prompt_cache_key="yours")
        assert server.scheduler.last.params.reuse.cache_key == "yours"
        await ask(server, "/v1/responses", input="Hello", prompt_cache_key="ours")
        assert server.scheduler.last.params.reuse.cache_key == "ours"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("make", [byte_level_backend, sentencepiece_backend])
@pytest.mark.parametrize("length", [1, 60])
def test_prompts_part_at_the_place_with_any_template(name: str, make: Any, length: int) -> None:
    tokenizer = Tokenizer(make(), chat_template=TEMPLATES[name])
    finder = PlaceFinder(tokenizer, {})
    found = []
    for message in ("Hello there" * length, "Another one" * length):
        chat = [ChatMessage("system", "You help."), ChatMessage("user", message)]
        rendered = tokenizer.render_chat([{"role": one.role, "content": one.content} for one in chat])
        found.append(finder.encode(ChatRequest(messages=chat), rendered))
        assert found[-1][0] == tokenizer.encode(rendered, add_special_tokens=False)
    (first, places), (second, same) = found
    assert places == same
    (place,) = places
    assert first[:place] == second[:place]
    assert first[place : place + 2] != second[place : place + 2], "the tail alone may have a token more"


def test_a_template_that_refuses_the_beginning_alone(caplog: pytest.LogCaptureFixture) -> None:
    template = "{% if messages|length < 3 %}{{ raise_exception('more') }}{% endif %}{{ messages[0].content }}"
    finder = PlaceFinder(Tokenizer(byte_level_backend(), chat_template=template), {})
    chat = [ChatMessage("system", RULES), ChatMessage("user", "a"), ChatMessage("assistant", "b")]
    assert [finder.encode(ChatRequest(messages=chat), RULES)[1] for _ in range(2)] == [[], []]
    assert len(caplog.records) == 1
    assert "more" in caplog.text

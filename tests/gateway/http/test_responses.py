"""/v1/responses, read by OpenAI's own client."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseCompletedEvent, ResponseIncompleteEvent

from tests.adapter_files import write_adapter
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.http.tool_model import ARGUMENTS, CALLS, HERMES, PARAMETERS, TOKENIZER, reply
from tests.gateway.server import MODEL, Server, serving

TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False},
    {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}, "strict": False},
]
TEXT = f"<think>\nEr will das Wetter.\n</think>\n\nIch sehe nach.\n{CALLS}"


async def whole(server: Server, **options: Any) -> Response:
    return await server.openai.responses.create(model=MODEL, **options)


async def streamed(server: Server, **options: Any) -> Response:
    """The response that the events of a stream add up to, put together by the client."""
    async with server.openai.responses.stream(model=MODEL, **options) as stream:
        events = [event async for event in stream]
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert isinstance(events[-1], ResponseCompletedEvent | ResponseIncompleteEvent)
    return events[-1].response


BOTH = pytest.mark.parametrize("ask", [whole, streamed])


@BOTH
async def test_items(ask: Any) -> None:
    async with serving(FakeScheduler(replies=[reply(TEXT)]), tokenizer=TOKENIZER, **HERMES) as server:
        answer = await ask(server, input="Wie wird das Wetter?", instructions="Kurz.", tools=TOOLS)
        prompt = TOKENIZER.decode(server.scheduler.last_prompt, skip_special_tokens=False)
    assert "<|user|>system: Kurz.<|end|><|user|>user: Wie wird das Wetter?<|end|>" in prompt
    thought, message, weather, clock = answer.output
    assert thought.content[0].text == "Er will das Wetter."
    assert (answer.output_text, message.role, message.status) == ("Ich sehe nach.", "assistant", "completed")
    assert [(call.type, call.name, call.arguments) for call in (weather, clock)] == [
        ("function_call", "get_weather", ARGUMENTS),
        ("function_call", "get_time", "{}"),
    ]
    assert (answer.status, answer.store, answer.error) == ("completed", False, None)
    assert answer.usage.output_tokens == len(reply(TEXT))
    assert answer.usage.input_tokens_details.cached_tokens == 1


@BOTH
async def test_items_go_back_into_the_template(ask: Any) -> None:
    replies = [reply(TEXT), reply("Sonne.")]
    async with serving(FakeScheduler(replies=replies), tokenizer=TOKENIZER, **HERMES) as server:
        first = await ask(server, input="Wetter?", tools=TOOLS)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "17 Grad"}
            for item in first.output
            if item.type == "function_call"
        ]
        history = [
            {"role": "user", "content": "Wetter?"},
            *(item.model_dump(exclude={"parsed_arguments"}) for item in first.output),
            *results,
        ]
        answer = await ask(server, input=history, tools=TOOLS)
        assert answer.output_text == "Sonne."
        prompt = TOKENIZER.decode(server.scheduler.last_prompt, skip_special_tokens=False)
    assert prompt.count("<|user|>assistant: ") == 1
    assert '<|user|>assistant: Ich sehe nach.<tool_call>{"name": "get_weather", "arguments": {"city"' in prompt
    assert prompt.count("<|user|>tool: 17 Grad<|end|>") == 2


@BOTH
async def test_a_response_that_is_cut_off_is_incomplete(ask: Any) -> None:
    async with serving(FakeScheduler(replies=[reply(CALLS, end=False)]), tokenizer=TOKENIZER, **HERMES) as server:
        answer = await ask(server, input="Wetter?", tools=TOOLS, max_output_tokens=40)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (call,) = answer.output
    assert call.status == "incomplete"
    assert ARGUMENTS.startswith(call.arguments)


@BOTH
async def test_text_may_have_a_format(ask: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    async with serving(FakeScheduler(replies=[reply('{"a": 1}')]), tokenizer=TOKENIZER, **HERMES) as server:
        answer = await ask(server, input="Wetter?", text=form)
        assert json.loads(answer.output_text) == {"a": 1}
        assert '"integer"' in server.scheduler.last.params.sampling.grammar


async def test_without_parsers_an_answer_is_one_message() -> None:
    async with serving(FakeScheduler(replies=[reply(" <think> a\n")]), tokenizer=TOKENIZER) as server:
        answer = await streamed(server, input=[{"role": "user", "content": [{"type": "input_text", "text": "b"}]}])
    (message,) = answer.output
    assert message.content[0].text == "  a\n"


async def test_a_call_that_the_model_does_not_end_is_incomplete() -> None:
    async with serving(FakeScheduler(replies=[reply(CALLS[:60])]), tokenizer=TOKENIZER, **HERMES) as server:
        answer = await streamed(server, input="Wetter?", tools=TOOLS)
    (call,) = answer.output
    assert (answer.status, call.status) == ("completed", "incomplete")
    assert ARGUMENTS.startswith(call.arguments)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: ""}}, "metadata"),
    ({"metadata": {"a": "v" * 513}}, "metadata"),
    ({"input": []}, "input"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"max_output_tokens": 10_000}, "max_output_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: repr(value)[:50])
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    async with serving(tokenizer=TOKENIZER, **HERMES) as server:
        with pytest.raises(openai.BadRequestError) as raised:
            await server.openai.responses.create(model=MODEL, input="a", extra_body=fields)
        assert raised.value.param == param
        assert server.scheduler.submits == []


async def read_failed(server: Server, **options: Any) -> list[Any]:
    stream = await server.openai.responses.create(model=MODEL, stream=True, **options)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.failed"
    assert [event.type for event in events if event.type.endswith((".done", ".completed"))] == []
    assert events[-1].response.status == "failed"
    return events


async def test_a_failure_in_a_stream_is_an_event_that_clients_know() -> None:
    scheduler = FakeScheduler(replies=[reply(CALLS)], fail_after=40)
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:
        events = await read_failed(server, input="Wetter?", tools=TOOLS)
    response = events[-1].response
    assert (response.error.code, response.error.message) == ("server_error", "the executor caught fire")
    (call,) = response.output
    assert call.status == "incomplete"
    assert ARGUMENTS.startswith(call.arguments)
    assert call.arguments == "".join(event.delta for event in events if event.type.endswith("arguments.delta"))


async def test_a_response_that_is_ended_early_has_failed() -> None:
    """A gateway that stops ends streams where they are. That is no reason for which a response may be incomplete."""
    scheduler = FakeScheduler(replies=[reply("eins zwei drei")], step_seconds=0.02)
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:

        async def end() -> None:
            await server.scheduler.until(lambda: server.scheduler.running and server.scheduler_client.num_live)
            await server.scheduler.until(lambda: any(run.streams[0].position > 3 for run in server.scheduler.running))
            server.scheduler.paused = True
            await asyncio.sleep(0.05)
            await server.scheduler_client.close(0.0, asyncio.Event())

        ending = asyncio.create_task(end())
        events = await read_failed(server, input="Wetter?")
        await ending
    assert "shutting down" in events[-1].response.error.message


@BOTH
async def test_what_a_response_repeats_of_its_request(ask: Any) -> None:
    metadata = {"k" * 64: "\U0001f642" * 512, "a": ""}
    async with serving(FakeScheduler(replies=[reply("a")]), tokenizer=TOKENIZER, **HERMES) as server:
        answer = await ask(server, input="Wetter?", instructions="Kurz.", metadata=metadata, tools=TOOLS)
    assert (answer.metadata, answer.instructions) == (metadata, "Kurz.")
    assert [tool.name for tool in answer.tools] == ["get_weather", "get_time"]
    assert (answer.tool_choice, answer.text.format.type, answer.model) == ("auto", "text", MODEL)


async def test_what_a_response_repeats_takes_memory_until_it_is_written() -> None:
    described = [{**TOOLS[0], "name": f"f{i}", "description": "x" * 10_000} for i in range(20)]
    scheduler = FakeScheduler(replies=[reply("eins zwei drei")], max_model_len=400_000, paused=True)
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:
        gauge = f'pagewise_http_answer_bytes{{model_name="{MODEL}"}}'
        asked = asyncio.create_task(whole(server, input="Wetter?", tools=described, tool_choice="none"))
        await scheduler.until_running()
        (line,) = [line for line in server.shown().splitlines() if line.startswith(gauge)]
        assert 200_000 < float(line.split()[-1]) < 300_000
        scheduler.paused = False
        assert (await asked).output_text == "eins zwei drei"
        await scheduler.until(lambda: f"{gauge} 0.0" in server.shown())


async def test_what_a_response_repeats_leaves_less_for_its_output() -> None:
    scheduler = FakeScheduler(replies=[reply("eins")], max_model_len=400_000)
    options = {"instructions": "x" * 100_000, "input": "Wetter?"}
    async with serving(scheduler, tokenizer=TOKENIZER, max_answer_memory=4_000_000, **HERMES) as server:
        assert (await whole(server, **options)).output_text == "eins"
        (prompt,) = scheduler.last.prompts
        assert 36_000 < prompt.max_tokens < 37_500  # of 24 bytes each, in a quarter of that memory


async def test_a_stream_takes_memory_for_the_text_with_which_it_ends() -> None:
    text = "abcdefghi\n" * 20_000
    scheduler = FakeScheduler(replies=[reply(text)], max_model_len=400_000, tokens_per_round=1000, step_seconds=0.02)
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:

        def taken() -> float:
            name = f'pagewise_http_answer_bytes{{model_name="{MODEL}"}}'
            (line,) = [line for line in server.shown().splitlines() if line.startswith(name)]
            return float(line.split()[-1])

        stream: Any = await server.openai.responses.create(model=MODEL, input="a", stream=True)
        told = 0
        async for event in stream:
            told += len(event.delta) if event.type == "response.output_text.delta" else 0
            if told >= 100_000 and not scheduler.paused:
                scheduler.paused = True  # arrived text is written and read, but is kept
                await scheduler.until(lambda: 60_000 < taken() < 250_000)
                scheduler.paused, scheduler.step_seconds, told = False, 0, -(10**9)
        assert event.response.output_text == text
        await scheduler.until(lambda: taken() == 0)


async def test_a_stream_that_finds_no_memory_fails() -> None:
    text = "abcdefghi\n" * 20_000
    scheduler = FakeScheduler(replies=[reply(text)], max_model_len=400_000, tokens_per_round=100)
    async with serving(scheduler, tokenizer=TOKENIZER, max_answer_memory=100_000, **HERMES) as server:
        events = await read_failed(server, input="a", max_output_tokens=250_000)
    assert "--max-answer-memory" in events[-1].response.error.message


async def test_the_answer_names_the_adapter(tmp_path: Path) -> None:
    options = {"enable_lora": True, "allow_runtime_lora_updating": True, **HERMES}
    async with serving(FakeScheduler(replies=[reply("a")] * 2), tokenizer=TOKENIZER, **options) as server:
        load = {"lora_name": "one", "lora_path": str(write_adapter(tmp_path / "one"))}
        async with server.http.post(server.url + "/v1/load_lora_adapter", json=load) as loaded:
            assert loaded.status == 200
        assert (await server.openai.responses.create(model="one", input="a")).model == "one"
        stream = await server.openai.responses.create(model="one", input="a", stream=True)
        assert {event.response.model async for event in stream if hasattr(event, "response")} == {"one"}

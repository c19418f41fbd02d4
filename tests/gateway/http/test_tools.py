"""Tool calls and reasoning over real sockets, read by OpenAI's own client."""

import json
from array import array
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam, ChatCompletionToolUnionParam
from pagewise_gateway.text.output_parsing import Delta, MessageParser
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.errors import ConfigError

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.http.tool_model import ARGUMENTS, CALLS, HERMES, PARAMETERS, SPECIAL, TEMPLATE, TOKENIZER, reply
from tests.gateway.server import MODEL, Server, serving
from tests.gateway.text.tokenizer_builders import byte_level_backend

TOOLS: list[ChatCompletionToolUnionParam] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Wie wird das Wetter?"}]


async def streamed(server: Server, **options: Any) -> ChatCompletion:
    """An answer that was streamed, as the client's accumulator puts it together."""
    state = openai.lib.streaming.chat.ChatCompletionStreamState()
    async for chunk in await server.openai.chat.completions.create(model=MODEL, stream=True, **options):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


async def whole(server: Server, **options: Any) -> ChatCompletion:
    return await server.openai.chat.completions.create(model=MODEL, **options)


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_calls(ask: Any) -> None:
    text = f"<think>\nEr will das Wetter.\n</think>\n\nIch sehe nach.<|noise|>\n{CALLS}"
    async with serving(FakeScheduler(replies=[reply(text)]), tokenizer=TOKENIZER, **HERMES) as server:
        answer = await ask(server, messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Ich sehe nach."
    assert choice.message.reasoning == choice.message.reasoning_content == "Er will das Wetter."
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", "get_weather", ARGUMENTS),
        ("function", "get_time", "{}"),
    ]
    assert len({call.id for call in calls}) == 2
    assert json.loads(calls[0].function.arguments) == {"city": 'Köln "</x>" 🙂', "days": 3}


async def test_a_template_that_never_writes_tools_is_told_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS}
    counter = f'requests_without_tools_total{{model_name="{MODEL}",type="function"}} '
    async with serving(**HERMES) as server:
        assert [record.message for record in caplog.records if "never writes tools" in record.message]
        for _ in range(2):
            status, _ = await server.post("/v1/chat/completions/render", body)
            assert status == 200
        assert f"{counter}2.0" in server.shown()
        assert len([record for record in caplog.records if "does not see them" in record.message]) == 1
    caplog.clear()
    async with serving(tokenizer=TOKENIZER, **HERMES) as server:
        status, _ = await server.post("/v1/chat/completions/render", body)
        assert (status, f"{counter}0.0" in server.shown(), caplog.records) == (200, True, [])


async def test_pieces_arrive_as_they_are_written() -> None:
    scheduler = FakeScheduler(replies=[reply(f"<think>ab cd ef gh</think>Ich sehe nach.{CALLS}")], step_seconds=0.002)
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:
        stream = await server.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert last.usage is not None
    assert last.usage.completion_tokens == len(reply(f"<think>ab cd ef gh</think>Ich sehe nach.{CALLS}"))
    deltas = [part.choices[0].delta for part in parts]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    begun = [call for call in calls if call.id]
    assert [(call.index, call.type, call.function.name, call.function.arguments) for call in begun] == [
        (0, "function", "get_weather", ""),
        (1, "function", "get_time", ""),
    ]
    assert all(call.function.name is None for call in calls if not call.id)
    assert len([call for call in calls if call.index == 0]) > 10
    assert len([delta for delta in deltas if getattr(delta, "reasoning", None)]) > 3
    assert len([delta for delta in deltas if delta.content]) > 3
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_a_call_that_is_cut_off_ends_by_its_length(ask: Any) -> None:
    tokens = reply(CALLS, end=False)[:40]
    async with serving(FakeScheduler(replies=[tokens]), tokenizer=TOKENIZER, **HERMES) as server:
        answer = await ask(server, messages=MESSAGES, tools=TOOLS, max_tokens=40)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert call.function.arguments
    assert ARGUMENTS.startswith(call.function.arguments)


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_a_call_that_a_stop_string_cuts_off_is_no_call_to_make(ask: Any) -> None:
    replies = [reply(CALLS), reply(f"{CALLS} Ende."), reply(CALLS)]
    async with serving(FakeScheduler(replies=replies), tokenizer=TOKENIZER, **HERMES) as server:
        cut = await ask(server, messages=MESSAGES, tools=TOOLS, stop="days")
        assert cut.choices[0].finish_reason == "stop"
        assert getattr(cut.choices[0], "stop_reason", "days") == "days"  # the client's accumulator leaves it out
        assert ARGUMENTS.startswith(cut.choices[0].message.tool_calls[0].function.arguments)
        behind = await ask(server, messages=MESSAGES, tools=TOOLS, stop="Ende")
        assert (behind.choices[0].finish_reason, len(behind.choices[0].message.tool_calls)) == ("tool_calls", 2)
        ended = await ask(server, messages=MESSAGES, tools=TOOLS, stop="</tool_call>")
        assert (ended.choices[0].finish_reason, len(ended.choices[0].message.tool_calls)) == ("tool_calls", 1)


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_a_call_that_the_model_does_not_end_is_no_call_to_make(ask: Any) -> None:
    replies = [reply(CALLS.split(', "days"')[0]), reply(f'{WEATHER}<tool_call>{{"name": "get_time", "arguments": {{"a')]
    async with serving(FakeScheduler(replies=replies), tokenizer=TOKENIZER, **HERMES) as server:
        for number in (1, 2):
            answer = await ask(server, messages=MESSAGES, tools=TOOLS)
            assert (answer.choices[0].finish_reason, len(answer.choices[0].message.tool_calls)) == ("stop", number)


async def test_a_long_answer_is_parsed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that others are served in between: whatever its format, and where a client has not read for long."""
    sizes: list[int] = []
    push = MessageParser.push

    def counting(parser: MessageParser, text: str) -> list[Delta]:
        sizes.append(len(text))
        return push(parser, text)

    monkeypatch.setattr(MessageParser, "push", counting)
    text = "<think>" + "ab < cd " * 3000 + "</think>Ende."
    scheduler = FakeScheduler(replies=[reply(text)] * 4, max_model_len=100_000, tokens_per_round=40_000)
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:
        options: Any = {"messages": MESSAGES, "max_tokens": 40_000}
        for stream in (False, True):
            for path in ("/v1/chat/completions", "/v1/messages"):
                async with server.http.post(server.url + path, json={**options, "stream": stream}) as answer:
                    assert "ab < cd ab < cd" in await answer.text()
    assert sum(sizes) == 4 * len(text)
    assert max(sizes) <= 1024


async def test_several_outputs_with_log_probabilities() -> None:
    async with serving(FakeScheduler(replies=[reply(CALLS)] * 2), tokenizer=TOKENIZER, **HERMES) as server:
        for ask in (whole, streamed):
            answer = await ask(server, messages=MESSAGES, tools=TOOLS, n=3, logprobs=True, parallel_tool_calls=False)
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            for choice in answer.choices:
                assert [call.function.arguments for call in choice.message.tool_calls] == [ARGUMENTS]
                assert len(choice.logprobs.content) == len(reply(CALLS))
            ids = {choice.message.tool_calls[0].id for choice in answer.choices}
            assert len(ids) == 3


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_without_calls_an_answer_is_as_it_was(ask: Any) -> None:
    async with serving(FakeScheduler(replies=[reply(" ab <c \n")]), tokenizer=TOKENIZER, **HERMES) as server:
        answer = await ask(server, messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (" ab <c \n", "stop", None)


PROSE = "Write `<tool_call>` or <tool_call> {}, </tool_call>, <think> and a</think>b."
TAGS = '{"tags": ["<think>", "a</think>b", "<think>a</think>", "<tool_call>", "</tool_call>"], "call": "' + (
    '<tool_call>{\\"name\\": \\"get_time\\"}</tool_call>"}'
)


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_delimiters_in_an_answer_are_content(ask: Any) -> None:
    call = '<tool_call>{"name": "get_time"}</tool_call>'
    asked: list[tuple[str, dict[str, Any]]] = [
        (PROSE, {}),
        (TAGS, {"response_format": {"type": "json_object"}}),
        (f"{PROSE} {call}", {"extra_body": {"structured_outputs": {"regex": "(?s:.*)"}}}),
    ]
    scheduler = FakeScheduler(replies=[reply(f"<think>hm</think>{text}") for text, _ in asked])
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:
        for text, options in asked:
            (choice,) = (await ask(server, messages=MESSAGES, tools=TOOLS, **options)).choices
            assert (choice.message.content, choice.message.reasoning) == (text, "hm")
            assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


async def test_none_lets_text_be_and_reasoning_may_be_left_out() -> None:
    replies = [reply(CALLS), reply("<think>a</think>b"), reply("a</think>b")]
    async with serving(FakeScheduler(replies=replies), tokenizer=TOKENIZER, **HERMES) as server:
        answer = await whole(server, messages=MESSAGES, tools=TOOLS, tool_choice="none")
        assert answer.choices[0].finish_reason == "stop"
        assert '{"name": "get_weather"' in (answer.choices[0].message.content or "")
        answer = await whole(server, messages=MESSAGES, extra_body={"include_reasoning": False})
        assert answer.choices[0].message.content == "b"
        assert not hasattr(answer.choices[0].message, "reasoning")
        thinking = {"chat_template_kwargs": {"thinking": True}}
        answer = await whole(server, messages=MESSAGES, extra_body=thinking)
        assert (answer.choices[0].message.content, answer.choices[0].message.reasoning) == ("b", "a")


async def test_messages_with_calls_go_back_into_the_template() -> None:
    async with serving(FakeScheduler(replies=[reply(CALLS), reply("Sonne.")]), tokenizer=TOKENIZER, **HERMES) as server:
        first = (await whole(server, messages=MESSAGES, tools=TOOLS)).choices[0].message
        assert first.tool_calls is not None
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "17 Grad"}]}
            for call in first.tool_calls
        ]
        history = [*MESSAGES, first.model_dump(), *results]
        answer = await whole(server, messages=history, tools=TOOLS)
        assert answer.choices[0].message.content == "Sonne."
        asked = TOKENIZER.decode(server.scheduler.last_prompt, skip_special_tokens=False)
        body = {"messages": history, "tools": TOOLS}
        status, rendered = await server.post("/v1/chat/completions/render", body)
        assert (status, rendered["prompt"], rendered["prompt_token_ids"]) == (200, asked, server.scheduler.last_prompt)
        status, tokens = await server.post("/tokenize", body)
        assert (status, tokens["tokens"]) == (200, server.scheduler.last_prompt)
    assert '<|user|>assistant: <tool_call>{"name": "get_weather", "arguments": {"city": "Köln \\"</x>\\" 🙂"' in asked
    assert asked.count("<|user|>tool: 17 Grad<|end|>") == 2
    expected = json.dumps({"type": "function", "function": {**TOOLS[0]["function"]}}, ensure_ascii=False)
    assert asked.startswith(f"<|user|>tools: {expected}\n")


@pytest.mark.parametrize("arguments", ["", " \n"])
async def test_calls_without_arguments_go_back_into_the_template(arguments: str) -> None:
    async with serving(tokenizer=TOKENIZER, **HERMES) as server:
        body = {"messages": [*MESSAGES, assistant(arguments)]}
        status, rendered = await server.post("/v1/chat/completions/render", body)
    assert status == 200
    assert '{"name": "f", "arguments": {}}' in str(rendered["prompt"])


@pytest.mark.parametrize("arguments", ['{"a', "[1]", "a=b", "[" * 1200])
async def test_a_conversation_goes_on_with_arguments_that_are_no_object(arguments: str) -> None:
    """The model has written them, and agents send the model's text back."""
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
    async with serving(FakeScheduler(max_model_len=5000), tokenizer=TOKENIZER, **HERMES) as server:
        status, rendered = await server.post("/v1/chat/completions/render", {"messages": [assistant(arguments)]})
        assert (status, json.dumps(arguments) in str(rendered["prompt"])) == (200, True)
        status, _ = await server.post("/v1/responses", {"model": MODEL, "input": [item]})
        assert (status, server.scheduler.last_prompt) == (200, rendered["prompt_token_ids"])
    needs_object = TEMPLATE.replace(
        "call.function.arguments | tojson", "dict(call.function.arguments.items()) | tojson"
    )
    tokenizer = Tokenizer(byte_level_backend(SPECIAL), eos_token_ids=frozenset({0}), chat_template=needs_object)
    async with serving(tokenizer=tokenizer, **HERMES) as server:
        status, rendered = await server.post("/v1/chat/completions/render", {"messages": [assistant(arguments)]})
    assert (status, '"arguments": {}' in str(rendered["prompt"])) == (200, True)


async def test_marked_parts_are_segments_with_tools_too() -> None:
    document = "the quick brown fox " * 8
    parts = [{"type": "text", "text": document, "segment": True}, {"type": "text", "text": "Was steht da?"}]
    async with serving(FakeScheduler(replies=[reply("x")]), tokenizer=TOKENIZER, **HERMES) as server:
        await whole(server, messages=[{"role": "user", "content": parts}], tools=TOOLS)
        (prompt,) = server.scheduler.last.prompts
        assert prompt.segments is not None
        first, behind = array("i", prompt.segments.ranges)
        assert TOKENIZER.decode(server.scheduler.last_prompt[first:behind]) == document


def assistant(arguments: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


NAMED = {"type": "function", "function": {"name": "other"}}
DEEP: Any = {}
for _ in range(80):
    DEEP = {"a": DEEP}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "get_time\n"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "a", "reasoning": "a"}]}, "messages[0].reasoning"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: repr(value)[:50])
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    async with serving(tokenizer=TOKENIZER, **HERMES) as server:
        status, answer = await server.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
        error: Any = answer["error"]
        assert (status, error["param"]) == (400, param), error
        assert server.scheduler.submits == []


async def parsers(server: Server) -> tuple[object, object]:
    """The formats that ``/v1/models`` names."""
    _, answer = await server.get("/v1/models")
    (model,) = answer["data"]  # type: ignore[misc]
    return model["tool_call_parser"], model["reasoning_parser"]


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_without_options_the_format_is_that_of_the_template(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pagewise_gateway.http.conversation")
    async with serving(FakeScheduler(replies=[reply(f"Ja.{CALLS}")]), tokenizer=TOKENIZER) as server:
        assert await parsers(server) == ("hermes", None)
        answer = await ask(server, messages=MESSAGES, tools=TOOLS)
    assert "parser of tool calls: hermes, the chat template writes calls in it" in caplog.messages
    message = answer.choices[0].message
    assert (message.content, [call.function.arguments for call in message.tool_calls]) == ("Ja.", [ARGUMENTS, "{}"])


async def test_tools_need_a_format_that_is_known() -> None:
    unknown = "is not known: the chat template writes no calls, or in no format that is known here.*--tool-call-parser"
    for tokenizer, options, reason in (
        (None, {}, unknown),
        (None, {"enable_auto_tool_choice": True}, unknown),
        (TOKENIZER, {"tool_call_parser": "none"}, "is not known: as --tool-call-parser says"),
        (TOKENIZER, {"enable_auto_tool_choice": False}, "--no-enable-auto-tool-choice is set"),
    ):
        served = {} if tokenizer is None else {"tokenizer": tokenizer}
        async with serving(FakeScheduler(replies=[reply("Ja.")] * 2), **served, **options) as server:
            assert await parsers(server) == (
                "hermes" if "enable_auto_tool_choice" in options and served else None,
                None,
            )
            with pytest.raises(openai.BadRequestError, match=reason):
                await whole(server, messages=MESSAGES, tools=TOOLS)
            await whole(server, messages=MESSAGES, tools=TOOLS, tool_choice="none")


KIMI = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<|tool_calls_section_begin|>"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
    "<|tool_calls_section_end|>{% endfor %}{% endfor %}{{ tools | tojson }}"
)


async def test_ids_that_the_model_writes_are_those_of_the_calls() -> None:
    tokenizer = Tokenizer(byte_level_backend(SPECIAL), eos_token_ids=frozenset({0}), chat_template=KIMI)
    text = '<|tool_call_begin|>functions.get_time:3<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    text = f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>"
    async with serving(FakeScheduler(replies=[reply(text)] * 4), tokenizer=tokenizer) as server:
        for ask in (whole, streamed):
            answer = await ask(server, messages=MESSAGES, tools=TOOLS)
            (call,) = answer.choices[0].message.tool_calls or ()
            assert (call.id, call.type) == ("functions.get_time:3", "function")
        function = {"type": "function", "name": "get_time", "parameters": {}}
        _, response = await server.post("/v1/responses", {"model": MODEL, "input": "a", "tools": [function]})
        (item,) = response["output"]  # type: ignore[misc]
        assert (item["call_id"], item["arguments"]) == ("functions.get_time:3", '{"a": 1}')
        tool = {"name": "get_time", "input_schema": {"type": "object"}}
        body = {"model": MODEL, "max_tokens": 400, "messages": MESSAGES, "tools": [tool]}
        _, message = await server.post("/v1/messages", body)
        (block,) = message["content"]  # type: ignore[misc]
        assert (block["id"], block["input"]) == ("functions.get_time:3", {"a": 1})


async def test_default_variables_that_are_wrong() -> None:
    for kwargs in ("[1]", "{", json.dumps(DEEP)):
        with pytest.raises(ConfigError, match="--default-chat-template-kwargs"):
            async with serving(default_chat_template_kwargs=kwargs):
                pass


async def test_variables_of_the_template_have_defaults() -> None:
    options = {"default_chat_template_kwargs": '{"thinking": true}', **HERMES}
    async with serving(FakeScheduler(replies=[reply("a</think>b")] * 2), tokenizer=TOKENIZER, **options) as server:
        answer = await whole(server, messages=MESSAGES)
        assert answer.choices[0].message.reasoning == "a"  # type: ignore[attr-defined]
        answer = await whole(server, messages=MESSAGES, extra_body={"chat_template_kwargs": {"thinking": False}})
        assert answer.choices[0].message.reasoning is None  # type: ignore[attr-defined]


async def test_the_streaming_helper_of_the_client() -> None:
    """It takes strict functions only, and parses their arguments."""
    strict: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    async with serving(FakeScheduler(replies=[reply(f"Ja.{CALLS}")]), tokenizer=TOKENIZER, **HERMES) as server:
        async with server.openai.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=strict) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
        grammar = server.scheduler.last.params.sampling.grammar
    written = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in written if event.index == 0) == ARGUMENTS
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.name, event.arguments) for event in done] == [
        (0, "get_weather", ARGUMENTS),
        (1, "get_time", "{}"),
    ]
    assert final.choices[0].message.content == "Ja."
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [json.loads(ARGUMENTS), {}]
    assert allows(grammar, f"Ja.{CALLS}")
    assert allows(grammar, "Nein.")
    assert not allows(grammar, CALLS.replace(": 3", ': "3"'))


def allows(grammar: str, text: str) -> bool:
    """Whether an output may be this text."""
    tokenizer = LLTokenizer(byte_level_backend(SPECIAL).to_str(), eos_token=0)
    matcher = LLMatcher(tokenizer, grammar)
    tokens = reply(text, end=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


WEATHER, TIME = CALLS.split("\n<tool_call>")[0], "<tool_call>" + CALLS.split("<tool_call>")[2]


async def test_calls_that_have_to_be_made_are_grammars() -> None:
    async with serving(FakeScheduler(replies=[reply(WEATHER)] * 5), tokenizer=TOKENIZER, **HERMES) as server:

        async def grammar(**options: Any) -> str:
            answer = await whole(server, messages=MESSAGES, tools=TOOLS, **options)
            assert answer.choices[0].finish_reason == "tool_calls"
            return server.scheduler.last.params.sampling.grammar

        assert await grammar() == ""
        required = await grammar(tool_choice="required")
        assert all(allows(required, text) for text in (WEATHER, CALLS, TIME, f"<think>hm</think>\n\n{CALLS}"))
        assert not allows(required, f"Ja.{CALLS}")
        one = await grammar(tool_choice="required", parallel_tool_calls=False)
        assert allows(one, WEATHER)
        assert not allows(one, CALLS)
        named = await grammar(tool_choice={"type": "function", "function": {"name": "get_time"}})
        assert allows(named, TIME)
        assert not allows(named, WEATHER)
        formatted = await grammar(response_format={"type": "json_object"})
        assert all(allows(formatted, text) for text in (CALLS, '{"a": 1}', '<think>hm</think>{"a": 1}'))
        assert not allows(formatted, "Ja.")


async def test_a_format_of_the_answer_leaves_reasoning_free() -> None:
    text = '<think>hm {</think>\n{"a": 1}'
    async with serving(FakeScheduler(replies=[reply(text)] * 2), tokenizer=TOKENIZER, **HERMES) as server:
        answer = await whole(server, messages=MESSAGES, response_format={"type": "json_object"})
        assert answer.choices[0].message.content == '{"a": 1}'
        assert allows(server.scheduler.last.params.sampling.grammar, text)
        assert not allows(server.scheduler.last.params.sampling.grammar, "<think>hm</think>Ja.")


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_schemas_that_cannot_be_followed_are_refused(choice: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    async with serving(tokenizer=TOKENIZER, **HERMES) as server:
        body = {"messages": MESSAGES, "tools": [tool], "tool_choice": choice}
        status, answer = await server.post("/v1/chat/completions", body)
        error: Any = answer["error"]
        assert (status, error["param"]) == (400, "tools")
        assert "not" in error["message"]


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("parser", ["glm45", "pythonic"])
async def test_schemas_that_a_format_cannot_follow_are_refused(parser: str, choice: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "dependentRequired": {"a": ["b"]}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": choice == "auto"}}
    async with serving(tokenizer=TOKENIZER, enable_auto_tool_choice=True, tool_call_parser=parser) as server:
        body = {"messages": MESSAGES, "tools": [tool], "tool_choice": choice}
        status, answer = await server.post("/v1/chat/completions", body)
        error: Any = answer["error"]
        assert (status, error["param"]) == (400, "tools")
        assert "dependentRequired" in error["message"]


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_parameters_that_take_too_long_to_follow_are_refused(choice: str) -> None:
    patterns = [{"type": "string", "pattern": f".*a.{{{number}}}b.*"} for number in range(39)]
    parameters = {"type": "object", "properties": {"a": {"allOf": patterns}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": choice == "auto"}}
    async with serving(tokenizer=TOKENIZER, enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        body = {"messages": MESSAGES, "tools": [tool], "tool_choice": choice}
        status, answer = await server.post("/v1/chat/completions", body)
        error: Any = answer["error"]
        assert (status, error["param"]) == (400, "tools")
        assert "the parameters of 'f': the patterns and formats that a string has to match together" in error["message"]

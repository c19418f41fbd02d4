"""Conversations of the three APIs become the text that OpenAI's own implementation of Harmony writes for them."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from pagewise_gateway.http import messages_api, messages_schema, responses_request, responses_schema
from pagewise_gateway.http.conversation import render_chat
from pagewise_gateway.http.schema import ChatRequest
from pagewise_gateway.text.tokenizer import Tokenizer

from tests.gateway.text.harmony_template import HARMONY
from tests.gateway.text.tokenizer_builders import write_model

DATE = "2026-01-02"
INSTRUCTIONS = "Be brief."
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Its name"},
        "days": {"type": "integer", "default": 3},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["city"],
}
TOOLS = [("get_weather", "Weather of a city.", PARAMETERS), ("get_time", "The time.", None)]


class Said(NamedTuple):
    """A message of Harmony. ``dropped``: reasoning before an answer, which is no part of the prompt."""

    author: str
    text: str
    channel: str = ""
    to: str = ""
    dropped: bool = False


def thought(text: str, *, dropped: bool = False) -> Said:
    return Said("assistant", text, "analysis", dropped=dropped)


def called(name: str, **arguments: Any) -> Said:
    return Said("assistant", json.dumps(arguments, ensure_ascii=False), "commentary json", f"functions.{name}")


def result(name: str, value: Any) -> Said:
    return Said(f"functions.{name}", json.dumps(value, ensure_ascii=False), "commentary", "assistant")


def answer(text: str) -> Said:
    return Said("assistant", text, "final")


CONVERSATIONS: dict[str, list[Said]] = {
    "a question": [Said("user", "hi")],
    "an answer": [Said("user", "hi"), thought("greet", dropped=True), answer("hello"), Said("user", "bye")],
    "a call": [
        Said("user", "weather?"),
        thought("look"),
        called("get_weather", city="Köln", days=2),
        result("get_weather", {"sunny": True}),
    ],
    "a call before an answer": [
        Said("user", "weather?"),
        thought("look", dropped=True),
        called("get_weather", city="Köln"),
        result("get_weather", [12, "°C"]),
        thought("warm", dropped=True),
        answer("sunny"),
        Said("user", "thanks"),
    ],
    "calls in turn": [
        Said("user", "a"),
        thought("first"),
        called("get_time"),
        result("get_time", 7),
        thought("second"),
        called("get_weather", city="x"),
        result("get_weather", None),
    ],
    "calls at once": [
        Said("user", "a"),
        thought("both"),
        called("get_weather", city="x"),
        result("get_weather", {"sunny": False}),
        called("get_time"),
        result("get_time", {"hour": 7}),
    ],
    "a call after an answer": [
        Said("user", "hi"),
        answer("hello"),
        Said("user", "time?"),
        thought("look"),
        called("get_time"),
        result("get_time", {"hour": 7}),
    ],
}


def written(conversation: Sequence[Said], *, developer: str) -> str:
    """The prompt, without its message of the system, which has the date and the channels."""
    text = f"<|start|>developer<|message|>{developer}<|end|>" if developer else ""
    for said in conversation:
        if not said.dropped:
            header = (
                said.author + (f" to={said.to}" if said.to else "") + f"<|channel|>{said.channel}" * bool(said.channel)
            )
            end = "<|call|>" if said.to.startswith("functions.") else "<|end|>"
            text += f"<|start|>{header}<|message|>{said.text}{end}"
    return text + "<|start|>assistant"


DEVELOPER = (
    "# Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\nnamespace functions {\n\n"
    "// Weather of a city.\ntype get_weather = (_: {\n// Its name\ncity: string,\ndays?: number, // default: 3\n"
    'unit?: "c" | "f",\n}) => any;\n\n'
    "// The time.\ntype get_time = () => any;\n\n} // namespace functions"
)


# ---- as the APIs have them ----


class Turn(NamedTuple):
    """The assistant's messages between two messages of others, and the results of its calls."""

    thoughts: list[str]
    calls: list[tuple[str, Said]]
    text: str
    results: list[tuple[str, Said]]


def turns(conversation: Sequence[Said]) -> list[Turn | str]:
    """A text is the user's. Reasoning begins a turn of the assistant."""
    found: list[Turn | str] = []
    for number, said in enumerate(conversation):
        if said.author == "user":
            found.append(said.text)
            continue
        if not found or isinstance(found[-1], str) or (said.channel == "analysis" and found[-1].results):
            found.append(Turn([], [], "", []))
        turn = found[-1]
        assert isinstance(turn, Turn)
        if said.channel == "analysis":
            turn.thoughts.append(said.text)
        elif said.channel == "final":
            found[-1] = turn._replace(text=said.text)
        elif said.author == "assistant":
            turn.calls.append((f"call_{number}", said))
        else:
            turn.results.insert(0, (f"call_{number - 1}", said))  # in another order than their calls
    return found


def of_chat(conversation: Sequence[Said], role: str = "system") -> ChatRequest:
    messages: list[dict[str, Any]] = [{"role": role, "content": INSTRUCTIONS}]
    for turn in turns(conversation):
        if isinstance(turn, str):
            messages.append({"role": "user", "content": turn})
            continue
        calls = [
            {"id": name, "type": "function", "function": {"name": said.to[10:], "arguments": said.text}}
            for name, said in turn.calls
        ]
        message = {"role": "assistant", "content": turn.text or None, "reasoning_content": "\n".join(turn.thoughts)}
        messages.append(message | ({"tool_calls": calls} if calls else {}))
        messages += ({"role": "tool", "tool_call_id": name, "content": said.text} for name, said in turn.results)
    tools = [
        {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}
        for name, about, parameters in TOOLS
    ]
    return msgspec.convert({"messages": messages, "tools": tools}, ChatRequest)


def of_responses(conversation: Sequence[Said]) -> ChatRequest:
    items: list[dict[str, Any]] = []
    for turn in turns(conversation):
        if isinstance(turn, str):
            items.append({"role": "user", "content": turn})
            continue
        items += (
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": one}]}
            for one in turn.thoughts
        )
        items += ({"role": "assistant", "content": one} for one in [turn.text] if one)
        items += (
            {"type": "function_call", "call_id": name, "name": said.to[10:], "arguments": said.text}
            for name, said in turn.calls
        )
        items += ({"type": "function_call_output", "call_id": name, "output": said.text} for name, said in turn.results)
    tools = [
        {"type": "function", "name": name, "description": about, "parameters": parameters}
        for name, about, parameters in TOOLS
    ]
    body = {"model": "m", "instructions": INSTRUCTIONS, "input": items, "tools": tools}
    return responses_request.chat_request(msgspec.convert(body, responses_schema.ResponsesRequest))


def of_messages(conversation: Sequence[Said]) -> ChatRequest:
    messages: list[dict[str, Any]] = []
    for turn in turns(conversation):
        if isinstance(turn, str):
            messages.append({"role": "user", "content": turn})
            continue
        blocks: list[dict[str, Any]] = [{"type": "thinking", "thinking": one, "signature": ""} for one in turn.thoughts]
        blocks += ({"type": "text", "text": one} for one in [turn.text] if one)
        blocks += (
            {"type": "tool_use", "id": name, "name": said.to[10:], "input": json.loads(said.text)}
            for name, said in turn.calls
        )
        messages.append({"role": "assistant", "content": blocks})
        results = [{"type": "tool_result", "tool_use_id": name, "content": said.text} for name, said in turn.results]
        messages += [{"role": "user", "content": results}] * bool(results)
    tools = [
        {"name": name, "description": about, "input_schema": parameters or {"type": "object"}}
        for name, about, parameters in TOOLS
    ]
    body = {"model": "m", "max_tokens": 9, "system": INSTRUCTIONS, "messages": messages, "tools": tools}
    return messages_api.chat_request(msgspec.convert(body, messages_schema.MessagesRequest))


APIS = {"chat": of_chat, "responses": of_responses, "messages": of_messages}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    return Tokenizer.load(write_model(folder / "harmony", tokenizer_config={"chat_template": HARMONY}))


def rendered(tokenizer: Tokenizer, body: ChatRequest) -> str:
    """The prompt behind the message of the system."""
    text = render_chat(tokenizer, body, body.messages)
    system, _, rest = text.partition("<|end|>")
    assert system.startswith("<|start|>system<|message|>You are ChatGPT")
    return rest


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("api", APIS)
def test_conversations_are_written_as_harmony(api: str, name: str, tokenizer: Tokenizer) -> None:
    conversation = CONVERSATIONS[name]
    assert rendered(tokenizer, APIS[api](conversation)) == written(conversation, developer=DEVELOPER)


def test_messages_of_the_developer_and_of_the_system_are_one(tokenizer: Tokenizer) -> None:
    conversation = CONVERSATIONS["a question"]
    body = of_chat(conversation, "developer")
    assert rendered(tokenizer, body) == written(conversation, developer=DEVELOPER)
    both = msgspec.convert(
        {"messages": [{"role": role, "content": role} for role in ("system", "developer", "user")]}, ChatRequest
    )
    expected = written([Said("user", "user")], developer="# Instructions\n\nsystem\n\ndeveloper")
    assert rendered(tokenizer, both) == expected


def test_text_beside_reasoning_joins_it_and_results_that_are_no_json_are_quoted(tokenizer: Tokenizer) -> None:
    """The template has no other place for this text, and writes results as JSON."""
    given = [Said("user", "a"), thought("look"), called("get_time"), result("get_time", "noon")]
    body = of_chat(given)
    body.messages[2].content, body.messages[3].content = "I look.", "noon\n"
    expected = [given[0], thought("look\nI look."), given[2], result("get_time", "noon\n")]
    assert rendered(tokenizer, body) == written(expected, developer=DEVELOPER)


def test_tools_need_no_description(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "get_time"}}]
    body = msgspec.convert({"messages": [{"role": "user", "content": "hi"}], "tools": tools}, ChatRequest)
    assert "// \ntype get_time = () => any;" in rendered(tokenizer, body)


# ---- as OpenAI's implementation writes them ----


def theirs(harmony: Any, encoding: Any, conversation: Sequence[Said]) -> str:
    """The whole prompt; dropped messages are given, and have to be left out."""
    role = harmony.Role
    tools = [harmony.ToolDescription.new(name, about, parameters) for name, about, parameters in TOOLS]
    developer = harmony.DeveloperContent.new().with_instructions(INSTRUCTIONS).with_function_tools(tools)
    system = harmony.SystemContent.new().with_conversation_start_date(DATE)
    messages = [
        harmony.Message.from_role_and_content(role.SYSTEM, system),
        harmony.Message.from_role_and_content(role.DEVELOPER, developer),
    ]
    for said in conversation:
        tool = said.author.startswith("functions.")
        author = harmony.Author.new(role.TOOL, said.author) if tool else harmony.Author(role=role(said.author))
        message = harmony.Message.from_author_and_content(author, said.text)
        channel, _, kind = said.channel.partition(" ")
        message = message.with_channel(channel) if channel else message
        message = message.with_content_type(kind) if kind else message
        messages.append(message.with_recipient(said.to) if said.to else message)
    found = harmony.Conversation.from_messages(messages)
    text: str = encoding.decode(encoding.render_conversation_for_completion(found, role.ASSISTANT))
    return text


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_openai_s_implementation_writes_the_same(name: str, tokenizer: Tokenizer) -> None:
    harmony: Any = pytest.importorskip("openai_harmony")
    try:
        encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except harmony.HarmonyError as error:
        pytest.skip(f"the vocabulary o200k_base is not there (TIKTOKEN_ENCODINGS_BASE names its folder): {error}")
    body = of_chat(CONVERSATIONS[name])
    text = re.sub(r"(?<=Current date: )[\d-]+", DATE, render_chat(tokenizer, body, body.messages))
    assert text == theirs(harmony, encoding, CONVERSATIONS[name])

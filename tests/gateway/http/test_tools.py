"""Tool calls and reasoning over real sockets, read by OpenAI's own client."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam, ChatCompletionToolUnionParam
from pagewise_gateway.text.tokenizer import Tokenizer

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, Server, serving
from tests.gateway.text.tokenizer_builders import byte_level_backend

TEMPLATE = (
    "{% if tools %}<|user|>tools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|user|>{{ message['role'] }}: {{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if thinking %}<think>\n{% endif %}"
)
SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|noise|>")
TOKENIZER = Tokenizer(byte_level_backend(SPECIAL), eos_token_ids=frozenset({0}), chat_template=TEMPLATE)
HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[ChatCompletionToolUnionParam] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Wie wird das Wetter?"}]
ARGUMENTS = '{"city": "Köln \\"</x>\\" 🙂", "days": 3}'
CALLS = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


def reply(text: str, end: bool = True) -> list[int]:
    """The tokens of an output, and of its end."""
    return TOKENIZER.encode(text, add_special_tokens=False) + [0] * end


async def streamed(server: Server, **options: Any) -> ChatCompletion:
    """An answer that was streamed, as the client's accumulator puts it together."""
    state = openai.lib.streaming.chat.ChatCompletionStreamState()
    async for chunk in await server.openai.chat.completions.create(model=MODEL, stream=True, **options):
        state.handle_chunk(chunk)
    return state.get_final_completion()


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

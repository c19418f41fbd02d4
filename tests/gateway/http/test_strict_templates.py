"""Every API takes conversations that a strict chat template refuses as they are, and its prompts stay prefixes."""

from typing import Any

import pytest
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.protocol import unpack_int32s

from tests.gateway.server import Server, serving
from tests.gateway.text.strict_templates import MISTRAL
from tests.gateway.text.tokenizer_builders import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), eos_token_ids=frozenset({0}), chat_template=MISTRAL)
OPTIONS: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "mistral", "tokenizer": TOKENIZER}
LONG = "toolu_01A" + "b" * 20


async def prompt_of(server: Server, path: str, body: dict[str, Any]) -> str:
    """The prompt that a request has at the scheduler."""
    status, answer = await server.post(path, body)
    assert status == 200, answer
    return TOKENIZER.decode(unpack_int32s(server.scheduler.last.prompts[0].tokens), skip_special_tokens=False)


def text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def use(call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": {}}


def used(call_id: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": "done"}


REMINDER = {"type": "text", "text": "reminder"}
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "[user]a\n\nb": [text("user", "a"), text("user", "b")],
    "[user]a[assistant]b\n\nc[user]d": [*map(text, ("user", "assistant", "assistant", "user"), "abcd")],
    "[user]a[assistant]fabcdefgh1[tool]done\n\nreminder": [
        text("user", "a"),
        text("assistant", [use("abcdefgh1")]),  # type: ignore[arg-type]
        text("user", [used("abcdefgh1"), REMINDER]),  # type: ignore[arg-type]
    ],
    "[user]a[assistant]bfabcdefgh1[tool]done\n\nreminder\n\nc": [
        text("user", "a"),
        text("assistant", "b"),
        text("assistant", [{"type": "text", "text": ""}, use("abcdefgh1")]),  # type: ignore[arg-type]
        text("user", [REMINDER, used("abcdefgh1")]),  # type: ignore[arg-type]
        text("user", "c"),
    ],
}


@pytest.mark.parametrize("prompt", MESSAGES)
async def test_messages(prompt: str) -> None:
    async with serving(**OPTIONS) as server:
        found = await prompt_of(server, "/v1/messages", {"messages": MESSAGES[prompt], "max_tokens": 4})
        assert found == prompt
        status, _ = await server.post("/v1/messages/count_tokens", {"messages": MESSAGES[prompt]})
        assert status == 200


async def test_ids_of_other_servers() -> None:
    async with serving(**OPTIONS) as server:
        messages = [text("user", "a"), text("assistant", [use(LONG)]), text("user", [used(LONG)])]  # type: ignore[arg-type]
        first = await prompt_of(server, "/v1/messages", {"messages": messages, "max_tokens": 4})
        more = [*messages, text("assistant", "b"), text("user", "c"), text("user", "d")]
        longer = await prompt_of(server, "/v1/messages", {"messages": more, "max_tokens": 4})
        assert LONG not in first
        assert longer == f"{first}[assistant]b[user]c\n\nd"
        call = {"id": LONG, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        chat = [
            text("user", "a"),
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "done", "tool_call_id": LONG},
        ]
        assert await prompt_of(server, "/v1/chat/completions", {"messages": chat, "max_tokens": 4}) == first
        items = [
            text("user", "a"),
            {"type": "function_call", "call_id": LONG, "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": LONG, "output": "done"},
        ]
        assert await prompt_of(server, "/v1/responses", {"input": items, "max_output_tokens": 4}) == first


async def test_chats_and_responses() -> None:
    async with serving(**OPTIONS) as server:
        turns = [*map(text, ("user", "user", "assistant", "assistant", "system", "user"), "abcdef")]
        expected = "[user]a\n\nb[assistant]c\n\nd[user]e\n\nf"
        assert await prompt_of(server, "/v1/chat/completions", {"messages": turns, "max_tokens": 4}) == expected
        assert await prompt_of(server, "/v1/responses", {"input": turns, "max_output_tokens": 4}) == expected
        continued = {"messages": turns[:4], "max_tokens": 4, "continue_final_message": True}
        found = await prompt_of(server, "/v1/chat/completions", continued)
        assert found == "[user]a\n\nb[assistant]c\n\nd"

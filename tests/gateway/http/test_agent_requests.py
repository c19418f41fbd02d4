"""Requests as coding agents send them: with fields that mean nothing here, and must not be in their way."""

from typing import Any

import pytest

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.http.tool_model import CALLS, HERMES, PARAMETERS, TOKENIZER, reply
from tests.gateway.server import MODEL, serving

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CACHED = {"type": "ephemeral", "ttl": "1h"}

# As Claude Code and agents made with Anthropic's SDK send it.
MESSAGES: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 200,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch=9d1c3;"},
        {"type": "text", "text": "You are an agent.", "cache_control": CACHED},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "List files.", "cache_control": CACHED}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "ls.", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}, "caller": None},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False},
                {"type": "text", "text": "<system-reminder>Be short.</system-reminder>", "cache_control": CACHED},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "The user has opened a.py."}]},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMA},
            "eager_input_streaming": True,
            "defer_loading": False,
            "input_examples": [{"command": "ls"}],
            "allowed_callers": ["direct"],
            "cache_control": CACHED,
        }
    ],
    "tool_choice": {"type": "auto"},
    "metadata": {"user_id": '{"device_id":"0f3a","account_uuid":"","session_id":"9b2e"}'},
    "thinking": {"type": "adaptive", "display": "summarized"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "cache_control": CACHED,
    "service_tier": "standard_only",
    "speed": "standard",
    "mcp_servers": [],
    "container": None,
    "inference_geo": None,
    "diagnostics": {"previous_message_id": "msg_1"},
}
BETAS = {"anthropic-beta": "claude-code-20250219,context-management-2025-06-27", "anthropic-version": "2023-06-01"}


async def test_messages_of_a_coding_agent() -> None:
    scheduler = FakeScheduler(replies=[reply(CALLS)], max_model_len=4096)
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:
        async with server.http.post(f"{server.url}/v1/messages?beta=true", json=MESSAGES, headers=BETAS) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        assert '"stop_reason":"tool_use"' in text
        prompt = TOKENIZER.decode(server.scheduler.last_prompt, skip_special_tokens=False)
        unlimited = ("max_tokens", "stream", "temperature", "metadata", "service_tier", "container", "inference_geo")
        body = {name: value for name, value in MESSAGES.items() if name not in (*unlimited, "diagnostics")}
        status, counted = await server.post("/v1/messages/count_tokens?beta=true", body)
        assert (status, counted) == (200, {"input_tokens": len(server.scheduler.last_prompt)})
    assert prompt.index("system: You are an agent.") < prompt.index("user: List files.")
    assert "billing" not in prompt
    assert prompt.endswith(
        "<|user|>tool: a.py<|end|><|user|>user: <system-reminder>Be short.</system-reminder><|end|>"
        "<|user|>system: The user has opened a.py.<|end|><|assistant|>"
    )


async def test_the_output_configuration_of_messages() -> None:
    template = TOKENIZER.chat_template
    assert template is not None
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = {
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "a"}],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    }
    async with serving(FakeScheduler(replies=[reply('{"a": 1}')]), tokenizer=TOKENIZER, **HERMES) as server:
        status, answer = await server.post("/v1/messages", body)
        assert (status, answer["content"]) == (200, [{"type": "text", "text": '{"a": 1}'}])
        assert '"integer"' in server.scheduler.last.params.sampling.grammar
        body["output_config"] = {"format": {"type": "json_schema", "schema": {"not": {}}}}
        status, answer = await server.post("/v1/messages", body)
        error: Any = answer["error"]
        assert (status, error["param"]) == (400, "output_config.format")


SHELL = {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SCHEMA}
OTHERS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": SCHEMA},
    {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [SHELL]},
    {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "grammar", "syntax": "lark"}},
]

# As Codex sends it.
RESPONSES: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "No network."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List files."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"command":"ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "There is a.py."}],
            "phase": "final_answer",
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Thanks."}]},
    ],
    "tools": [SHELL, {**SHELL, "name": "plan", "defer_loading": True, "output_schema": PARAMETERS}, *OTHERS],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto", "context": "auto"},
    "store": False,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-session",
    "prompt_cache_retention": "24h",
    "text": {"verbosity": "medium"},
    "service_tier": "auto",
    "client_metadata": {"session_id": "0199"},
    "truncation": "disabled",
    "metadata": None,
}


async def test_responses_of_a_coding_agent(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = FakeScheduler(replies=[reply("a"), reply("a")], max_model_len=4096)
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:
        async with server.http.post(f"{server.url}/v1/responses", json=RESPONSES) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        status, whole = await server.post("/v1/responses", {**RESPONSES, "stream": False})
        tools: Any = whole["tools"]
        assert (status, [tool["name"] for tool in tools]) == (200, ["shell", "plan"])
        prompt = TOKENIZER.decode(server.scheduler.last_prompt, skip_special_tokens=False)
        shown = server.shown()
    assert "event: response.completed" in text
    assert "<|user|>system: You are an agent.<|end|><|user|>system: No network.<|end|>" in prompt
    assert "<|user|>tool: a.py<|end|><|user|>assistant: There is a.py.<|end|><|user|>user: Thanks.<|end|>" in prompt
    assert "mcp__files" not in prompt
    for tool in OTHERS:
        assert f'requests_without_tools_total{{model_name="{MODEL}",type="{tool["type"]}"}} 2.0' in shown
        assert caplog.text.count(f"tools of type {tool['type']} are left out") <= 1


@pytest.mark.parametrize("tool", OTHERS, ids=lambda tool: tool["type"])
async def test_tools_that_are_no_functions_are_refused_if_they_are_alone(tool: dict[str, Any]) -> None:
    async with serving(tokenizer=TOKENIZER, **HERMES) as server:
        status, answer = await server.post("/v1/responses", {"input": "a", "tools": [tool]})
        error: Any = answer["error"]
        assert (status, error["param"]) == (400, "tools[0].type")
        assert tool["type"] in error["message"]

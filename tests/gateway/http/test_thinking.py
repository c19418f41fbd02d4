"""Thinking budgets in the APIs: which tokens the scheduler is asked to force, and what is refused."""

import json
import re
from typing import Any

import anthropic
import openai
import pytest
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.errors import ConfigError
from pagewise_shared.thinking import UNLIMITED, ThinkingBudget

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.http.tool_model import HERMES, PARAMETERS, TEMPLATE, TOKENIZER
from tests.gateway.server import MODEL, Server, serving
from tests.gateway.text.tokenizer_builders import byte_level_backend

ASKED: list[Any] = [{"role": "user", "content": "Hallo"}]
OPEN, END = TOKENIZER.special_tokens["<think>"], TOKENIZER.special_tokens["</think>"]
OPENED: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
HARMONY = {"enable_auto_tool_choice": True, "tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
HARMONY_TOKENIZER = Tokenizer(
    byte_level_backend(("<|start|>", "<|channel|>", "<|message|>", "<|call|>")),
    eos_token_ids=frozenset({0}),
    chat_template=TEMPLATE,
)


def budget(num_tokens: int, opens_within: int = 4) -> ThinkingBudget:
    return ThinkingBudget(num_tokens, END, (END,), (OPEN,), opens_within)


def thinking(server: Server) -> ThinkingBudget | None:
    return server.scheduler.last.params.sampling.thinking


async def refused(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await server.post(path, {"model": MODEL, **body})
    assert status == 400
    error: dict[str, Any] = answer["error"]
    return error


async def test_budgets_of_chats() -> None:
    async with serving(tokenizer=TOKENIZER, **HERMES) as server:

        async def asked(**extra: Any) -> ThinkingBudget | None:
            await server.openai.chat.completions.create(model=MODEL, messages=ASKED, extra_body=extra)
            return thinking(server)

        assert await asked() is None
        assert await asked(thinking_token_budget=7) == budget(7)
        assert await asked(thinking_token_budget=0, **OPENED) == budget(0, 0)
        assert await asked(thinking_token_budget=-1) is None
        assert await asked(reasoning={"max_tokens": 9}) == budget(9)
        assert await asked(reasoning={"max_tokens": 9, "enabled": True, "effort": "high"}) == budget(9, 0)
        assert await asked(reasoning={"effort": "low", "exclude": True}) is None
        assert await asked(thinking_token_budget=7, tools=TOOLS, tool_choice="required") == budget(7)
        assert server.scheduler.last.params.sampling.grammar
        error = await refused(
            server,
            "/v1/chat/completions",
            {"messages": ASKED, "thinking_token_budget": 3, "reasoning": {"max_tokens": 4}},
        )
        assert error["message"] == "thinking_token_budget and reasoning contradict each other"
        with pytest.raises(openai.BadRequestError, match="thinking_token_budget cannot be used with use_beam_search"):
            await asked(thinking_token_budget=7, use_beam_search=True)
        for wrong in ({"thinking_token_budget": -2}, {"thinking_token_budget": "a"}, {"reasoning": {"max_tokens": -1}}):
            with pytest.raises(openai.BadRequestError):
                await asked(**wrong)


async def test_budgets_of_completions_depend_on_the_prompt() -> None:
    async with serving(tokenizer=TOKENIZER, **HERMES) as server:

        async def asked(prompt: Any, num_tokens: int = 5) -> ThinkingBudget | None:
            extra = {"thinking_token_budget": num_tokens}
            await server.openai.completions.create(model=MODEL, prompt=prompt, extra_body=extra)
            return thinking(server)

        assert await asked("Hallo") == budget(5)
        assert await asked("Hallo<think>\n") == budget(5, 0)
        assert await asked([20, 21, OPEN]) == budget(5, 0)
        assert await asked("Hallo<think>a</think>") is None
        with pytest.raises(openai.BadRequestError, match="some of the prompts begin the reasoning"):
            await asked(["Hallo", "Hallo<think>"])
        assert await asked(["Hallo", "Hallo<think>"], -1) is None


async def test_budgets_of_responses_and_messages() -> None:
    async with serving(tokenizer=TOKENIZER, **HERMES) as server:
        reasoning: Any = {"effort": "low", "max_tokens": 11}
        await server.openai.responses.create(model=MODEL, input="Hallo", reasoning=reasoning)
        assert thinking(server) == budget(11)
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:

            async def asked(given: Any) -> ThinkingBudget | None:
                await client.messages.create(model=MODEL, max_tokens=20, messages=ASKED, thinking=given)
                return thinking(server)

            assert await asked({"type": "enabled", "budget_tokens": 1024}) == budget(1024, 0)
            assert await asked({"type": "adaptive"}) is None
            assert await asked({"type": "disabled"}) is None


async def test_where_the_format_is_not_known_budgets_are_refused_but_for_messages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = Tokenizer(byte_level_backend(), eos_token_ids=frozenset({0}), chat_template=TEMPLATE)
    for tokenizer, options, reason in (
        (TOKENIZER, {}, "--reasoning-parser names it"),
        (plain, {"reasoning_parser": "qwen3"}, "this model has no token for </think>"),
    ):
        caplog.clear()
        async with serving(tokenizer=tokenizer, **options) as server:
            for path, body, field in (
                ("/v1/chat/completions", {"messages": ASKED, "thinking_token_budget": 5}, "thinking_token_budget"),
                ("/v1/completions", {"prompt": "Hallo", "thinking_token_budget": 5}, "thinking_token_budget"),
                ("/v1/responses", {"input": "Hallo", "reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
            ):
                error = await refused(server, path, body)
                assert (error["code"], error["param"]) == ("unsupported_parameter", field)
                assert reason in error["message"]
            for _ in range(2):
                body = {"max_tokens": 5, "messages": ASKED, "thinking": {"type": "enabled", "budget_tokens": 5}}
                status, _ = await server.post("/v1/messages", body)
                assert (status, thinking(server)) == (200, None)
        warned = [record.getMessage() for record in caplog.records if "budget_tokens" in record.getMessage()]
        assert len(warned) == 1
        assert reason in warned[0]


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_gpt_oss_goes_on_with_another_message(tools: Any) -> None:
    async with serving(FakeScheduler(), tokenizer=HARMONY_TOKENIZER, **HARMONY) as server:
        body = {"messages": ASKED, "tools": tools, "thinking_token_budget": 6}
        assert (await server.post("/v1/chat/completions", body))[0] == 200
        found = thinking(server)
    assert found is not None
    decoded = HARMONY_TOKENIZER.decode(found.forced, skip_special_tokens=False)
    rest = "" if tools else "final<|message|>"
    assert decoded == f"<|end|><|start|>assistant<|channel|>{rest}"
    assert HARMONY_TOKENIZER.decode(found.opening, skip_special_tokens=False) == "<|channel|>analysis<|message|>"
    assert (found.num_tokens, found.end, found.opens_within) == (6, found.forced[0], UNLIMITED)


async def test_the_marker_of_calls_ends_reasoning_where_the_format_says_so() -> None:
    marker = "<|tool_calls_section_begin|>"
    tokenizer = Tokenizer(
        byte_level_backend(("<think>", "</think>", marker)), eos_token_ids=frozenset({0}), chat_template=TEMPLATE
    )
    async with serving(tokenizer=tokenizer, tool_call_parser="kimi_k2", reasoning_parser="kimi_k2") as server:
        await server.post("/v1/completions", {"prompt": "Hallo<think>", "thinking_token_budget": 5})
        found = thinking(server)
    assert found is not None
    assert found.other_ends == (tokenizer.special_tokens[marker],)


async def test_the_end_of_reasoning_may_say_more_than_its_delimiter() -> None:
    ending = "Enough.\n</think>\n"
    config = json.dumps({"reasoning_start_str": "<think>", "reasoning_end_str": ending})
    async with serving(tokenizer=TOKENIZER, reasoning_config=config, **HERMES) as server:
        await server.post("/v1/completions", {"prompt": "Hallo", "thinking_token_budget": 5})
        found = thinking(server)
    assert found == ThinkingBudget(5, END, tuple(TOKENIZER.encode(ending, False)), (OPEN,), 4)
    for wrong, options, reason in (
        ("{", HERMES, "no JSON object"),
        ('{"start": "a"}', HERMES, "unknown field `start`"),
        ('{"reasoning_start_str": "[THINK]"}', HERMES, "reasoning_start_str of this --reasoning-parser is '<think>'"),
        ('{"reasoning_end_str": "Enough."}', HERMES, "has no '</think>'"),
        (json.dumps({"reasoning_end_str": "a" * 200 + "</think>"}), HERMES, "more than 128 tokens"),
        ("{}", {}, "requires a --reasoning-parser"),
        ("{}", HARMONY, "requires a --reasoning-parser whose format has delimiters"),
    ):
        with pytest.raises(ConfigError, match=re.escape(reason)):
            async with serving(tokenizer=TOKENIZER, reasoning_config=wrong, **options):
                pass

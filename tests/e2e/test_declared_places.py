"""Hybrid models, served: the second request with a system prompt begins where that ends, and thinking has budgets."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from benchmarks.processes import Served, serving
from tests.model_builders import build_model
from tests.structured import VOCAB_SIZE, save_tokenizer

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% if thinking %}<think>\n{% endif %}{% endif %}"
)
RULES = "You are a helpful assistant of a shop for bicycles, and answer in few words. "
QUESTIONS = ("What does the red one cost? " * 8, "Where is the shop? " * 12, "Which lock do you recommend? " * 8)
BLOCK = 16


@pytest.fixture(scope="module", params=["lfm2", "qwen3_next"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path: Path = tmp_path_factory.mktemp(request.param)
    build_model(request.param, path, vocab_size=VOCAB_SIZE, max_position_embeddings=2048)
    save_tokenizer(path, "<think>", "</think>")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    options = ("--num-blocks", "400", "--served-model-name", "hybrid", "--reasoning-parser", "qwen3", "--no-profile")
    with serving("--model", str(path), *options) as running:
        yield running


def post(server: Served, path: str, **fields: Any) -> Any:
    body = {"model": "hybrid", "max_tokens": 8, "temperature": 0, **fields}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def up_to(*texts: str) -> int:
    """Tokens of the full blocks up to the end of a beginning. Each character is a token, and so are special ones."""
    return sum(map(len, texts)) // BLOCK * BLOCK


def test_chats_with_one_system_prompt(server: Served) -> None:
    system = "Chat. " + RULES * 5
    hits, said = [], []
    for question in (*QUESTIONS, QUESTIONS[1]):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        answer = post(server, "/v1/chat/completions", messages=messages)
        hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        said.append(answer["choices"][0]["message"]["content"])
    begins = up_to("_system\n", system.strip(), "__user\n")
    assert hits[:3] == [0, begins, begins]
    assert hits[3] > begins
    fresh = post(server, "/v1/chat/completions", messages=messages, cache_salt="another cache")
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert said[1] == said[3] == fresh["choices"][0]["message"]["content"], "they began with the right states"


def test_breakpoints_of_messages(server: Served) -> None:
    """The system prompt has a part that changes behind the first breakpoint, and a document in the first message."""
    rules, document = "Messages. " + RULES * 4, "A bicycle has two wheels and a frame. " * 6
    hits, said = [], []
    turns = [("Monday", 0, "a"), ("Sunday", 0, "a"), ("Sunday", 1, "a"), ("Sunday", 1, "b")]
    for day, number, salt in turns:
        cached = {"cache_control": {"type": "ephemeral"}}
        system = [{"type": "text", "text": rules} | cached, {"type": "text", "text": f"It is {day}. " * 8}]
        parts = [{"type": "text", "text": document} | cached, {"type": "text", "text": QUESTIONS[number]}]
        asked = [{"role": "user", "content": parts}]
        answer = post(server, "/v1/messages", system=system, messages=asked, cache_salt=salt)
        usage = answer["usage"]
        said.append(answer["content"])
        hits.append(usage["cache_read_input_tokens"])
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] > 100
    changing = "It is Sunday. " * 8
    assert hits[:2] == [0, up_to("_system\n", rules)]
    assert hits[2] == up_to("_system\n", rules, "\n", changing.strip(), "__user\n", document)
    assert hits[3] == 0
    assert said[3] == said[2], "it began with the right states"


def test_thinking_ends_when_its_budget_is_used_up(server: Served) -> None:
    messages: Any = [{"role": "user", "content": "Which one?"}]
    opened: Any = {"chat_template_kwargs": {"thinking": True}, "return_token_ids": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        def answers(**extra: Any) -> list[Any]:
            fields = {"model": "hybrid", "seed": 4, "max_tokens": 24, "messages": messages}
            return client.chat.completions.create(n=3, logprobs=True, extra_body=opened | extra, **fields).choices

        found = answers(thinking_token_budget=9)
        end = found[0].token_ids[9]
        assert [choice.token_ids.index(end) for choice in found] == [9] * 3
        assert [len(choice.logprobs.content) for choice in found] == [len(choice.token_ids) for choice in found]
        assert len({tuple(choice.token_ids) for choice in found}) == 3
        free = answers()
        assert all(one.token_ids[:9] == other.token_ids[:9] for one, other in zip(found, free, strict=True))
        again = answers(reasoning={"max_tokens": 9})
        assert [choice.token_ids for choice in again] == [choice.token_ids for choice in found]
        for choice in answers(thinking_token_budget=0, structured_outputs={"choice": ["12", "abc"]}):
            assert choice.token_ids[0] == end
            assert choice.message.content in ("12", "abc")
            assert not choice.message.reasoning
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        given: Any = {"type": "enabled", "budget_tokens": 12}
        with client.messages.stream(model="hybrid", max_tokens=40, thinking=given, messages=messages) as stream:
            message = stream.get_final_message()
    assert message.content[0].type == "thinking"
    assert message.content[1].type == "text"

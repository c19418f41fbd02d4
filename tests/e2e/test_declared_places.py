"""The second request with a system prompt begins where the system prompt ends, in a hybrid model."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import Served, serving
from tests.model_builders import build_model
from tests.structured import VOCAB_SIZE, save_tokenizer

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
RULES = "You are a helpful assistant of a shop for bicycles, and answer in few words. "
QUESTIONS = ("What does the red one cost? " * 8, "Where is the shop? " * 12, "Which lock do you recommend? " * 8)
BLOCK = 16


@pytest.fixture(scope="module", params=["lfm2", "qwen3_next"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path: Path = tmp_path_factory.mktemp(request.param)
    build_model(request.param, path, vocab_size=VOCAB_SIZE, max_position_embeddings=2048)
    save_tokenizer(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with serving(
        "--model", str(path), "--num-blocks", "400", "--served-model-name", "hybrid", "--no-profile"
    ) as running:
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

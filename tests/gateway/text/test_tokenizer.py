"""Loading tokenizers and rendering conversations."""

import asyncio
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from pagewise_gateway.text.template import ChatTemplateError, NoChatTemplateError
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.config import DEMO_MODEL
from pagewise_shared.errors import ModelError
from pagewise_shared.model_files import resolve_model

from tests.gateway.text import tokenizer_builders as builders
from tests.gateway.text.tokenizer_builders import CHAT_TEMPLATE, write_model


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe\x00", b"[1]"])
def test_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 5}}, {0, 5}),
        ({"config": {"eos_token_id": [5, 6]}, "generation_config": {"eos_token_id": [7]}}, {0, 5, 6, 7}),
        ({"config": {"eos_token_id": None}, "tokenizer_config": None}, set()),
    ],
)
def test_end_of_sequence_tokens(tmp_path: Path, files: dict[str, object], expected: set[int]) -> None:
    assert Tokenizer.load(write_model(tmp_path, **files)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("behind_answers", "expected"),
    [
        ("<|user|>", {0, 1, 9}),
        (" \\n<|user|>\\n", {0, 1, 9}),
        ("<|end|>", {0, 9}),
        ("<|other|>", {0, 9}),
        ("<|assistant|>", {0, 9}),
        ("", {0, 9}),
    ],
)
def test_outputs_end_where_the_template_ends_answers(tmp_path: Path, behind_answers: str, expected: set[int]) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + behind_answers + "{% endfor %}"
    if behind_answers == "<|assistant|>":  # it ends reasoning, and so no turn
        template = template.replace("{{ m.content", "{{ m.thinking }}<|assistant|>{{ m.content")
    config = {"eos_token": "<|end|>", "chat_template": template.replace("\\n", "\n")}
    model = write_model(tmp_path, tokenizer_config=config)
    tokenizer = Tokenizer.load(model, frozenset({9}))
    assert tokenizer.special_tokens["<|user|>"] == 1
    assert tokenizer.eos_token_ids == expected


def test_tokens_that_call_tools() -> None:
    backend = builders.byte_level_backend()
    assert Tokenizer(backend).tool_call_ids == ()
    backend.add_tokens(["<tool_call>"])
    assert Tokenizer(backend).tool_call_ids == (backend.token_to_id("<tool_call>"),)


def test_round_trip_and_special_tokens() -> None:
    tokenizer = builders.byte_level()
    ids = tokenizer.encode("<|user|>Grüße 世界 🙂<|end|>")
    assert tokenizer.decode(ids) == "Grüße 世界 🙂"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>Grüße 世界 🙂<|end|>"
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert b"".join(map(tokenizer.token_as_bytes, ids)).decode() == "<|user|>Grüße 世界 🙂<|end|>"


@pytest.mark.parametrize(
    "sources",
    [
        {"chat_template.jinja": CHAT_TEMPLATE},
        {"tokenizer_config": {"chat_template": CHAT_TEMPLATE}},
        {"tokenizer_config": {"chat_template": [{"name": "default", "template": CHAT_TEMPLATE}]}},
        {"chat_template": {"chat_template": CHAT_TEMPLATE}},
    ],
)
def test_chat_template_wherever_it_is(tmp_path: Path, sources: dict[str, object]) -> None:
    jinja = sources.pop("chat_template.jinja", None)
    write_model(tmp_path, **sources)
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(str(jinja))
    tokenizer = Tokenizer.load(tmp_path)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    assert tokenizer.render_chat(messages) == "<|user|>user: a\nb<|end|><|assistant|>"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<|user|>user: a\nb<|end|>"
    assert tokenizer.render_chat(messages, template_kwargs={"suffix": "!"}).endswith("<|assistant|>!")
    continued: list[dict[str, Any]] = [*messages, {"role": "assistant", "content": "So "}]
    assert tokenizer.render_chat(continued, add_generation_prompt=False, continue_final_message=True).endswith(
        "assistant: So "
    )
    assert "system: be" in tokenizer.render_chat([{"role": "developer", "content": "be"}])


def test_chat_errors(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(NoChatTemplateError):
        Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "a"}])
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(ChatTemplateError, match="no tools here"):
        tokenizer.render_chat([{"role": "tool", "content": "a"}])
    with pytest.raises(ChatTemplateError, match="messages"):
        tokenizer.render_chat([{"role": "user", "content": "a"}], template_kwargs={"messages": []})


def test_demo_model() -> None:
    tokenizer = Tokenizer.load(resolve_model(DEMO_MODEL))
    assert tokenizer.eos_token_ids == {0, 1}
    assert tokenizer.token_bytes is not None
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|user|>\nhi<|end|>\n<|assistant|>\n"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


async def test_the_event_loop_goes_on_while_a_long_text_is_tokenized() -> None:
    tokenizer = builders.byte_level()
    text = "the quick brown fox " * 50_000
    encoding = asyncio.create_task(tokenizer.off_loop(lambda: len(tokenizer.encode(text))))
    ticks, longest, last = 0, 0.0, time.monotonic()
    while not encoding.done():
        await asyncio.sleep(0.002)
        now = time.monotonic()
        ticks, longest, last = ticks + 1, max(longest, now - last), now
    assert await encoding > 100_000
    assert ticks > 10
    assert longest < 0.5
    tokenizer.close()


@pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < (5, 18),
    reason="transformers loads torch with its tokenizers before version 5.18",
)
def test_torch_is_not_loaded() -> None:
    code = (
        "import sys; from pagewise_gateway.text.tokenizer import Tokenizer;"
        "from pagewise_shared.model_files import resolve_model;"
        "t = Tokenizer.load(resolve_model('pagewise-demo')); t.render_chat([{'role': 'user', 'content': 'a'}]);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

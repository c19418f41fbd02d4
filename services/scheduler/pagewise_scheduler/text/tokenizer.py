"""A model's tokenizer and chat template, without the model and without torch."""

import asyncio
import json
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from pagewise_shared.errors import ModelError
from transformers.utils.chat_template_utils import render_jinja_template

_THREADS = 2
_OFF_LOOP_CHARACTERS = 2_000
"""Shorter texts are tokenized on the event loop: a round trip to a thread would take longer."""


class ChatTemplateError(ValueError):
    """The messages cannot be rendered; the text is for the client."""


class Tokenizer:
    """Text to tokens and back.

    ``eos_token_ids``: tokens that end a sequence by themselves. ``vocab_size``: token ids are below it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._chat_template = chat_template
        self._special_tokens = special_tokens or {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """The tokenizer in a model directory.

        Raises:
            ModelError: there is no tokenizer.json, or it cannot be read.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{path} has no tokenizer.json (other tokenizer formats are not read)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{file} is unusable: {error}") from error
        settings = _read_json(path / "tokenizer_config.json")
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in settings.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        eos = _eos_ids(path)
        if (token := special.get("eos_token")) and (own := backend.token_to_id(token)) is not None:
            eos.add(own)
        return cls(backend, frozenset(eos), _chat_template(path, settings), special)

    def encode(self, text: str, add_special_tokens: bool = True) -> "array[int]":
        """Token ids (int32) of a text."""
        return array("i", self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    async def encode_async(self, text: str, add_special_tokens: bool = True) -> "array[int]":
        """``encode``, off the event loop when the text is long."""
        if len(text) < _OFF_LOOP_CHARACTERS:
            return self.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self.encode, text, add_special_tokens)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that form no character become U+FFFD."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, special tokens included."""
        return self.backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token: unlike its text they are whole, also for part of a character."""
        piece = self.backend.id_to_token(token_id)
        if piece is not None and self._is_byte_level and all(c in _BYTE_OF_CHARACTER for c in piece):
            return bytes(_BYTE_OF_CHARACTER[c] for c in piece)
        return self.token_text(token_id).encode()

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text of a conversation, by the model's own template.

        Raises:
            ChatTemplateError: the model has no chat template, or it rejects these messages.
        """
        if self._chat_template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        try:
            special: dict[str, Any] = dict(self._special_tokens)
            rendered = render_jinja_template(
                conversations=[messages],
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **special,
            )[0]
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise ChatTemplateError(f"the model's chat template rejects these messages: {error}") from error
        return str(rendered[0])

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self.backend.to_str()).get("decoder"))


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as. Source: GPT-2's encoder."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _eos_ids(path: Path) -> set[int]:
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _read_json(path / name).get("eos_token_id")
        found |= {value} if isinstance(value, int) else set(value or ())
    return found


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None

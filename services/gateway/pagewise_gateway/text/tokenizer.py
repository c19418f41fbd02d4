"""A model's tokenizer and chat template, read without loading torch.

The ``tokenizers`` library tokenizes. Of transformers only the module that renders chat templates is used, because every
template is written for it, and because it does not load torch, as ``AutoTokenizer`` does.
"""

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tokenizers
from pagewise_shared.end_tokens import end_token_ids, read_json, token_text, tokenizer_settings
from pagewise_shared.errors import ModelError

from pagewise_gateway.text.errors import ChatTemplateError, NoChatTemplateError
from pagewise_gateway.text.token_bytes import TokenBytes
from pagewise_gateway.text.turns import Turns

T = TypeVar("T")

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOOL_CALL_TOKENS = (
    "<tool_call>",  # Qwen, Hermes, GLM
    "[TOOL_CALLS]",  # Mistral
    "<|python_tag|>",  # Llama
    "<|call|>",  # gpt-oss
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",  # DeepSeek
    "<|tool_calls_section_begin|>",  # Kimi
    "<|tool_call|>",  # Granite, Phi
    "<|START_ACTION|>",  # Command
    "<|action_start|>",  # InternLM
    "<tool_calls>",  # Jamba
)
_THREADS = 2
_LARGE_CHARACTERS = 262_144
"""Longer texts, which take more than about 0.1 s, are tokenized one at a time: a thread is left for shorter ones."""
_TRIMMED_CHARACTERS = 65_536
"""After a longer text free memory is given back: the library takes 300 bytes for a token, which the allocator keeps."""
_LONG_DECODE = 4096
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Gives free memory back to the system, where the allocator is glibc's; it releases the GIL."""
_RESERVED_TEMPLATE_NAMES = {
    "conversations",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
    *_SPECIAL_TOKENS,
}


class Tokenizer:
    """Text to token ids and back, and conversations to text.

    Fields:
        eos_token_ids: tokens that end the model's output.
        tool_call_ids: tokens with which the model calls a tool, if its vocabulary has tokens of their own for that.
        special_token_ids: tokens that ``skip_special_tokens`` leaves out.
        vocab_size: number of ids the tokenizer knows, added tokens included (the model's may be larger).
        token_bytes: the bytes behind each token, or None if the vocabulary has no fixed ones.
        longest_token: characters in the longest token: a text of more than n times as many has more than n tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.eos_token_ids = eos_token_ids
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.tool_call_ids = tuple(vocabulary[token] for token in _TOOL_CALL_TOKENS if token in vocabulary)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=1)
        decoder = msgspec.json.decode(backend.to_str(), type=_TokenizerFile).decoder
        self.token_bytes = TokenBytes.of(backend, decoder)
        self._backend = backend
        self._chat_template = chat_template
        self._special_tokens = special_tokens or {}
        self._threads: ThreadPoolExecutor | None = None
        self._turns, self._large_turns = Turns(_THREADS), Turns(_THREADS - 1)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a model directory.

        Raises:
            ModelError: tokenizer.json is missing, or it or another file cannot be read.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{path} has no tokenizer.json: Pagewise needs the fast tokenizer's file")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{file} cannot be read: {error}") from error
        settings = tokenizer_settings(path)
        special = {name: text for name in _SPECIAL_TOKENS if (text := token_text(settings.get(name))) is not None}
        template = _chat_template(path, settings)
        if template is not None:
            _renderer()  # imported now and not with the first request, because it takes half a second
        return cls(
            backend,
            eos_token_ids=end_token_ids(path, backend.token_to_id),
            chat_template=template,
            special_tokens=special,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. This blocks, but releases the GIL."""
        # Not ``encode``, which holds the GIL (3 s for 3 MB of text); the calls for batches do not.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are not valid UTF-8 become U+FFFD."""
        if len(token_ids) > _LONG_DECODE:  # ``decode`` holds the GIL, 0.2 s for a million tokens
            return self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return one token's text: special tokens by name, incomplete characters as U+FFFD, "" for unknown ids."""
        if (table := self.token_bytes) is not None:
            text = table.texts.get(token_id)
            return text if text is not None else table[token_id].decode(errors="replace")
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_as_bytes(self, token_id: int) -> bytes:
        """Return one token's bytes, which may be part of a character."""
        if self.token_bytes is not None:
            return self.token_bytes[token_id]
        return self.token_text(token_id).encode()

    def token(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it (such as "Ġthe"), "" for unknown ids."""
        return self._backend.id_to_token(token_id) or ""

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Render a conversation with the model's chat template.

        ``messages``: role and content; a content that is a list of text parts is joined by line breaks.

        Raises:
            NoChatTemplateError: the model has no chat template.
            ChatTemplateError: the template refuses the conversation.
        """
        if self._chat_template is None:
            raise NoChatTemplateError("the model has no chat template: use /v1/completions")
        if reserved := _RESERVED_TEMPLATE_NAMES & (template_kwargs or {}).keys():
            raise ChatTemplateError(f"chat_template_kwargs may not set {min(reserved)}")
        try:
            rendered: list[str]
            rendered, _ = _renderer()(
                [[_flatten(message, self._chat_template) for message in messages]],
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **self._special_tokens,
                **(template_kwargs or {}),
            )
        except Exception as error:  # whatever a template written by others may raise
            raise ChatTemplateError(f"the model's chat template refuses the conversation: {error}") from error
        return rendered[0]

    async def off_loop(self, function: Callable[[], T], key: str = "", size: int = 0) -> T:
        """Run ``function``, which tokenizes, on one of a few threads, so that the event loop is not blocked.

        The threads are shared fairly between the API keys (``key``: the name of one). ``size``: characters of the text;
        long texts leave a thread to shorter ones.
        """
        queues = [self._turns] if size <= _LARGE_CHARACTERS else [self._large_turns, self._turns]
        taken: list[Turns] = []
        try:
            for queue in queues:
                await queue.take(key)
                taken.append(queue)
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
            job = function if size <= _TRIMMED_CHARACTERS else _then_trim(function)
            work = asyncio.get_running_loop().run_in_executor(self._threads, job)
        except BaseException:
            for queue in taken:
                queue.pass_on()
            raise
        for queue in taken:  # if the client goes away, the thread goes on: its turn lasts until it is done
            work.add_done_callback(lambda _, queue=queue: queue.pass_on())  # type: ignore[misc]
        return await asyncio.shield(work)

    def close(self) -> None:
        """Stop the threads. They are started again if they are needed."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None


def _then_trim(function: Callable[[], T]) -> Callable[[], T]:
    def run() -> T:
        try:
            return function()
        finally:
            if _malloc_trim is not None:
                _malloc_trim(0)

    return run


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None


def _renderer() -> Callable[..., Any]:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _flatten(message: dict[str, Any], template: str) -> dict[str, Any]:
    flat = dict(message)
    if isinstance(content := flat.get("content"), list):
        flat["content"] = "\n".join(part["text"] for part in content)
    if flat.get("role") == "developer" and "developer" not in template:
        flat["role"] = "system"  # OpenAI's newer name for it, which most templates do not know
    return flat


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    template = settings.get("chat_template") or read_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several templates by name; the one for plain chat is called "default"
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None

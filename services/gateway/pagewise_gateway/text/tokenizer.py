"""A model's tokenizer and chat template, read without loading torch.

The ``tokenizers`` library tokenizes. transformers reads the files, because tokens, their flags and templates are in
several of them, and renders chat templates, because every template is written for it. ``PreTrainedTokenizerFast`` does
so without torch (from transformers 5.18 on), which ``AutoTokenizer`` loads.
"""

import asyncio
import contextlib
import ctypes
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import tokenizers
from pagewise_shared.errors import ModelError
from pagewise_shared.model_files import end_token_ids, read_json, untyped_special_tokens

from pagewise_gateway.text.template import ChatTemplate, renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
"""Decoders as the library writes them."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
T = TypeVar("T")
_TOOL_CALL_TOKENS = (
    "<tool_call>",  # Qwen, Hermes, GLM
    "[TOOL_CALLS]",  # Mistral
    "<|python_tag|>",  # Llama
    "<|call|>",  # gpt-oss
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",  # DeepSeek
    "<|tool_calls_section_begin|>",  # Kimi
    "<|tool_call>",  # Gemma 4
    "<minimax:tool_call>",  # MiniMax
    "<|tool_call|>",  # Granite, Phi
    "<|START_ACTION|>",  # Command
    "<|action_start|>",  # InternLM
    "<tool_calls>",  # Jamba
)
_THREADS = 2
_LARGE_CHARACTERS = 262_144
"""Longer texts, which take more than about 0.1 s, are tokenized one at a time, so that a thread serves shorter ones."""
_TRIMMED_CHARACTERS = 65_536
"""After a longer text the allocator returns free memory: the library takes 300 bytes for a token."""
_LONG_DECODE = 4096
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Returns free memory to the system, where the allocator is glibc's; it releases the GIL."""


def _byte_level_alphabet() -> dict[str, int]:
    # GPT-2's printable characters for the 256 bytes (Radford et al., 2019, ``bytes_to_unicode``).
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(printable)))}
    return alphabet


_ALPHABET = _byte_level_alphabet()


class TokenBytes:
    """Maps token ids to bytes, and caches the results.

    ``strips_first_space``: whether the decoder drops one space at the very beginning of a text. ``texts``: the cached
    tokens that consist of whole characters, as text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, byte_level: bool, strips_first_space: bool) -> None:
        self.strips_first_space = strips_first_space
        self._backend = backend
        self._convert = _from_byte_level if byte_level else _from_sentencepiece
        self._known: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None) -> "TokenBytes | None":
        """Return the table for a tokenizer with this ``decoder`` (as in tokenizer.json), or None if it has none."""
        decoder = decoder or {}
        parts: list[dict[str, Any]] = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        if {part.get("type") for part in parts} - {"Fuse"} == {"ByteLevel"}:
            return cls(backend, byte_level=True, strips_first_space=False)
        if parts in (_SENTENCEPIECE, [*_SENTENCEPIECE, _STRIP]):
            return cls(backend, byte_level=False, strips_first_space=_STRIP in parts)
        return None

    def __getitem__(self, token_id: int) -> bytes:
        """Return the token's bytes, which are empty for an id that the tokenizer does not know."""
        known = self._known.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._convert(token)
            with contextlib.suppress(UnicodeDecodeError):
                self.texts[token_id] = known.decode()
        return known


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token: its name is its text
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


class Turns:
    """A semaphore of ``most`` turns that is fair to API keys.

    Waiting tasks get turns round robin over API keys, and in order within a key.

    So a client that asks for a thousand turns delays another client by one of them.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, key: str) -> None:
        """Wait for a turn, which lasts until ``pass_on`` is called. ``key``: name of the client's API key."""
        if self._free:
            self._free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # the turn was granted in the meantime
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """End a turn."""
        while self._waiting:
            key = next(iter(self._waiting))
            queue = self._waiting.pop(key)
            granted = queue.popleft()
            if queue:
                self._waiting[key] = queue  # behind all other keys
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1


class Tokenizer:
    """Text to token ids and back, and conversations to text.

    Fields:
        eos_token_ids: tokens that end the model's output.
        tool_call_ids: special tokens with which the model calls a tool.
        special_tokens: the ids of special tokens by their texts.
        special_token_ids: tokens that ``skip_special_tokens`` leaves out.
        vocab_size: number of ids the tokenizer knows, added tokens included (the model's may be larger).
        token_bytes: the bytes of each token; None if they depend on other tokens.
        longest_token: characters in the longest token: a text of more than n times as many has more than n tokens.
        chat_template: renders conversations. model_type: the family of the model, as its configuration names it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        tool_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        model_type: str = "",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.eos_token_ids = eos_token_ids
        self.special_tokens = {
            token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self.special_token_ids = frozenset(self.special_tokens.values())
        self.tool_call_ids = tuple(vocabulary[token] for token in _TOOL_CALL_TOKENS if token in vocabulary)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=1)
        decoder = msgspec.json.decode(backend.to_str(), type=_TokenizerFile).decoder
        self.token_bytes = TokenBytes.of(backend, decoder)
        self._backend = backend
        self.chat_template = ChatTemplate(chat_template, tool_template, special_tokens or {})
        self.model_type = model_type
        self.render_chat = self.chat_template.render
        self._threads: ThreadPoolExecutor | None = None
        self._turns, self._large_turns = Turns(_THREADS), Turns(_THREADS - 1)

    @classmethod
    def load(cls, path: Path, more_ends: frozenset[int] = frozenset()) -> "Tokenizer":
        """Read a model directory. ``more_ends``: tokens that end outputs, besides the end tokens in its files.

        Raises:
            ModelError: tokenizer.json is missing, or it or another file cannot be read.
        """
        read = _read_tokenizer(path)
        backend = read.backend_tokenizer
        default, of_tools = _chat_templates(path, read.chat_template)
        if default or of_tools:
            renderer()  # imported now and not with the first request, because that takes long
        tokenizer = cls(
            backend,
            eos_token_ids=end_token_ids(path, backend.token_to_id) | more_ends,
            chat_template=default,
            tool_template=of_tools,
            special_tokens={name: text for name, text in read.special_tokens_map.items() if isinstance(text, str)},
            model_type=str(read_json(path / "config.json").get("model_type") or ""),
        )
        tokenizer._end_at_turns()
        return tokenizer

    def _end_at_turns(self) -> None:
        """End outputs at the special token that the chat template writes behind an answer, too.

        The files of some models name the end of a document only. A token that ends reasoning too, such as gpt-oss's
        ``<|end|>``, does not end outputs.
        """
        before, behind = self.chat_template.around_answer
        begun = (text for text in self.special_tokens if text and behind.lstrip().startswith(text))
        token = max(begun, key=len, default="")
        if token and token not in before and (token_id := self.special_tokens[token]) not in self.eos_token_ids:
            self.eos_token_ids |= {token_id}
            log.info("outputs end with %s, which the chat template writes behind each answer", token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. This blocks, but releases the GIL."""
        # Not ``encode``, which holds the GIL (3 s for 3 MB of text); the calls for batches do not.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_and_count(
        self, text: str, ends: Sequence[int], add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a text as ``encode`` does, and how many of them end within its first characters.

        ``ends``: the numbers of first characters.
        """
        encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoding.ids
        first = (encoding.char_to_token(end) for end in ends)  # None at the end, and at a blank that no token has
        return ids, [len(ids) if end >= len(text) else found or 0 for end, found in zip(ends, first, strict=True)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are not valid UTF-8 become U+FFFD."""
        if len(token_ids) > _LONG_DECODE:  # ``decode`` would hold the GIL: 0.2 s for a million tokens
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

    async def off_loop(self, function: Callable[[], T], key: str = "", size: int = 0) -> T:
        """Run ``function``, which tokenizes, on one of a few threads, so that it does not block the event loop.

        API keys (``key``: the name of one) share the threads fairly. ``size``: characters of the text; long texts leave
        a thread to shorter ones.
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
        for queue in taken:  # the thread cannot be cancelled, so its turn lasts until it is done
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


def _read_tokenizer(path: Path) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path} has no tokenizer.json: Pagewise needs the fast tokenizer's file")
    for name in ("special_tokens_map.json", "added_tokens.json"):
        read_json(path / name)  # raises an error that names the file
    untyped = untyped_special_tokens(path)
    try:
        read: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(  # nosec B615 # a directory
            path, local_files_only=True, **untyped
        )
    except Exception as error:  # both libraries raise exceptions of many kinds
        raise ModelError(f"{file}, or a file of the tokenizer beside it, cannot be read: {error}") from error
    return read


def _chat_templates(path: Path, given: str | dict[str, str] | None) -> tuple[str | None, str | None]:
    """Return the default template of a model, and a template for conversations with tools if there is one.

    ``given``: the templates of the tokenizer; ``chat_template.json`` of older processors is read otherwise.
    """
    found: Any = given or read_json(path / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    if isinstance(found, dict):
        if "default" not in found:
            log.warning("the model has no default chat template, only %s", ", ".join(map(str, sorted(found))))
        templates = found.get("default"), found.get("tool_use")
    else:
        templates = found, None
    for template in templates:
        if template is not None and not isinstance(template, str):
            raise ModelError(f"{path}: the chat template is no text, but of type {type(template).__name__}")
    return templates

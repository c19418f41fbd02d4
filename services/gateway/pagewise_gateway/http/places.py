"""The places of a conversation behind which other prompts are expected to go on differently.

They are the end of its system prompt and tools, and the cache breakpoints that a client has set. To find them in the
text of the conversation, its messages are rendered once more with a mark at each of them.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from pagewise_gateway.http.conversation import render_chat
from pagewise_gateway.http.schema import ChatMessage, ChatRequest, ContentPart
from pagewise_gateway.text.template import ChatTemplateError
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_MOST_KNOWN = 4096
"""Beginnings of conversations of which the number of tokens is known."""
_TAIL = 512
"""Characters at the end of a conversation, which are tokenized alone to count the tokens before them."""
_MOST_CHANGED = 64
"""Characters before a mark that a template may write in another way in the whole conversation, such as blanks that it
strips from the end of a message."""


class PlaceFinder:
    """Finds the places of conversations. ``default_kwargs``: variables of the chat template, as of ``render_chat``."""

    def __init__(self, tokenizer: Tokenizer, default_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer, self._default_kwargs = tokenizer, default_kwargs
        self._known: dict[tuple[int, int], int] = {}
        self._warned = False

    def encode(self, body: ChatRequest, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a conversation, whose rendered text is ``text``, and its places.

        A place is the number of tokens before it. This blocks as ``Tokenizer.encode`` does. Counting tokens makes it
        slower, so the numbers of tokens before places that have been seen are kept, and places near the end are counted
        from there. So a conversation is counted through once, and not in each of its turns.
        """
        special, known = bool(body.add_special_tokens), self._known
        keys = {end: (end, hash((text[:end], special))) for end in sorted(self._ends(body, text))}
        counts = {end: known[key] for end, key in keys.items() if key in known}
        far = [end for end in keys if end not in counts and len(text) - end > _TAIL]
        if far:
            tokens, found = self._tokenizer.encode_and_count(text, far, special)
            counts.update(zip(far, found, strict=True))
        else:
            tokens = self._tokenizer.encode(text, special)
        for end in keys.keys() - counts.keys():
            counts[end] = len(tokens) - len(self._tokenizer.encode(text[end:], add_special_tokens=False))
        if len(known) > _MOST_KNOWN:
            known.clear()
        known.update((key, counts[end]) for end, key in keys.items())
        return tokens, [counts[end] for end in keys]

    def _ends(self, body: ChatRequest, text: str) -> set[int]:
        """Return the numbers of characters before the places."""
        messages, mark = body.messages, f"\ue000{secrets.token_hex(12)}\ue001"
        begun = next(
            (number for number, one in enumerate(messages) if one.role not in ("system", "developer")), len(messages)
        )
        ends = set[int]()
        if begun or body.tools:
            ends |= self._before_marks(body, text, [*messages[:begun], ChatMessage("user", mark)], mark)
        if any(part.prompt_cache_breakpoint for one in messages for part in _parts(one)):
            ends |= self._before_marks(body, text, [_marked(one, mark) for one in messages], mark)
        return ends

    def _before_marks(self, body: ChatRequest, text: str, messages: Sequence[ChatMessage], mark: str) -> set[int]:
        """Return how many characters of ``text`` come before each mark in ``messages``, as far as it has the same ones
        there."""
        try:
            rendered = render_chat(self._tokenizer, body, messages, self._default_kwargs)
        except ChatTemplateError as error:  # the template takes the whole conversation, but not its beginning
            if not self._warned:
                self._warned = True
                log.warning("snapshots are not taken where system prompts and tools end: %s", error)
            return set()
        before, ends = "", set[int]()
        for piece in rendered.split(mark)[:-1]:
            before += piece
            shared = _num_common(before, text)
            if len(before) - shared < _MOST_CHANGED:
                ends.add(shared)
        return ends - {0}


def _parts(message: ChatMessage) -> Sequence[ContentPart]:
    return message.content if isinstance(message.content, list) else ()


def _marked(message: ChatMessage, mark: str) -> ChatMessage:
    """Return a message with a mark at each of its breakpoints."""
    parts = _parts(message)
    if not any(part.prompt_cache_breakpoint for part in parts):
        return message
    content = [ContentPart("text", part.text + mark * (part.prompt_cache_breakpoint is not None)) for part in parts]
    return structs.replace(message, content=content)


def _num_common(first: str, second: str) -> int:
    """Return how many first characters two texts have in common."""
    low, high = 0, len(first)
    while low < high:
        middle = (low + high + 1) // 2
        if second.startswith(first[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low

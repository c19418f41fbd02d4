"""The parts of a prompt that a request marks as segments: the checks of its fields, and the pieces of its text.

A segment has to have the same tokens at every position, so a prompt with segments is tokenized piece by piece: the text
before a segment, the segment, and the text behind it.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec import structs
from pagewise_shared.segments import MAX_SEGMENTS

from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.schema import ChatMessage, ChatRequest, CompletionRequest, Segments

_PLACEHOLDER = re.compile("(\ue000[0-9a-f]{24}\ue001)")
"""The name that replaces a marked part while the chat template is rendered."""


class Piece(NamedTuple):
    """A part of a prompt's text, which may be a segment, or the root of all segments."""

    text: str
    kind: Literal["", "segment", "root"] = ""


def check_segments(body: CompletionRequest | ChatRequest, prompts: Sequence[str | list[int]] = ("",)) -> None:
    """Check that the fields of a request can be used with its segments. ``prompts``: of a completion.

    Raises:
        InvalidRequestError: they cannot.
    """
    marked = _num_marked(body.messages) if isinstance(body, ChatRequest) else 0
    if body.segments is None and not marked:
        return
    if marked > MAX_SEGMENTS:
        raise InvalidRequestError(f"{marked} marked parts are too many: at most {MAX_SEGMENTS}", "messages")
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequestError("segments and truncate_prompt_tokens cannot be used together", "segments")
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        raise InvalidRequestError(
            "segments: there are no log-probabilities of a prompt (echo) whose segments are not computed", "segments"
        )
    _check_names(body.segments or Segments(), marked, prompts)


def _check_names(asked: Segments, marked: int, prompts: Sequence[str | list[int]]) -> None:
    named = {"texts": asked.texts is not None, "ranges": asked.ranges is not None, "marks": marked > 0}
    ways = [way for way, used in named.items() if used]
    if len(ways) != 1:
        raise InvalidRequestError(
            "segments: name them by texts, by ranges, or by marked parts of messages, in one of these ways", "segments"
        )
    kind, root = {"texts": (str, str), "ranges": (list, int), "marks": (str, bool)}[ways[0]]
    if len(prompts) != 1 or not isinstance(prompts[0], kind):
        of = "of token ids" if kind is list else "that is a text"
        raise InvalidRequestError(f"segments.{ways[0]} are of one prompt {of}", "segments")
    if type(asked.root) not in (root, bool, type(None)):
        raise InvalidRequestError("segments.root is a text with texts, and a number of tokens with ranges", "segments")


def _num_marked(messages: Sequence[ChatMessage]) -> int:
    parts = (message.content for message in messages if isinstance(message.content, list))
    return sum(bool(part.segment) for content in parts for part in content)


def mark_parts(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], dict[str, str]]:
    """Replace each part of messages that is marked as a segment by a placeholder, for the chat template.

    Returns the messages, and the texts by their placeholders. No text contains these, because they are random.
    """
    texts: dict[str, str] = {}
    marked = []
    for message in messages:
        if isinstance(message.content, list) and any(part.segment for part in message.content):
            parts = []
            for part in message.content:
                if part.segment:
                    texts[name := f"\ue000{secrets.token_hex(12)}\ue001"] = part.text
                    part = structs.replace(part, text=name)
                parts.append(part)
            message = structs.replace(message, content=parts)
        marked.append(message)
    return marked, texts


def unmark(rendered: str, texts: dict[str, str]) -> list[Piece]:
    """Cut a rendered conversation at the placeholders of ``mark_parts``, and put back the texts.

    Raises:
        InvalidRequestError: the chat template leaves a part out, or repeats it.
    """
    between = _PLACEHOLDER.split(rendered)
    if between[1::2] != list(texts):
        raise InvalidRequestError("the chat template leaves out, repeats or reorders a marked part", "messages")
    kinds: tuple[Literal["", "segment"], ...] = ("", "segment")
    return [Piece(texts.get(part, part), kinds[number % 2]) for number, part in enumerate(between)]


def cut_at_segments(text: str, segments: Segments | None) -> list[Piece]:
    """Cut a prompt at its segments, which it contains in this order, and behind its root, if that is a text."""
    pieces, at = [], 0
    if segments is not None and isinstance(segments.root, str):
        if not text.startswith(segments.root):
            raise InvalidRequestError("segments.root is not how the prompt begins", "segments")
        pieces.append(Piece(segments.root, "root"))
        at = len(segments.root)
    for number, segment in enumerate((segments and segments.texts) or ()):
        found = text.find(segment, at)
        if found < 0:
            raise InvalidRequestError(
                f"segments.texts[{number}] is not in the prompt, behind the one before it", "segments"
            )
        pieces += [Piece(text[at:found]), Piece(segment, "segment")]
        at = found + len(segment)
    return [*pieces, Piece(text[at:])]

"""Segments that a request declares: where they are in its text, and in its tokens.

A segment has to have the same tokens wherever it stands, so a prompt with segments is tokenized piece by piece: what is
before a segment, the segment, and what follows it.
"""

import secrets
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pagewise_shared.protocol import PromptSegments, pack_int32s
from pagewise_shared.segments import make_segments

from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.schema import ChatMessage, ChatRequest, CompletionRequest, GenerationFields
from pagewise_gateway.text.tokenizer import Tokenizer

Range = tuple[int, int]
"""The first token of a segment, and the first one behind it."""


class Piece(NamedTuple):
    """A part of a prompt's text."""

    text: str
    is_segment: bool


def check_segments(body: CompletionRequest | ChatRequest, num_prompts: int = 1) -> None:
    """Check what a request with segments may not ask for besides.

    Raises:
        InvalidRequestError: it does.
    """
    asked = body.segments
    marked = isinstance(body, ChatRequest) and any(map(_is_marked, body.messages))
    if asked is None and not marked:
        return
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequestError("segments and truncate_prompt_tokens cannot be used together", "segments")
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        raise InvalidRequestError(
            "segments: there are no log-probabilities of a prompt (echo) whose segments are not computed", "segments"
        )
    texts, ranges = (asked.texts, asked.ranges) if asked is not None else (None, None)
    if sum((texts is not None, ranges is not None, marked)) != 1:
        raise InvalidRequestError(
            "segments: name them by texts, by ranges, or by marked parts of messages, in one of these ways", "segments"
        )
    if ranges is not None and (isinstance(body, ChatRequest) or num_prompts > 1 or isinstance(body.prompt, str)):
        raise InvalidRequestError("segments.ranges are of one prompt of token ids", "segments")
    if texts is not None and isinstance(body, CompletionRequest) and not isinstance(body.prompt, str):
        raise InvalidRequestError("segments.texts are of one prompt that is a text", "segments")


def mark_parts(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], dict[str, str]]:
    """Put a name into the place of each marked part of some messages, for the chat template to carry it along.

    Returns the messages, and the texts by these names, which no text has: they are drawn at random.
    """
    texts: dict[str, str] = {}
    marked = []
    for message in messages:
        if _is_marked(message) and not isinstance(message.content, str):
            parts = []
            for part in message.content:
                if part.segment:
                    texts[name := f"\ue000{secrets.token_hex(12)}\ue001"] = part.text
                    part = type(part)("text", name)
                parts.append(part)
            message = type(message)(message.role, parts, message.name)
        marked.append(message)
    return marked, texts


def unmark(rendered: str, texts: dict[str, str]) -> list[Piece]:
    """Cut a rendered conversation at the names that ``mark_parts`` has put in, and put back the texts.

    Raises:
        InvalidRequestError: the chat template leaves a part out, or repeats it.
    """
    pieces = []
    for name, text in texts.items():
        before, found, rendered = rendered.partition(name)
        if not found or name in rendered:
            raise InvalidRequestError("the chat template leaves out, repeats or reorders a marked part", "messages")
        pieces += [Piece(before, False), Piece(text, True)]
    return [*pieces, Piece(rendered, False)]


def cut(text: str, segments: Sequence[str]) -> list[Piece]:
    """Cut a prompt at its segments, which are in it in this order.

    Raises:
        InvalidRequestError: one of them is not.
    """
    pieces, at = [], 0
    for number, segment in enumerate(segments):
        found = text.find(segment, at)
        if found < 0:
            raise InvalidRequestError(
                f"segments.texts[{number}] is not in the prompt, behind the one before it", "segments"
            )
        pieces += [Piece(text[at:found], False), Piece(segment, True)]
        at = found + len(segment)
    return [*pieces, Piece(text[at:], False)]


def encode_pieces(
    tokenizer: Tokenizer, pieces: Sequence[Piece], add_special_tokens: bool
) -> tuple["array[int]", list[Range]]:
    """Return the token ids (int32) of a prompt, and where its segments are in them."""
    tokens, ranges = array("i"), []
    for number, piece in enumerate(pieces):
        own = tokenizer.encode(piece.text, add_special_tokens and not number) if piece.text or not number else []
        if piece.is_segment:
            ranges.append((len(tokens), len(tokens) + len(own)))
        tokens.extend(own)
    return tokens, ranges


def prompt_segments(body: GenerationFields, num_tokens: int, ranges: Sequence[Range]) -> PromptSegments | None:
    """Return what is submitted of the segments of a prompt of ``num_tokens`` tokens; None if it has none.

    Raises:
        InvalidRequestError: they overlap, are empty or outside the prompt, too many, or nothing follows them.
    """
    if not ranges:
        return None
    asked = body.segments
    root = asked is None or asked.root is not False
    boundary = 0 if asked is None else asked.boundary or 0
    try:
        make_segments(num_tokens, ranges, root=root, boundary=boundary)
    except ValueError as error:
        raise InvalidRequestError(f"segments: {error}", "segments") from error
    return PromptSegments(pack_int32s([index for one in ranges for index in one]), root, boundary)


def _is_marked(message: ChatMessage) -> bool:
    return not isinstance(message.content, str) and any(part.segment for part in message.content)

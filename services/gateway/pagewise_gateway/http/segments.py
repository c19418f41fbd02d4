"""Segments that a request declares: where they are in its text, and in its tokens.

A segment has to have the same tokens wherever it stands, so a prompt with segments is tokenized piece by piece: what is
before a segment, the segment, and what follows it.
"""

import re
import secrets
from array import array
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec import structs
from pagewise_shared.protocol import PromptSegments, pack_int32s
from pagewise_shared.segments import ALL_BEFORE, MAX_SEGMENTS, make_segments

from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.schema import ChatMessage, ChatRequest, CompletionRequest, GenerationFields, Segments
from pagewise_gateway.text.tokenizer import Tokenizer

_NAME = re.compile("(\ue000[0-9a-f]{24}\ue001)")
"""What stands for a marked part while the chat template is rendered."""


class Piece(NamedTuple):
    """A part of a prompt's text, which may be a segment, or the root of all segments."""

    text: str
    kind: Literal["", "segment", "root"] = ""


class Encoded(NamedTuple):
    """A prompt: its token ids (int32), and of its segments the first token and the first one behind each.

    ``root``: how many first tokens the segments attend to. ``text``: of a conversation, the end of its text, or all of
    it.
    """

    tokens: "array[int]"
    ranges: list[tuple[int, int]]
    root: int = ALL_BEFORE
    text: str = ""


def check_segments(body: CompletionRequest | ChatRequest, prompts: Sequence[str | list[int]] = ()) -> None:
    """Check what a request with segments may not ask for besides. ``prompts``: of a completion.

    Raises:
        InvalidRequestError: it does.
    """
    asked = body.segments
    marked = num_marked(body.messages) if isinstance(body, ChatRequest) else 0
    if asked is None and not marked:
        return
    if marked > MAX_SEGMENTS:
        raise InvalidRequestError(f"{marked} marked parts are too many: at most {MAX_SEGMENTS}", "messages")
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequestError("segments and truncate_prompt_tokens cannot be used together", "segments")
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        raise InvalidRequestError(
            "segments: there are no log-probabilities of a prompt (echo) whose segments are not computed", "segments"
        )
    texts, ranges = (asked.texts, asked.ranges) if asked is not None else (None, None)
    if sum((texts is not None, ranges is not None, marked > 0)) != 1:
        raise InvalidRequestError(
            "segments: name them by texts, by ranges, or by marked parts of messages, in one of these ways", "segments"
        )
    given = prompts[0] if len(prompts) == 1 else None
    if ranges is not None and not isinstance(given, list):
        raise InvalidRequestError("segments.ranges are of one prompt of token ids", "segments")
    root = asked.root if asked is not None else None
    if (isinstance(root, str) and texts is None) or (type(root) is int and ranges is None):
        raise InvalidRequestError("segments.root is a text with texts, and a number of tokens with ranges", "segments")
    if texts is not None and isinstance(body, CompletionRequest) and not isinstance(given, str):
        raise InvalidRequestError("segments.texts are of one prompt that is a text", "segments")


def mark_parts(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], dict[str, str]]:
    """Put a name into the place of each marked part of some messages, for the chat template to carry it along.

    Returns the messages, and the texts by these names, which no text has: they are drawn at random.
    """
    texts: dict[str, str] = {}
    marked = []
    for message in messages:
        if isinstance(message.content, list) and any(part.segment for part in message.content):
            parts = []
            for part in message.content:
                if part.segment:
                    texts[name := f"\ue000{secrets.token_hex(12)}\ue001"] = part.text
                    part = type(part)("text", name)
                parts.append(part)
            message = structs.replace(message, content=parts)
        marked.append(message)
    return marked, texts


def unmark(rendered: str, texts: dict[str, str]) -> list[Piece]:
    """Cut a rendered conversation at the names that ``mark_parts`` has put in, and put back the texts.

    Raises:
        InvalidRequestError: the chat template leaves a part out, or repeats it.
    """
    between = _NAME.split(rendered)
    if between[1::2] != list(texts):
        raise InvalidRequestError("the chat template leaves out, repeats or reorders a marked part", "messages")
    kinds: tuple[Literal["", "segment"], ...] = ("", "segment")
    return [Piece(texts.get(part, part), kinds[number % 2]) for number, part in enumerate(between)]


def cut(text: str, segments: Segments | None) -> list[Piece]:
    """Cut a prompt at its segments, which are in it in this order, and behind its root, if that is given as a text.

    Raises:
        InvalidRequestError: one of them is not.
    """
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


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[Piece], add_special_tokens: bool) -> Encoded:
    """Return the token ids of a prompt, and where its segments are in them."""
    tokens, ranges, root = array("i"), [], ALL_BEFORE
    for number, piece in enumerate(pieces):
        start = len(tokens)
        if piece.text or not number:
            tokens.extend(tokenizer.encode(piece.text, add_special_tokens and not number))
        if piece.kind == "segment":
            ranges.append((start, len(tokens)))
        elif piece.kind == "root":
            root = len(tokens)
    return Encoded(tokens, ranges, root)


def prompt_segments(body: GenerationFields, prompt: Encoded) -> PromptSegments | None:
    """Return what is submitted of the segments of a prompt; None if it has none.

    Raises:
        InvalidRequestError: they overlap, are empty or outside the prompt, too many, or nothing follows them.
    """
    if not prompt.ranges:
        return None
    asked, root = body.segments, prompt.root
    boundary = 0 if asked is None else asked.boundary or 0
    if asked is not None and isinstance(asked.root, int) and asked.root is not True:
        root = int(asked.root)  # False: none
    try:
        make_segments(len(prompt.tokens), prompt.ranges, root=root, boundary=boundary)
    except ValueError as error:
        raise InvalidRequestError(f"segments: {error}", "segments") from error
    return PromptSegments(pack_int32s([index for one in prompt.ranges for index in one]), root, boundary)


def num_marked(messages: Sequence[ChatMessage]) -> int:
    """Return how many parts of some messages are marked as segments."""
    parts = (message.content for message in messages if isinstance(message.content, list))
    return sum(bool(part.segment) for content in parts for part in content)

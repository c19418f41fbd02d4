"""``pagewise segments``: reads a trace of requests, and reports how many tokens declaring segments would save.

These are the tokens that prompts repeat outside of prefixes. The report lists the most frequent texts among them.
"""

import argparse
import gzip
import json
import sys
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from pagewise_shared.errors import ModelError
from pagewise_shared.model_files import resolve_model

from pagewise_gateway.http.conversation import check_chat, render_chat
from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.parsing import parse_request
from pagewise_gateway.http.prompts import check_prompts
from pagewise_gateway.http.schema import ChatRequest, CompletionRequest, TokenId
from pagewise_gateway.repeats import WINDOW, RepeatFinder, Repeats
from pagewise_gateway.text.template import ChatTemplateError
from pagewise_gateway.text.tokenizer import Tokenizer

_BEGINNING = 24
"""Tokens of a segment that are shown."""
_RATIO = 2
_FORMATS = (
    'A trace has JSON lines: request bodies of OpenAI\'s API, alone or as "body" in a line of its batches, or lists of '
    "token ids"
)
_token_ids = msgspec.json.Decoder(list[TokenId])


class TraceError(Exception):
    """A trace cannot be read, or holds no prompts; the text names the line and the reason."""


class TracePrompt(NamedTuple):
    """A prompt. ``line``: from 1. ``number``: its index in the request. ``tokens``: int32. ``salt``: its cache salt."""

    line: int
    number: int
    tokens: "array[int]"
    salt: str | None


class Refused(NamedTuple):
    """A request that a gateway would refuse, which is left out. ``line``: from 1."""

    line: int
    reason: str


def read_trace(path: Path, tokenizer: Tokenizer | None, limit: int | None = None) -> Iterator[TracePrompt | Refused]:
    """Yield the prompts of the first ``limit`` requests of a trace, in order.

    ``tokenizer``: of the model; without one, prompts have to be token ids.

    Raises:
        TraceError: it cannot be read, a prompt is text and there is no tokenizer, or it is a trace without tokens.
    """
    num_requests = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if num_requests == limit:
                    return
                if not line.strip():
                    continue
                num_requests += 1
                try:
                    yield from _prompts(f"{path}: line {number}", number, line, tokenizer)
                except (InvalidRequestError, ChatTemplateError) as error:
                    yield Refused(number, str(error))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: {type(error).__name__}: {error}") from error


def _open(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _prompts(where: str, number: int, line: bytes, tokenizer: Tokenizer | None) -> Iterator[TracePrompt]:
    if line.lstrip().startswith(b"["):
        try:
            yield TracePrompt(number, 0, array("i", _token_ids.decode(line)), None)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(f"{where} is no list of token ids: {error}") from error
        return
    body = _body(where, line)
    request: CompletionRequest | ChatRequest
    prompts: Sequence[str | list[int]]
    if "messages" in body:
        request = parse_request(bytearray(msgspec.json.encode(body)), ChatRequest)
        check_chat(request)
        special = bool(request.add_special_tokens)
        prompts = [render_chat(_needed(where, tokenizer), request, request.messages)]
    else:
        request = parse_request(bytearray(msgspec.json.encode(body)), CompletionRequest)
        special, prompts = request.add_special_tokens is not False, check_prompts(request)
    keep = request.truncate_prompt_tokens
    if keep is not None and keep < 1:
        raise InvalidRequestError(f"truncate_prompt_tokens {keep} depends on the context length, which is not known")
    for index, prompt in enumerate(prompts):
        ids = _needed(where, tokenizer).encode(prompt, special) if isinstance(prompt, str) else prompt
        yield TracePrompt(number, index, array("i", ids)[-(keep or len(ids)) :], request.cache_salt)


def _body(where: str, line: bytes) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{where} is not JSON: {error}. {_FORMATS}") from error
    body = record.get("body", record) if isinstance(record, dict) else None
    if not isinstance(body, dict):
        raise TraceError(f"{where} is no request. {_FORMATS}")
    if "messages" not in body and "prompt" not in body:
        raise TraceError(f'{where} has neither "prompt" nor "messages". {_FORMATS}')
    return body


def _needed(where: str, tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise TraceError(f"{where} holds text: name the model whose tokenizer makes tokens of it with --model")
    return tokenizer


class Segment(NamedTuple):
    """A text that prompts repeat behind different prefixes.

    Fields:
        prompt, offset: index of the first prompt that contains it, and its offset there, in tokens.
        num_tokens: its length; up to ``WINDOW`` - 1 tokens at either end are left out.
        times: how many later prompts contain it outside of prefixes; the median of its windows.
    """

    prompt: int
    offset: int
    num_tokens: int
    times: int


class SegmentCounts:
    """The first location of each window that a ``RepeatFinder`` remembers, and how many prompts repeat it: 12 bytes."""

    def __init__(self, num_slots: int) -> None:
        """``num_slots``: of the finder."""
        self._prompt, self._offset, self._times = (np.zeros(num_slots, np.int32) for _ in range(3))

    def count(self, prompt: int, repeats: Repeats) -> None:
        """Add the result of the prompt with the index ``prompt``."""
        self._prompt[repeats.added_slots] = prompt
        self._offset[repeats.added_slots] = repeats.added
        self._times[repeats.added_slots] = 0
        self._times[np.unique(repeats.found_slots)] += 1  # once, even if the prompt contains the text several times

    def segments(self, most: int) -> list[Segment]:
        """Return the segments whose repetitions have the most tokens, at most ``most`` of them.

        A segment consists of windows without a gap between them in the first prompt that contains them. It ends where
        the next window was found more than twice, or less than half, as often. A text that repeats some of its own
        sentences is listed in parts, because only the first one of equal windows has a location. Segments of fewer than
        two windows are left out: they are ends of longer segments, whose samples differ with the texts around them.
        """
        slots = np.flatnonzero(self._times)
        if not len(slots):
            return []
        slots = slots[np.lexsort((self._offset[slots], self._prompt[slots]))]
        prompt, offset, times = (one[slots] for one in (self._prompt, self._offset, self._times))
        rarer, oftener = np.minimum(times[1:], times[:-1]), np.maximum(times[1:], times[:-1])
        apart = (np.diff(prompt) != 0) | (np.diff(offset) > WINDOW) | (oftener > _RATIO * rarer)
        starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
        ends = np.append(starts[1:], len(slots))
        lengths = offset[ends - 1] + WINDOW - offset[starts]
        found = [
            Segment(int(prompt[start]), int(offset[start]), int(length), int(np.median(times[start:end])))
            for start, end, length in zip(starts, ends, lengths, strict=True)
            if length >= 2 * WINDOW
        ]
        return sorted(found, key=lambda one: (-one.num_tokens * one.times, one.prompt, one.offset))[:most]


def report_on(path: Path, tokenizer: Tokenizer | None, options: argparse.Namespace) -> dict[str, Any]:
    """Return the report on a trace, whose prompts are kept in memory.

    Raises:
        TraceError: it cannot be read, holds no request, or none that a gateway would take.
    """
    began = time.perf_counter()
    num_slots = 1 << max(2, (options.remember - 1).bit_length())
    finder, counts = RepeatFinder(num_slots), SegmentCounts(num_slots)
    prompts: list[TracePrompt] = []
    refused: list[Refused] = []
    prefix = repeated = 0
    for one in read_trace(path, tokenizer, options.limit):
        if isinstance(one, Refused):
            refused.append(one)
            continue
        repeats = finder.examine(one.tokens, one.salt)
        counts.count(len(prompts), repeats)
        prompts.append(one)
        prefix, repeated = prefix + repeats.prefix, repeated + repeats.repeated
    first_refused = f"line {refused[0].line}: {refused[0].reason}" if refused else ""
    if not prompts:
        why = f"a gateway would refuse all of them: {first_refused}" if refused else "it holds no requests"
        raise TraceError(f"{path}: {why}")
    tokens = sum(len(one.tokens) for one in prompts)
    parts = {
        "reached_by_prefixes": prefix,
        "repeated_beyond_prefixes": repeated,
        "new": tokens - prefix - repeated,
    }
    return {
        "trace": path.name,
        "settings": {"model": options.model, "remember": num_slots},
        "requests": len({one.line for one in prompts}),
        "prompts": len(prompts),
        "tokens": {"all": tokens} | parts,
        "shares": {name: round(number / max(1, tokens), 4) for name, number in parts.items()},
        "segments": [_described(one, prompts[one.prompt], tokenizer) for one in counts.segments(options.top)],
        "refused": {"requests": len(refused), "first": first_refused},
        "forgotten": finder.seen.forgotten,
        "examined_in_seconds": round(time.perf_counter() - began, 1),
    }


def _described(segment: Segment, first: TracePrompt, tokenizer: Tokenizer | None) -> dict[str, Any]:
    beginning = first.tokens[segment.offset : segment.offset + min(_BEGINNING, segment.num_tokens)]
    return {
        "tokens": segment.num_tokens,
        "repeated": segment.times,
        "first": {"line": first.line, "prompt": first.number, "token": segment.offset},
        "begins": list(beginning) if tokenizer is None else tokenizer.decode(beginning, False),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the process's exit code."""
    options = _parser().parse_args(argv)
    try:
        tokenizer = None
        if options.model is not None:
            tokenizer = Tokenizer.load(resolve_model(options.model, options.revision, tokenizer_only=True))
        report = report_on(options.trace, tokenizer, options)
    except (TraceError, ModelError) as error:
        print(f"pagewise segments: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1, ensure_ascii=False))
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewise segments",
        description="Say how much of the prompts of a trace earlier prompts contain: as prefixes, which are reused in "
        "any case, and behind other prefixes, which is reused only if requests declare segments. Prints JSON.",
    )
    parser.add_argument(
        "trace",
        type=Path,
        help="JSON lines of OpenAI's request bodies (alone, or as body of OpenAI's batches), or of lists of token ids; "
        ".gz too",
    )
    parser.add_argument("--model", metavar="MODEL", help="whose tokenizer and chat template make tokens of texts")
    parser.add_argument("--revision", metavar="REV", help="hub revision of the model")
    parser.add_argument("--limit", type=_count, metavar="N", help="first N requests only")
    parser.add_argument("--top", type=_count, default=10, metavar="N", help="segments to list (default: 10)")
    parser.add_argument(
        "--remember",
        type=_count,
        default=1 << 23,
        metavar="N",
        help="hashes to remember, 20 bytes each; 16 tokens of new text have about three (default: 8388608)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

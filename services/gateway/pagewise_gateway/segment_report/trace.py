"""Reads the prompts of a trace: JSON lines of OpenAI's request bodies, or of token ids, plain or gzipped."""

import gzip
import zlib
from array import array
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.parsing import parse_request
from pagewise_gateway.http.prompts import check_chat, check_prompts, render_chat
from pagewise_gateway.http.schema import ChatRequest, CompletionRequest, TokenId
from pagewise_gateway.text.errors import ChatTemplateError
from pagewise_gateway.text.tokenizer import Tokenizer

_FORMATS = (
    'What is read are JSON lines of request bodies of OpenAI\'s API, alone or as "body" in a line of its batches, or '
    "of lists of token ids"
)
_CHAINED = (
    "it holds hashes of blocks, and each covers all blocks before it. Equal hashes are equal prefixes: a text that is "
    "repeated behind another prefix has other hashes, so this trace cannot tell"
)
_LENGTHS = "it holds how long prompts are and nothing of their text"
_KINDS_OF_CSV = {b"ContextTokens": "an Azure trace", b"num_prefill_tokens": "a ShareGPT trace"}
_token_ids = msgspec.json.Decoder(list[TokenId])


class TraceError(Exception):
    """A trace cannot be read, or cannot answer the question; the text says which line and why."""


class TracePrompt(NamedTuple):
    """A prompt. ``line``: from 1. ``number``: of it in its request. ``tokens``: int32. ``salt``: its cache salt."""

    line: int
    number: int
    tokens: "array[int]"
    salt: str | None


class Refused(NamedTuple):
    """A request that a gateway would refuse, which is left out. ``line``: from 1."""

    line: int
    reason: str


def read_trace(
    path: Path, tokenizer: Tokenizer | None, *, limit: int | None = None, lines: Set[int] = frozenset()
) -> Iterator[TracePrompt | Refused]:
    """Yield the prompts of the first ``limit`` requests of a trace, in order.

    ``tokenizer``: of the model; without one, prompts have to be token ids. ``lines``: of no others than these lines.

    Raises:
        TraceError: it cannot be read, a prompt is text and there is no tokenizer, or it is a trace without tokens.
    """
    num_requests = 0
    last = max(lines, default=None)
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if num_requests == limit or (last is not None and number > last):
                    return
                if not line.strip() or (lines and number not in lines):
                    continue
                num_requests += 1
                try:
                    yield from _prompts(path, number, line, tokenizer)
                except (InvalidRequestError, ChatTemplateError) as error:
                    yield Refused(number, str(error))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: {type(error).__name__}: {error}") from error


def _open(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _prompts(path: Path, number: int, line: bytes, tokenizer: Tokenizer | None) -> Iterator[TracePrompt]:
    """Yield the prompts of one line.

    Raises:
        TraceError: the line is no request, or there is no tokenizer for its text.
        InvalidRequestError, ChatTemplateError: a gateway would refuse the request.
    """
    where = f"{path}: line {number}"
    if line.lstrip().startswith(b"["):
        try:
            ids = _token_ids.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(f"{where} is no list of token ids: {error}") from error
        yield TracePrompt(number, 0, array("i", ids), None)
        return
    body = _body(path, where, line)
    if "messages" in body:
        yield _conversation(where, number, body, tokenizer)
        return
    request = parse_request(bytearray(msgspec.json.encode(body)), CompletionRequest)
    for index, prompt in enumerate(check_prompts(request)):
        if not isinstance(prompt, str):
            tokens = array("i", prompt)
        else:
            known = _tokenizer(where, tokenizer)
            tokens = array("i", known.encode(prompt, request.add_special_tokens is not False))
        yield TracePrompt(number, index, _truncated(tokens, request), request.cache_salt)


def _conversation(where: str, number: int, body: dict[str, Any], tokenizer: Tokenizer | None) -> TracePrompt:
    known = _tokenizer(where, tokenizer)
    request = parse_request(bytearray(msgspec.json.encode(body)), ChatRequest)
    check_chat(request)
    tokens = array("i", known.encode(render_chat(known, request), bool(request.add_special_tokens)))
    return TracePrompt(number, 0, _truncated(tokens, request), request.cache_salt)


def _body(path: Path, where: str, line: bytes) -> dict[str, Any]:
    """Return the request body in a line.

    Raises:
        TraceError: there is none; the error says why if the trace is of a kind that is known.
    """
    try:
        record = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        for column, kind in _KINDS_OF_CSV.items():
            if column in line.strip().split(b","):
                raise TraceError(f"{path} is {kind}: {_LENGTHS}. {_FORMATS}") from None
        raise TraceError(f"{where} is not JSON: {error}. {_FORMATS}") from error
    body = record.get("body", record) if isinstance(record, dict) else None
    if not isinstance(body, dict):
        raise TraceError(f"{where} is no request. {_FORMATS}")
    if "hash_ids" in body:
        raise TraceError(f"{path} is a Mooncake trace: {_CHAINED}. {_FORMATS}")
    if "hash_id_scope" in body:
        raise TraceError(f"{path} is a trace of agents' sessions: {_CHAINED}. {_FORMATS}")
    if "messages" not in body and "prompt" not in body:
        raise TraceError(f'{where} has neither "prompt" nor "messages". {_FORMATS}')
    return body


def _tokenizer(where: str, tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise TraceError(f"{where} holds text: name the model whose tokenizer makes tokens of it with --model")
    return tokenizer


def _truncated(tokens: "array[int]", request: CompletionRequest | ChatRequest) -> "array[int]":
    keep = request.truncate_prompt_tokens
    if keep is not None and keep < 1:
        raise InvalidRequestError(f"truncate_prompt_tokens {keep} depends on the context length, which is not known")
    return tokens if keep is None else tokens[-keep:]

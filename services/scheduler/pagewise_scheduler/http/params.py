"""From a request body to what the engine runs: defaults, limits, and errors that name the field."""

import math
import re
import secrets
from array import array
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from pagewise_shared.sampling import SamplingParams

from pagewise_scheduler.generation import Capacity
from pagewise_scheduler.http.errors import InvalidRequest, ModelNotFound, Unsupported
from pagewise_scheduler.http.schema import ChatMessage, GenerationFields, decode
from pagewise_scheduler.text.tokenizer import Tokenizer

BodyT = TypeVar("BodyT")

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.+?)`")
_AT_PATH = re.compile(r" - at `\$\.?(.*?)`$")


@dataclass(slots=True, frozen=True)
class Limits:
    """What this service allows beyond the model's own limits."""

    model_name: str
    max_n: int


async def read_body(request: web.Request, kind: type[BodyT]) -> BodyT:
    """The request's JSON body as ``kind``.

    Raises:
        InvalidRequest: it is not valid; the text and param name where.
    """
    raw = await request.read()
    try:
        body: BodyT = decode(kind, raw)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    return body


def _invalid(text: str) -> InvalidRequest:
    path = _AT_PATH.search(text)
    param = path[1] if path else None
    if (unknown := _UNKNOWN_FIELD.search(text)) is not None:
        name = f"{param}.{unknown[1]}" if param else unknown[1]
        return Unsupported(f"{name} is not supported", param=name)
    return InvalidRequest(_AT_PATH.sub("", text) + (f": {param}" if param else ""), param=param)


def check_model(name: str | None, limits: Limits) -> None:
    """Refuse another model's name.

    Raises:
        ModelNotFound: it is not the one that is served.
    """
    if name is not None and name != limits.model_name:
        raise ModelNotFound(f"the model {name!r} does not exist here; {limits.model_name!r} does", param="model")


def sampling_params(
    body: GenerationFields,
    tokenizer: Tokenizer,
    capacity: Capacity,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Sampling parameters of a request, defaults filled in, everything checked against the vocabulary.

    Raises:
        InvalidRequest: a value makes no sense; ``param`` names it.
    """
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(body, name)
        if value is not None and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number", param=name)
    if body.response_format is not None and body.response_format.type != "text":
        raise Unsupported(
            f"response_format {body.response_format.type!r} is not supported: only text", param="response_format"
        )
    stop_ids = _token_ids("stop_token_ids", body.stop_token_ids, capacity)
    if not body.ignore_eos:
        stop_ids = tuple(sorted({*stop_ids, *tokenizer.eos_token_ids}))
    allowed = _token_ids("allowed_token_ids", body.allowed_token_ids, capacity)
    if body.allowed_token_ids is not None and not allowed:
        raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=stop_ids,
        logit_bias=_logit_bias(body.logit_bias or {}, capacity),
        allowed_token_ids=allowed,
        bad_words=_bad_words(body.bad_words or [], tokenizer),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def output_budget(
    wanted: int | None, default: int | None, num_prompt_tokens: int, body: GenerationFields, capacity: Capacity
) -> int:
    """Output tokens a sequence may have; ``default`` None is what the model's length leaves.

    Raises:
        InvalidRequest: prompt and output do not fit.
    """
    left = capacity.max_model_len - num_prompt_tokens
    if left < 1 and not (wanted == 0 and left == 0):
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens; the most this model takes is {capacity.max_model_len}, "
            "with at least one left for the output",
            param="prompt",
            code="context_length_exceeded",
        )
    budget = wanted if wanted is not None else min(left, default if default is not None else left)
    if budget > left:
        raise InvalidRequest(
            f"max_tokens {budget} is too large: the prompt has {num_prompt_tokens} tokens and the most this model "
            f"takes is {capacity.max_model_len} in all",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if (body.min_tokens or 0) > budget:
        raise InvalidRequest(f"min_tokens {body.min_tokens} is over max_tokens {budget}", param="min_tokens")
    return budget


def truncated(tokens: "array[int]", body: GenerationFields, capacity: Capacity) -> "array[int]":
    """The prompt's last ``truncate_prompt_tokens`` tokens (-1: what the model's length allows beside one more)."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tokens
    if keep == -1:
        keep = capacity.max_model_len - (body.max_tokens or 1)
    if keep < 1:
        raise InvalidRequest("truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens")
    return tokens[-keep:]


def stop_texts(body: GenerationFields) -> tuple[str, ...]:
    """The stop strings, as a tuple."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def sequence_count(body: GenerationFields, limits: Limits) -> int:
    """n, checked.

    Raises:
        InvalidRequest: it is over the limit.
    """
    n = body.n or 1
    if n > limits.max_n:
        raise InvalidRequest(f"n is {n}, the most this server allows is {limits.max_n}", param="n")
    return n


def message_fields(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: content as one string.

    Raises:
        InvalidRequest, Unsupported: a part is not text.
    """
    plain = []
    for number, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            for part in content:
                if part.type != "text" or part.text is None:
                    raise Unsupported(
                        f"content of type {part.type!r} is not supported: only text",
                        param=f"messages[{number}].content",
                    )
            content = "".join(part.text or "" for part in content)
        if content is None:
            raise InvalidRequest("a message needs content", param=f"messages[{number}].content")
        fields = {"role": message.role, "content": content}
        plain.append(fields | ({"name": message.name} if message.name is not None else {}))
    return plain


def _token_ids(name: str, ids: list[int] | None, capacity: Capacity) -> tuple[int, ...]:
    for token in ids or ():
        if token >= capacity.vocab_size:
            raise InvalidRequest(
                f"{name}: token {token} is outside the vocabulary of {capacity.vocab_size}", param=name
            )
    return tuple(ids or ())


def _logit_bias(bias: dict[str, float], capacity: Capacity) -> dict[int, float]:
    result = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or int(key) >= capacity.vocab_size:
            raise InvalidRequest(f"logit_bias: {key!r} is no token id below {capacity.vocab_size}", param="logit_bias")
        result[int(key)] = value
    return result


def _bad_words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, as it stands and as it reads behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for form in (word.lstrip(), " " + word.lstrip()):
            tokens = tuple(tokenizer.encode(form, add_special_tokens=False))
            if tokens:
                found[tokens] = None
    return tuple(found)

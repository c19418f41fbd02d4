"""Turns the fields of a body into sampling parameters and budgets: defaults, limits, errors that name the field."""

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagewise_shared.config.sampling_defaults import SamplingDefaults
from pagewise_shared.protocol import Adapter
from pagewise_shared.sampling import BeamParams, SamplingParams, TokenConstraints, token_constraints
from pagewise_shared.thinking import ThinkingBudget

from pagewise_gateway.generation import Capacity
from pagewise_gateway.http.credentials import Client
from pagewise_gateway.http.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
)
from pagewise_gateway.http.schema import ChatRequest, CompletionRequest, GenerationFields
from pagewise_gateway.scheduler_client import AdapterTable
from pagewise_gateway.text.tokenizer import Tokenizer

MAX_SEQUENCES = 4096
"""The maximum number of sequences of one request, over all its prompts."""
MAX_CANDIDATES = 512
"""The maximum number of continuations of one hypothesis of a beam search that an executor reports for every token."""
_GREEDY_BELOW = 1e-5
"""Lower temperatures are treated as greedy, because dividing by them would overflow."""
_AS_GIVEN = ("presence_penalty", "frequency_penalty", "min_tokens")
"""Sampling parameters that ``SamplingParams`` has with the same meaning; None in a body is the default there."""
_WITH_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters like ``_AS_GIVEN``, which also may have a default in ``SamplingDefaults``."""
# Field -> values that have no effect, besides null and false.
_ONLY_BEAMS: dict[str, tuple[object, ...]] = {"length_penalty": (1.0,), "early_stopping": ()}
_NOT_BEAMS: dict[str, tuple[object, ...]] = {
    "stop": ("", []),
    "logprobs": (),
    "echo": (),
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "thinking_token_budget": (-1,),
}


@dataclass(slots=True, frozen=True)
class Limits:
    """The limits of this service, in addition to the model's, and the names of its model and adapters.

    ``root``: the model's folder or hub id. ``max_adapter_rank``: 0 if no adapters are served. ``updates_adapters``:
    whether they may be loaded at runtime.
    """

    model_name: str
    max_n: int
    root: str = ""
    adapters: AdapterTable = field(default_factory=AdapterTable)
    max_adapter_rank: int = 0
    updates_adapters: bool = False


def check_model(name: str | None, limits: Limits) -> Adapter | None:
    """Return the adapter that a request names, or None if it names the model, or nothing.

    Raises:
        ModelNotFoundError: neither the model nor an adapter has this name.
    """
    if name is None or name == limits.model_name:
        return None
    if (adapter := limits.adapters.find(name)) is None:
        raise ModelNotFoundError(f"the model {name!r} does not exist here; {limits.model_name!r} does", param="model")
    return adapter


def check_common(body: GenerationFields, limits: Limits) -> int:
    """Check the fields that can be checked without tokens, and return n.

    Raises:
        ModelNotFoundError, InvalidRequestError: a field is wrong, or fields contradict each other.
    """
    check_model(body.model, limits)
    n = body.n or 1
    if n > limits.max_n:
        raise InvalidRequestError(f"n is {n}, the most this server allows is {limits.max_n}", "n")
    if body.best_of not in (None, n):
        raise InvalidRequestError(
            f"best_of is not supported: it may only equal n, {n}. Ask for more outputs and choose among them; "
            "with use_beam_search n is the number of beams",
            "best_of",
        )
    _check_beam_search(body, n)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options is only allowed when stream is true", "stream_options")
    return n


def check_priority(body: GenerationFields, client: Client) -> None:
    """Check that a client may ask for the priority of a request. Dynamo's is a hint: the key's bound limits it.

    Raises:
        InvalidRequestError: it is lower, and would run earlier, than the client's API key permits.
    """
    lowest = client.priority
    hints = body.nvext.agent_hints if body.nvext is not None else None
    if body.priority is None and hints is not None and hints.priority is not None:
        body.priority = -hints.priority if lowest is None else max(lowest, -hints.priority)
    if lowest is not None and body.priority is not None and body.priority < lowest:
        raise InvalidRequestError(
            f"priority is {body.priority}, the lowest that the API key {client.name!r} may ask for is {lowest}",
            "priority",
        )


def beam_params(body: GenerationFields, n: int) -> BeamParams | None:
    """Return the parameters of beam search, or None if the request does not ask for it."""
    if not body.use_beam_search:
        return None
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return BeamParams(n, penalty, body.early_stopping or False)


def _check_beam_search(body: GenerationFields, n: int) -> None:
    """Refuse fields that beam search does not support, or fields that only beam search has."""
    refused, problem = _ONLY_BEAMS, "is only allowed with use_beam_search"
    if body.use_beam_search:
        refused, problem = _NOT_BEAMS, "cannot be used with use_beam_search"
    for name, harmless in refused.items():
        value = getattr(body, name, None)
        if value is not False and value not in (None, *harmless):
            raise InvalidRequestError(f"{name} {problem}", name)
    if not body.use_beam_search:
        return
    ends = len(body.stop_token_ids or ())
    if n * (2 + ends) > MAX_CANDIDATES:
        raise InvalidRequestError(
            f"{n} beams with {ends} stop_token_ids have too many continuations to rank for every token: "
            f"beams * (stop_token_ids + 2) may be at most {MAX_CANDIDATES}",
            "stop_token_ids" if ends else "n",
        )
    if body.max_tokens == 0:
        raise InvalidRequestError("max_tokens must be at least 1 with use_beam_search", "max_tokens")


def sampling_params(
    body: GenerationFields,
    defaults: SamplingDefaults,
    tokenizer: Tokenizer,
    capacity: Capacity,
    *,
    bad_words: Sequence[tuple[int, ...]],
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str = "",
    thinking: ThinkingBudget | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request, with defaults filled in and checked against the vocabulary.

    ``bad_words``: as ``encode_bad_words`` returns them. ``grammar``: the grammar that the output has to match. The
    output ends with the grammar, even with ``ignore_eos``, which then only forbids an earlier end.

    Raises:
        InvalidRequestError: a value makes no sense; ``param`` names it.
    """
    ends = sorted(token for token in tokenizer.eos_token_ids if token < capacity.vocab_size)  # no others are sampled
    stop_ids = _token_ids("stop_token_ids", body.stop_token_ids, capacity)
    if grammar or not body.ignore_eos:
        stop_ids = tuple(sorted({*stop_ids, *ends}))
    if grammar and body.ignore_eos:
        bad_words = [*bad_words, *((token,) for token in ends)]
    return SamplingParams(
        **_values(body, defaults),
        seed=secrets.randbits(63) if body.seed is None else body.seed % 2**64,
        stop_token_ids=stop_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraints=_constraints(body, bad_words, capacity),
        grammar=grammar,
        thinking=thinking,
    )


def _values(body: GenerationFields, defaults: SamplingDefaults) -> dict[str, Any]:
    given = {name: value for name in _AS_GIVEN if (value := getattr(body, name)) is not None}
    sources = (body,) if body.use_beam_search else (body, defaults)  # beams take the model's own probabilities
    for name in _WITH_DEFAULTS:
        found = (value for source in sources if (value := getattr(source, name)) is not None)
        if (first := next(found, None)) is not None:
            given[name] = first
    given["top_k"] = max(0, given.get("top_k", 0))
    # A top_p of 0 keeps the most likely token only.
    if given.get("temperature", 1.0) < _GREEDY_BELOW or given.get("top_p") == 0.0:
        given |= {"temperature": 0.0, "top_p": 1.0}
    return given


def _constraints(
    body: GenerationFields, bad_words: Sequence[tuple[int, ...]], capacity: Capacity
) -> TokenConstraints | None:
    allowed = body.allowed_token_ids or []
    if len(allowed) > capacity.vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids: {len(allowed)} token ids are more than the vocabulary has, which is "
            f"{capacity.vocab_size}",
            "allowed_token_ids",
        )
    return token_constraints(
        _token_ids("allowed_token_ids", allowed, capacity),
        _logit_bias(body.logit_bias or {}, capacity),
        (word for word in bad_words if max(word, default=0) < capacity.vocab_size),  # others are never sampled
    )


def check_output_length(wanted: int | None, capacity: Capacity, output: str, *, least: int = 0) -> None:
    """Refuse a number of output tokens that is too large even for a prompt of one token.

    ``output``: the name of the field. ``least``: the minimum number of output tokens.

    Raises:
        InvalidRequestError: the number is too small or too large.
    """
    if wanted is None:
        return
    if wanted < least:
        raise InvalidRequestError(f"{output} must be at least {least}", output)
    if wanted >= capacity.max_model_len:
        raise InvalidRequestError(
            f"{output} is too large: {wanted}. This model's maximum context length is {capacity.max_model_len} tokens, "
            "and the prompt needs at least one of them",
            output,
        )


def output_budget(
    body: GenerationFields,
    wanted: int | None,
    default: int | None,
    num_prompt_tokens: int,
    capacity: Capacity,
    *,
    prompt: str = "prompt",
    output: str = "max_tokens",
) -> int:
    """Return the maximum number of output tokens of a sequence.

    ``wanted``: the number in the request. ``default``: the number if it has none; None: all that the model's length
    leaves. ``prompt`` and ``output``: names of the fields, for errors.

    Raises:
        InvalidRequestError: the number is less than ``min_tokens``.
        ContextLengthError: prompt and output together are longer than the model allows.
    """
    left = capacity.max_model_len - num_prompt_tokens
    about = f"This model's maximum context length is {capacity.max_model_len} tokens."
    if left < (0 if wanted == 0 else 1):
        raise ContextLengthError(
            f"{about} However, your {prompt} resulted in {num_prompt_tokens} tokens"
            f"{'' if wanted == 0 else ', which leaves none for the output'}. Please reduce its length.",
            prompt,
        )
    budget = wanted if wanted is not None else left if default is None else min(left, default)
    if budget > left:
        raise ContextLengthError(
            f"{about} However, you requested {num_prompt_tokens + budget} tokens ({num_prompt_tokens} in the {prompt}, "
            f"{budget} in the completion). Please reduce the length of the {prompt} or the completion.",
            output,
        )
    if (body.min_tokens or 0) > budget:
        raise InvalidRequestError(
            f"min_tokens is {body.min_tokens}, and the output may have only {budget} tokens", "min_tokens"
        )
    return budget


def truncated(tokens: "array[int]", body: GenerationFields, max_tokens: int | None, capacity: Capacity) -> "array[int]":
    """Return the prompt's last ``truncate_prompt_tokens`` tokens (-1: as many as leave room for ``max_tokens``).

    Raises:
        InvalidRequestError: nothing would be left.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tokens
    if keep == -1:
        keep = capacity.max_model_len - (1 if max_tokens is None else max_tokens)
    if keep < 1:
        raise InvalidRequestError("truncate_prompt_tokens leaves nothing of the prompt", "truncate_prompt_tokens")
    return tokens if len(tokens) <= keep else tokens[-keep:]


def strip(body: CompletionRequest | ChatRequest) -> None:
    """Remove the large fields of a body, whose prompts and sampling parameters have been made before.

    A body lives as long as its response, which reads its small fields, but its memory counts as released when its
    tokens are submitted (``Intake.memory``). The schema bounds each of the remaining fields.
    """
    body.logit_bias = body.bad_words = body.allowed_token_ids = None
    body.response_format = body.structured_outputs = None
    body.user = body.safety_identifier = body.segments = None
    if isinstance(body, CompletionRequest):
        body.prompt = ""
    else:
        body.messages, body.chat_template_kwargs, body.tools = [], None, None


def stop_texts(body: GenerationFields) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _token_ids(name: str, ids: list[int] | None, capacity: Capacity) -> tuple[int, ...]:
    for token in ids or ():
        if token >= capacity.vocab_size:
            raise InvalidRequestError(
                f"{name}: token id {token} is outside the vocabulary of {capacity.vocab_size}", name
            )
    return tuple(ids or ())


def _logit_bias(bias: dict[str, float], capacity: Capacity) -> dict[int, float]:
    result = {}
    for key, value in bias.items():
        # The length is checked first: converting a string of a million digits to a number takes long.
        if len(key) > 10 or not (key.isascii() and key.isdigit()) or int(key) >= capacity.vocab_size:
            raise InvalidRequestError(
                f"logit_bias: {key[:20]!r} is no token id below {capacity.vocab_size}", "logit_bias"
            )
        result[int(key)] = value
    return result

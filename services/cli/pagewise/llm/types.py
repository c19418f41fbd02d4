"""The parameters, outputs and errors of ``LLM``, with vLLM's names, shapes and defaults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import fields
from pagewise_shared.config.sampling_defaults import SamplingDefaults
from pagewise_shared.errors import PagewiseError

_ID = "token_id:"


class SamplingParams(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the outputs of a prompt are sampled.

    The fields have the names and meanings of ``POST /v1/completions``; ``/openapi.json`` has their ranges.
    ``logprobs``: number of alternatives to return for each token, besides its own log-probability.
    ``structured_outputs``: the format of an output, such as ``{"regex": "[0-9]+"}``. ``prompt_logprobs`` exists to be
    refused by name.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    thinking_token_budget: int | None = None
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs: log-probabilities of prompts are not returned here; POST /v1/completions has them "
                "with echo and logprobs"
            )

    def body(self) -> dict[str, Any]:
        """Return the fields of a request that differ from the defaults, and always the fields of ``SamplingDefaults``,
        because the server would replace missing fields by the model's defaults."""
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}
        if self.max_tokens is not None:
            given["max_tokens"] = self.max_tokens
        if not self.use_beam_search:
            given |= {name: getattr(self, name) for name in SamplingDefaults.__struct_fields__ if hasattr(self, name)}
        if self.logprobs is not None:
            given["return_tokens_as_token_ids"] = True
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return given


class LLMError(PagewiseError):
    """The services cannot be started or have ended, or refuse a request.

    Fields:
        status: the status of the HTTP answer that refused a request; None if there was none.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class Logprob:
    """The log-probability of a token. ``rank``: 1 is the likeliest; None beyond the requested number."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One output of a prompt.

    Fields:
        logprobs: for each token the log-probabilities, by token id, of itself and of the likeliest tokens; None if not
            requested.
        cumulative_logprob: the sum over the tokens of the output, as far as there are ``logprobs``.
        finish_reason: "stop" or "length".
        stop_reason: the stop string, or the id of the stop token, that ended the output; None: the model ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class RequestOutput:
    """The outputs of a prompt.

    Fields:
        request_id: the id by which ``pagewise pmap`` and the logs know the request.
        prompt: its text, after the chat template; None if it was given as token ids.
        num_cached_tokens: how many tokens of the prompt were found in the cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


def request_output(
    prompt: str | None, answer: dict[str, Any], asked: int | None, decode: Callable[[int], str]
) -> RequestOutput:
    """Return the outputs in an answer of ``/v1/completions`` that has token ids.

    ``asked``: how many alternatives the request wanted for each token. ``decode``: returns the text of a token.
    """
    choices = answer["choices"]
    return RequestOutput(
        request_id=answer["id"],
        prompt=prompt,
        prompt_token_ids=choices[0]["prompt_token_ids"],
        outputs=[_output(choice, asked or 0, decode) for choice in choices],
        num_cached_tokens=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def _output(choice: dict[str, Any], asked: int, decode: Callable[[int], str]) -> CompletionOutput:
    token_ids, logprobs, total = choice["token_ids"], None, None
    if (found := choice["logprobs"]) is not None:
        tops = zip(token_ids, found["top_logprobs"], strict=True)
        logprobs = [_ranked(token, named, asked, decode) for token, named in tops]
        total = sum(found["token_logprobs"])
    return CompletionOutput(
        choice["index"], choice["text"], token_ids, total, logprobs, choice["finish_reason"], choice["stop_reason"]
    )


def _ranked(token: int, named: dict[str, float], asked: int, decode: Callable[[int], str]) -> dict[int, Logprob]:
    """Return log-probabilities by token id. ``named``: the same by ``token_id:ID``."""
    values = {int(name.removeprefix(_ID)): value for name, value in named.items()}
    likeliest = sorted(values, key=lambda one: -values[one])
    if len(values) > asked:  # the sampled token is not among the likeliest ones
        likeliest.remove(token)
    ranks = {one: place for place, one in enumerate(likeliest, 1)}
    return {one: Logprob(value, ranks.get(one), decode(one)) for one, value in values.items()}

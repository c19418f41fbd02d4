"""How outputs are sampled, by vLLM's names and with its defaults."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import fields


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
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs: log-probabilities of prompts are not returned here; POST /v1/completions has them "
                "with echo and logprobs"
            )

    def body(self) -> dict[str, Any]:
        """Return the fields of a request that differ from the defaults, and always ``max_tokens`` if it has a value."""
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}
        if self.max_tokens is not None:
            given["max_tokens"] = self.max_tokens
        if self.logprobs is not None:
            given["return_tokens_as_token_ids"] = True
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return given

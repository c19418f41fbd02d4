"""The outputs and errors of ``LLM``, in the shape of vLLM's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewise_shared.errors import PagewiseError

_ID = "token_id:"


class LLMError(PagewiseError):
    """The services cannot be started or have ended, or refuse a request; the text says why.

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

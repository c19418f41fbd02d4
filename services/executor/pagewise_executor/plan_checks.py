"""What a plan says of tokens and sampling, checked before anything indexes with it: on a GPU an index that is out of
range ends the process, not the step."""

from collections.abc import Iterable
from math import isfinite

import numpy as np
import numpy.typing as npt
from pagewise_shared.errors import PagewiseError
from pagewise_shared.protocol import Fetch
from pagewise_shared.sampling import SamplingParams

ANY_TOKEN = 2**31
"""The vocabulary of whoever does not index with tokens."""

_MOST_ALTERNATIVES = 2**16


class InvalidPlanError(PagewiseError):
    """A plan contradicts what the executor holds; the text says how."""


def check_tokens(tokens: npt.NDArray[np.int32], num_prompt_tokens: int, vocab_size: int) -> None:
    """Look at the known tokens of a sequence.

    Raises:
        InvalidPlanError: one is outside the vocabulary, or the prompt is none of them or more than all.
    """
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        raise InvalidPlanError(f"a sequence joins with a token outside the vocabulary of {vocab_size}")
    if not 1 <= num_prompt_tokens <= len(tokens):
        raise InvalidPlanError(f"{num_prompt_tokens} of {len(tokens)} tokens are the prompt's")


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Look at how a sequence is sampled.

    Raises:
        InvalidPlanError: a token is outside the vocabulary, or a number is none that can be computed with.
    """
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    for word in params.bad_words:
        _check_ids("bad_words", word, vocab_size)
    if not all(params.bad_words):
        raise InvalidPlanError("a bad word has no tokens")
    numbers = (params.temperature, params.top_p, params.min_p, params.presence_penalty, params.frequency_penalty)
    if not all(map(isfinite, (*numbers, params.repetition_penalty, *params.logit_bias.values()))):
        raise InvalidPlanError("a sampling parameter is no number")
    if min(params.temperature, params.top_p, params.min_p) < 0 or params.repetition_penalty <= 0:
        raise InvalidPlanError("a sampling parameter that cannot be negative is")
    if not 0 <= params.top_k < 2**31:
        raise InvalidPlanError(f"top_k is {params.top_k}")
    if not all(0 <= (count or 0) <= _MOST_ALTERNATIVES for count in (params.logprobs, params.prompt_logprobs)):
        raise InvalidPlanError(f"a number of log-probabilities is not from 0 to {_MOST_ALTERNATIVES}")


def check_fetches(fetches: Iterable[Fetch], pool_blocks: int) -> None:
    """Look at where blocks of other executors are to go; what they have is theirs to check.

    Raises:
        InvalidPlanError: a block is outside the pool, or a list is not of triples.
    """
    for fetch in fetches:
        if len(fetch.blocks) % 12:
            raise InvalidPlanError("fetches come in triples of tier, block there and block here")
        own = np.frombuffer(fetch.blocks, np.int32)[2::3]
        if len(own) and not (own.min() >= 0 and own.max() < pool_blocks):
            raise InvalidPlanError(f"a fetch goes outside the pool of {pool_blocks} blocks")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    if not all(0 <= token < vocab_size for token in ids):
        raise InvalidPlanError(f"{name}: a token is outside the vocabulary of {vocab_size}")

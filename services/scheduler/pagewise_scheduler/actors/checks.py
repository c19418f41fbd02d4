"""What executors say, looked at beyond its types: numbers that make no sense never reach the core."""

from collections.abc import Sequence
from itertools import pairwise
from math import isnan

from pagewise_shared.block_hash import HASH_BYTES
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import (
    AdapterLoaded,
    Copied,
    Hello,
    StepResult,
    TokenLogprobs,
    unpack_float32s,
    unpack_int32s,
)

_MOST = 2**31 - 1
_MAX_TEXT = 4096


class ImpossibleError(ProtocolError):
    """A message says what cannot be; the text says what."""


def checked_tokens(result: StepResult, hello: Hello) -> list[int]:
    """The tokens of a result of the executor that said ``hello``. The core checks whether they fit the step.

    Raises:
        ImpossibleError: something in it cannot be.
    """
    if len(result.tokens) % 4:
        raise ImpossibleError(f"{len(result.tokens)} bytes of tokens")
    tokens = unpack_int32s(result.tokens).tolist()
    if tokens and not (min(tokens) >= 0 and max(tokens) < hello.vocab_size):
        raise ImpossibleError(f"a token outside its vocabulary of {hello.vocab_size}")
    if not 0 <= result.elapsed_us <= _MOST:
        raise ImpossibleError(f"a step of {result.elapsed_us} µs")
    indices = [failure.index for failure in result.failures]
    if not _rise(indices, 0, len(tokens)) or any(len(one.message) > _MAX_TEXT for one in result.failures):
        raise ImpossibleError("failures of no token, or with a message that is too long")
    if result.logprobs or result.prompt_logprobs:
        _check_logprobs(result, len(tokens), hello)
    return tokens


def _check_logprobs(result: StepResult, num_tokens: int, hello: Hello) -> None:
    indices = [entry.index for entry in result.logprobs]
    if not _rise(indices, 0, num_tokens) or not _sound(result.logprobs, hello):
        raise ImpossibleError("log-probabilities of no token, or that are none")
    for prompt in result.prompt_logprobs:
        indices = [entry.index for entry in prompt.entries]
        if not _rise(indices, 1, hello.max_model_len) or not _sound(prompt.entries, hello):
            raise ImpossibleError("log-probabilities of no token of a prompt, or that are none")


def check_copies(copied: Copied) -> None:
    """Look at a report of copies.

    Raises:
        ImpossibleError: something in it cannot be.
    """
    if len(copied.bad) % 4:
        raise ImpossibleError(f"{len(copied.bad)} bytes of blocks")
    if not 0 <= copied.elapsed_us <= _MOST:
        raise ImpossibleError(f"copies of {copied.elapsed_us} µs")


def check_loaded(loaded: AdapterLoaded) -> None:
    """Look at a report of an adapter.

    Raises:
        ImpossibleError: something in it cannot be.
    """
    if not 0 <= loaded.elapsed_us <= _MOST:
        raise ImpossibleError(f"an adapter that took {loaded.elapsed_us} µs")
    if any(len(content) != HASH_BYTES for content in loaded.evicted):
        raise ImpossibleError("the hash of an adapter that is none")


def _rise(indices: list[int], first: int, end: int) -> bool:
    """Whether they lie in [first, end) and each is greater than the one before: so there are never more than fit."""
    return not indices or (indices[0] >= first and indices[-1] < end and all(a < b for a, b in pairwise(indices)))


def _sound(entries: Sequence[TokenLogprobs], hello: Hello) -> bool:
    """Whether tokens, ranks and log-probabilities lie where they can. Those of all alternatives are looked at together:
    a step may have tens of thousands."""
    if not all(
        0 <= entry.token_id < hello.vocab_size
        and entry.logprob < 1  # not NaN; rounding may exceed 0 by a little
        and 1 <= entry.rank <= hello.vocab_size
        and len(entry.top_ids) == len(entry.top_logprobs) <= 4 * hello.vocab_size
        and len(entry.top_ids) % 4 == 0
        for entry in entries
    ):
        return False
    ids = unpack_int32s(b"".join([entry.top_ids for entry in entries]))
    logprobs = unpack_float32s(b"".join([entry.top_logprobs for entry in entries]))
    if not ids:
        return True
    # ``max`` may pass over a NaN, a sum does not.
    return min(ids) >= 0 and max(ids) < hello.vocab_size and max(logprobs) < 1 and not isnan(sum(logprobs))

"""The types that HTTP handlers and the scheduler client exchange about a generation.

A handler makes a ``Submit`` of a client's request, for which the scheduler client returns a ``LiveRequest``. Outputs
come as SequenceDeltas, errors as GenerationErrors.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec import Struct
from pagewise_shared.protocol import FinishReason, TokenLogprobs

RefusalKind = Literal["never_fits", "invalid", "overloaded", "unavailable"]

TOKEN_BYTES = 24
"""Approximate memory of a token of an answer: its id, its text, and both once more as JSON."""
REPEATED_BYTES = 8
"""Approximate memory of a token of a prompt in each choice that repeats it as text or as an id."""
LOGPROB_BYTES = 64
"""Approximate memory of a log-probability in an answer: packed, and as JSON."""


def token_bytes(logprobs: int | None) -> int:
    """Return the memory of a token with its log-probability and ``logprobs`` alternatives; None: without any."""
    return TOKEN_BYTES if logprobs is None else TOKEN_BYTES + (1 + logprobs) * LOGPROB_BYTES


@dataclass(slots=True, frozen=True)
class AnswerOptions:
    """The options of a request that the gateway implements, and of which the scheduler does not know.

    Fields:
        stop: strings that end a sequence. include_stop_str_in_output: whether they stay in its text.
        skip_special_tokens: whether special tokens are left out of the text, but for shown_tokens.
        wants_token_ids: whether deltas carry token ids.
        whole: whether all deltas arrive together, once all sequences have ended.
        prompt_bytes: memory of the parts of the prompts that the answer repeats.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_tokens: frozenset[int] = frozenset()
    wants_token_ids: bool = False
    whole: bool = False
    prompt_bytes: int = 0


class Held(Protocol):
    """The memory that is reserved for the answer of one request. ``size``: bytes."""

    size: int

    def grow_to(self, size: int) -> None:
        """Reserve more memory. Raises an exception, and reserves nothing, if there is too little."""

    def shrink_to(self, size: int) -> None:
        """Release memory beyond ``size``."""


class PackedLogprobs:
    """Log-probabilities of consecutive tokens: 8 bytes for each."""

    __slots__ = ("_ends", "_ids", "_values")

    def __init__(self) -> None:
        # Of each token: its id and value, then the ids and values of its alternatives; and the end of these.
        self._ids, self._values, self._ends = array("i"), array("f"), array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, entry: TokenLogprobs) -> None:
        """Add the log-probabilities of the next token."""
        ids, values = self._ids, self._values
        ids.append(entry.token_id)
        values.append(entry.logprob)
        ids.frombytes(entry.top_ids)
        values.frombytes(entry.top_logprobs)
        self._ends.append(len(ids))

    def rows(self, begin: int, end: int) -> "Iterator[tuple[array[int], array[float]]]":
        """Yield the ids and log-probabilities of each of these tokens: its own, then its alternatives, best first."""
        first = self._ends[begin - 1] if begin else 0
        for last in self._ends[begin:end]:
            yield self._ids[first:last], self._values[first:last]
            first = last


class SequenceDelta(Struct, gc=False):  # made with every token: costs a quarter of a dataclass
    """The new text of one sequence, which is final (it is never taken back), and its tokens.

    Fields:
        index: of the sequence in its request: prompt by prompt, n sequences each.
        text: lags behind the tokens while a character or a possible stop string is incomplete.
        token_ids: empty unless the request wants them. A token whose text a stop string cut off is listed too.
        finish_reason: set in the last delta.
        stop_reason: with the finish reason "stop", the stop string or the id of the stop token; None: an end of
            sequence of the model.
    """

    index: int
    text: str
    token_ids: list[int] = []
    logprobs: PackedLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True, frozen=True)
class Capacity:
    """The limits of the executors that are ready, against which requests are checked.

    ``max_model_len``: most tokens (prompt and output) of a sequence: the model's limit, or the size of the largest KV
    pool. ``no_grammars``: the reason for which executors cannot follow grammars; empty: they can. ``snapshots``:
    prompts begin at snapshots alone, which are taken at the places that a prompt declares.
    """

    max_model_len: int
    vocab_size: int
    no_grammars: str = ""
    snapshots: bool = False


class GenerationError(Exception):
    """A generation failed; the text gives the reason. Only subclasses are errors of the client."""


class SlowReaderError(GenerationError):
    """The request was stopped because its client left too much unread."""


class NoExecutorError(GenerationError):
    """The request was accepted and waited, but no executor came that could run it."""


class InvalidGrammarError(GenerationError):
    """The grammar of the request is invalid with the model's tokenizer, as executors have found."""


class AdmissionError(GenerationError):
    """A request is not accepted; ``kind`` decides the HTTP status.

    Kinds: "never_fits" (it is longer than any executor could hold: 400), "invalid" (it can never run, for another
    reason: 400), "overloaded" (the queue is full, or a limit is reached: 429), "unavailable" (no scheduler, no
    executor, or shutting down: 503). ``retry_after``: seconds after which the request may succeed; None: unknown.
    """

    def __init__(self, kind: RefusalKind, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after

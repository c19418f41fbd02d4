"""The types that the HTTP surface and the link to the scheduler exchange about a generation.

``http`` makes a ``Submit`` of what a client asks for and hands it to the link, which returns a LiveRequest. The outputs
arrive as SequenceDeltas. Errors::

    GenerationError             the generation failed
    ├── SlowReaderError         the client left too much unread
    ├── InvalidGrammarError     the grammar cannot be used with the model
    ├── NoExecutorError         the request was accepted, but no executor came that could run it
    └── AdmissionError          the request was not accepted
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec import Struct
from pagewise_shared.protocol import FinishReason, TokenLogprobs

RefusalKind = Literal["never_fits", "invalid", "overloaded", "unavailable"]

TOKEN_BYTES = 24
"""What a token of an answer takes, about: its id, its text, and both once more as JSON."""
REPEATED_BYTES = 8
"""What a token of a prompt takes in each choice that repeats it as text or as an id, about."""
LOGPROB_BYTES = 64
"""What a log-probability in an answer takes, about: packed, and as JSON."""


def token_bytes(logprobs: int | None) -> int:
    """Return what a token takes with its log-probability and ``logprobs`` alternatives; None: without any."""
    return TOKEN_BYTES if logprobs is None else TOKEN_BYTES + (1 + logprobs) * LOGPROB_BYTES


@dataclass(slots=True, frozen=True)
class AnswerOptions:
    """What a client wants of the text of its outputs. The scheduler does not know it.

    Fields:
        stop: strings that end a sequence. include_stop_str_in_output: whether they stay in its text.
        skip_special_tokens: whether special tokens are left out of the text, but for shown_tokens.
        wants_token_ids: whether deltas carry token ids.
        whole: whether all deltas arrive together, once all sequences have ended.
        prompt_bytes: what the answer takes for what it repeats of the prompts.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_tokens: frozenset[int] = frozenset()
    wants_token_ids: bool = False
    whole: bool = False
    prompt_bytes: int = 0


class Held(Protocol):
    """The memory that is taken for the answer of one request. ``size``: bytes."""

    size: int

    def grow_to(self, size: int) -> None:
        """Take what is missing.

        Raises:
            Exception: there is not so much; nothing was taken.
        """

    def shrink_to(self, size: int) -> None:
        """Give back what is more."""


class PackedLogprobs:
    """Log-probabilities of consecutive tokens: 8 bytes for each."""

    __slots__ = ("_ends", "_ids", "_values")

    def __init__(self) -> None:
        # Of each token: its own, then those of its alternatives; and where they end.
        self._ids, self._values, self._ends = array("i"), array("f"), array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, entry: TokenLogprobs) -> None:
        """Add those of the next token."""
        ids, values = self._ids, self._values
        ids.append(entry.token_id)
        values.append(entry.logprob)
        ids.frombytes(entry.top_ids)
        values.frombytes(entry.top_logprobs)
        self._ends.append(len(ids))

    def rows(self, begin: int, end: int) -> "Iterator[tuple[array[int], array[float]]]":
        """Yield ids and log-probabilities of each of these tokens: its own first, then its alternatives, best first."""
        first = self._ends[begin - 1] if begin else 0
        for last in self._ends[begin:end]:
            yield self._ids[first:last], self._values[first:last]
            first = last


class SequenceDelta(Struct, gc=False):  # made with every token: a quarter of what a dataclass costs
    """What is new in one sequence: text that is final (it is never taken back), and the tokens behind it.

    Fields:
        index: of the sequence in its request: prompt by prompt, n sequences each.
        text: lags behind the tokens while a character or a possible stop string is incomplete.
        token_ids: empty unless the request wants them. A token whose text a stop string cut off is listed too.
        finish_reason: set in the last delta.
        stop_reason: with the finish reason "stop", the stop string or the id of the stop token; None stands for the
            model's own end of sequence.
    """

    index: int
    text: str
    token_ids: list[int] = []
    logprobs: PackedLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True, frozen=True)
class Capacity:
    """The limits that a request is checked against, which follow from the executors that are ready.

    ``max_model_len``: how many tokens (prompt and output) one sequence may reach. This is the model's limit, or what
    the largest KV pool holds. ``no_grammars``: why no output can be made to match a grammar; empty: it can.
    """

    max_model_len: int
    vocab_size: int
    no_grammars: str = ""


class GenerationError(Exception):
    """A generation failed; the text says why. Unless its subclass says otherwise, its client is not to blame."""


class SlowReaderError(GenerationError):
    """The request was stopped because its client left too much unread."""


class NoExecutorError(GenerationError):
    """The request was accepted and waited, but no executor came that could run it."""


class InvalidGrammarError(GenerationError):
    """The grammar of the request makes no sense with the model's tokenizer, which executors have."""


class AdmissionError(GenerationError):
    """A request is not accepted; ``kind`` decides the HTTP status.

    Kinds: "never_fits" (it is longer than any executor could hold: 400), "invalid" (it can never run, for another
    reason: 400), "overloaded" (the queue is full, or a limit is reached: 429), "unavailable" (no scheduler, no
    executor, or shutting down: 503). ``retry_after``: seconds after which there should be room, or None if that is not
    known.
    """

    def __init__(self, kind: RefusalKind, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after

"""What the HTTP surface and the actors say to each other about a generation.

``http`` builds a GenerationRequest and hands it to a Gateway; the actors answer with a GenerationStream.
"""

from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pagewise_shared.protocol import TokenLogprobs
from pagewise_shared.sampling import BeamParams, SamplingParams

from pagewise_gateway.core.inspection import MemoryReport, RequestReport

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True, frozen=True)
class GenerationRequest:
    """One prompt and what to do with it: n sequences are generated from it.

    Fields:
        request_id: unique among live requests (a client's own X-Request-Id is not: it is made unique).
        prompt_token_ids: int32, at least one token.
        max_tokens: most output tokens per sequence; 0 only computes the prompt (for its logprobs).
        sampling: of sequence 0; the seed of sequence i is derived from its seed and i.
        n: sequences to generate.
        stop: texts that end a sequence. include_stop_str_in_output: whether they stay in its text.
        skip_special_tokens: leave special tokens out of the text.
        priority: lower runs earlier.
        cache_salt: only requests with the same one share cached KV.
        beam: search for the n likeliest sequences instead of sampling. best_of: samples of which the n likeliest are
            the outputs, 0: no more than n. Either way, everything comes at the end.
        arrival_time: seconds, of the monotonic clock.
        key: name of the API key it came with; the executors' time is shared fairly between keys.
    """

    request_id: str
    prompt_token_ids: "array[int]"
    max_tokens: int
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    beam: BeamParams | None = None
    best_of: int = 0
    arrival_time: float = 0.0
    key: str = ""


@dataclass(slots=True)
class SequenceDelta:
    """What is new in one sequence: text that is final (never taken back), and the tokens behind it.

    ``text`` lags behind ``token_ids`` while a character or a possible stop string is incomplete, and a token cut
    off by a stop string is still listed. The last delta carries ``finish_reason``; with "stop", ``stop_reason`` is the
    stop string or the stop token id (None for the model's own end of sequence).
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class GenerationStats:
    """Counts of one request, right once its stream has ended. ``cached_tokens``: of the prompt, found in the cache."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


class GenerationError(Exception):
    """A generation failed on our side after it was accepted; the text says why."""


class SlowReaderError(GenerationError):
    """Its client has left too much unread, and it was stopped."""


class NoExecutorError(GenerationError):
    """It was accepted and waited, and no executor came that could run it."""


class AdmissionError(Exception):
    """A request cannot be taken; ``kind`` says what kind of answer it deserves.

    Kinds: "never_fits" (it exceeds what any executor could hold: 400), "overloaded" (the queue is full: 429),
    "unavailable" (no executor, or shutting down: 503). ``reason``: a word for metrics. ``retry_after``: seconds after
    which there should be room; None: nothing is known.
    """

    def __init__(
        self,
        kind: Literal["never_fits", "overloaded", "unavailable"],
        message: str,
        reason: str = "",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.reason = reason
        self.retry_after = retry_after


class GenerationStream(Protocol):
    """A running generation.

    Iterate it for deltas until every sequence has finished. Raises GenerationError where it fails.
    """

    stats: GenerationStats
    prompt_logprobs: list[TokenLogprobs]
    """Complete before the first delta is yielded, if ``sampling.prompt_logprobs`` was set; else empty."""

    def __aiter__(self) -> AsyncIterator[list[SequenceDelta]]:
        """Yield the deltas that have come in since the last ones: never an empty list."""
        ...

    @property
    def num_drawn_tokens(self) -> int:
        """Output tokens computed so far, also of outputs that are not shown: what it is charged for."""
        ...

    def abort(self) -> None:
        """Stop all its sequences and free their blocks within one step. Harmless once it has ended."""
        ...


@dataclass(slots=True, frozen=True)
class Capacity:
    """What the executors that are ready could hold: the limits a request is checked against."""

    ready_executors: int
    max_model_len: int
    """Most tokens (prompt and output) one sequence may reach: the model's limit or the largest pool."""
    vocab_size: int


class Gateway(Protocol):
    """The actors, as the HTTP surface sees them."""

    def capacity(self) -> Capacity | None:
        """The limits that hold now; None until the first executor has joined (they stay known afterwards)."""
        ...

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Take a request.

        Raises:
            AdmissionError: it cannot be taken.
        """
        ...

    def memory_reports(self, limit: int) -> list[MemoryReport]:
        """What the KV memory of each executor holds, lists cut to ``limit``."""
        ...

    def request_report(self, request_id: str, limit: int) -> RequestReport | None:
        """What a request holds, or held if it ended not long ago; None: it is not known."""
        ...

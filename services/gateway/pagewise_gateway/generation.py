"""What the HTTP surface and the link to the scheduler say to each other about a generation.

``http`` builds a GenerationRequest and gives it to the link, which answers with a LiveRequest; its news are
SequenceDeltas. Errors::

    GenerationError             a generation failed on our side
    ├── SlowReaderError         its client has left too much unread
    ├── NoExecutorError         it was taken, and no executor came that could run it
    └── AdmissionError          it was not taken
"""

from array import array
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct
from pagewise_shared.protocol import FinishReason, KeyLimits, TokenLogprobs
from pagewise_shared.sampling import BeamParams, SamplingParams

RefusalKind = Literal["never_fits", "overloaded", "unavailable"]


@dataclass(slots=True, frozen=True)
class Prompt:
    """One prompt of a request.

    Fields:
        tokens: int32, at least one.
        max_tokens: most output tokens of each sequence; 0 only computes the prompt (for its log-probabilities).
        text: the whole prompt as text, if the client sent text.
    """

    tokens: "array[int]"
    max_tokens: int
    text: str | None = None


@dataclass(slots=True, frozen=True)
class GenerationRequest:
    """Prompts and what to do with them: n sequences are generated from each. Without prompts it is work of the gateway
    itself, which only counts against the limits of its key.

    Fields:
        request_id: unique among live requests (a client's own X-Request-Id is not: it is made unique).
        sampling: of sequence 0; the seed of sequence i is derived from its seed and i.
        n: sequences to generate from each prompt.
        stop: texts that end a sequence. include_stop_str_in_output: whether they stay in its text.
        skip_special_tokens: leave special tokens out of the text.
        wants_token_ids: deltas carry token ids. whole: deltas come once all sequences have ended, not before.
        priority: lower runs earlier.
        cache_salt: only requests with the same one share cached KV.
        beam: search for the n likeliest sequences instead of sampling. best_of: samples of which the n likeliest are
            the outputs, 0: no more than n. Either way, everything comes at the end.
        arrival_time: seconds, of the monotonic clock.
        key, limits: name of the API key it came with, and what its holders may do.
    """

    request_id: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    wants_token_ids: bool = False
    whole: bool = False
    priority: int = 0
    cache_salt: str | None = None
    beam: BeamParams | None = None
    best_of: int = 0
    arrival_time: float = 0.0
    key: str = ""
    limits: KeyLimits = KeyLimits()  # noqa: RUF009 - it is frozen

    @property
    def chooses(self) -> bool:
        """Whether its outputs are chosen among more at the end."""
        return self.beam is not None or self.best_of > 0


class SequenceDelta(Struct, gc=False):  # made with every token: a quarter of what a dataclass costs
    """What is new in one sequence: text that is final (never taken back), and the tokens behind it.

    ``index``: of the sequence among all of its request, prompt by prompt, n each. ``text`` lags behind the tokens
    while a character or a possible stop string is incomplete, and a token cut off by a stop string is still listed.
    ``token_ids`` is empty unless they are wanted. The last delta carries ``finish_reason``; with "stop",
    ``stop_reason`` is the stop string or the stop token id (None for the model's own end of sequence).
    """

    index: int
    text: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True, frozen=True)
class Capacity:
    """What the executors that are ready could hold: the limits a request is checked against.

    ``max_model_len``: most tokens (prompt and output) one sequence may reach, the model's limit or the largest pool.
    """

    max_model_len: int
    vocab_size: int


class GenerationError(Exception):
    """A generation failed on our side; the text says why."""


class SlowReaderError(GenerationError):
    """Its client has left too much unread, and it was stopped."""


class NoExecutorError(GenerationError):
    """It was accepted and waited, and no executor came that could run it."""


class AdmissionError(GenerationError):
    """A request cannot be taken; ``kind`` says what kind of answer it deserves.

    Kinds: "never_fits" (it exceeds what any executor could hold: 400), "overloaded" (a queue or a limit is full: 429),
    "unavailable" (no scheduler, no executor, or shutting down: 503). ``retry_after``: seconds after which there should
    be room; None: nothing is known.
    """

    def __init__(self, kind: RefusalKind, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after

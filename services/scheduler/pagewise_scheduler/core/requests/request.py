"""Requests and sequences: what is generated, and how far it has come."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
from pagewise_shared.block_hash import ONE_ROPE, rope_salt
from pagewise_shared.protocol import DEVICE, SOURCES, RequestParams, tier_name
from pagewise_shared.sampling import SamplingParams
from pagewise_shared.segments import Segment, num_computed

from pagewise_scheduler.core.memory import eviction
from pagewise_scheduler.core.memory.block_table import BlockTable
from pagewise_scheduler.core.memory.eviction_history import RequestRef
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.beam_search import BeamSearch
from pagewise_scheduler.core.requests.timeline import Timeline
from pagewise_scheduler.core.requests.virtual_tokens import Account

if TYPE_CHECKING:
    from pagewise_scheduler.core.features.feature import Feature

FinishReason = Literal["stop", "length", "abort", "error"]

_HISTORY = 64
_PLACEMENTS = 8
_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: neighbouring sequences get far-apart random streams


class TokenSink(Protocol):
    """Where tokens are told: parallel lists of the streams that they belong to, and of the tokens."""

    streams: list[int]
    tokens: list[int]


class SequenceStatus(Enum):
    """WAITING (for admission, fresh or preempted) -> PREFILL -> DECODE -> FINISHED; preemption leads back to WAITING.

    A sequence whose last permitted token is in flight is DRAINING: it runs no more, and finishes when the token comes.
    """

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    DRAINING = auto()
    FINISHED = auto()


@dataclass(slots=True, frozen=True)
class Preempted:
    """It lost its ``blocks``, ``freed`` of which nobody else held, to ``by``. ``time``: seconds of the caller's
    clock."""

    time: float
    reason: str
    blocks: int
    freed: int
    by: RequestRef | None = None


@dataclass(slots=True, eq=False)
class RequestSequence:
    """One of a request's n outputs.

    Fields:
        output_token_ids: tokens that came back, in order. Tokens are the truth: with the prompt they are all that
            is needed to go on elsewhere.
        sink, stream: where its tokens are told as they come back, and under which number, until it ends; None: nowhere.
        row: the executor's row it occupies while it runs, else -1.
        num_scheduled_tokens: leading known tokens whose K and V are computed or will be by a step in flight
            (kept up to date while PREFILL only: while DECODE each step computes one more).
        decode_base: position it computes in the first step in which it decodes.
        num_computed_tokens: leading known tokens that steps which came back have computed, while it prefills.
        prefilled: whether its prefill has come back; from then on all its tokens but the newest are computed.
        block_due, length_due: steps in which it needs its next block, and in which it has no more to run.
        last_step: last step planned that runs it.
        path: cached blocks it was last seen to begin with, while it waits.
        num_tokens_preempted: output tokens that it had when it was preempted last.
        history: what happened to its memory, the newest last, see ``note``.
        num_passed: times others were started before it while it was the first to wait.
        draft_after, draft_pause: number of tokens from which on tokens may be drafted for it, and how many it has let
            pass after its last draft.
    """

    request: "Request"
    index: int
    sampling: SamplingParams
    table: BlockTable
    output_token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    status: SequenceStatus = SequenceStatus.WAITING
    stop_ids: frozenset[int] = frozenset()
    sink: TokenSink | None = None
    stream: int = 0
    row: int = -1
    num_scheduled_tokens: int = 0
    num_computed_tokens: int = 0
    prefilled: bool = False
    decode_base: int = 0
    block_due: int = 0
    length_due: int = 0
    last_step: int = 0
    num_preemptions: int = 0
    num_tokens_preempted: int = 0
    path: list[CachedBlock] = field(default_factory=list)
    num_passed: int = 0
    history: tuple[object, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    draft_after: int = 0
    draft_pause: int = 0

    def note(self, event: object) -> None:
        """Remember what happens to its memory: a ``Recovery`` with which it begins or comes back, or ``Preempted``."""
        # A tuple: there are thousands of sequences to which nothing has happened yet, and an empty one takes no memory.
        self.history = (*self.history[1 - _HISTORY :], event)

    def came_back(self, num_computed: int) -> bool:
        """A step has computed its leading tokens up to this one; False: it was preempted or has ended meanwhile."""
        drains = self.status is SequenceStatus.DRAINING
        if self.row < 0 and not drains:
            return False
        self.num_computed_tokens = num_computed
        self.prefilled = (drains or self.status is SequenceStatus.DECODE) and num_computed == self.decode_base
        return True

    def end(self, reason: FinishReason | None, stop_reason: str | int | None = None) -> None:
        """Let it take no more tokens. ``reason``: None if that was told before."""
        self.status, self.sink = SequenceStatus.FINISHED, None
        self.finish_reason, self.stop_reason = reason, stop_reason

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output that came back."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_with_kv(self) -> int:
        """Leading known tokens whose K and V are computed."""
        return self.num_tokens - 1 if self.prefilled else self.num_computed_tokens

    @property
    def max_num_tokens(self) -> int:
        """Tokens at which it ends for its length."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens

    @property
    def cache_salt(self) -> str | None:
        """What it shares the cache of now: that of its request, and another one beyond ``short_rope_len``."""
        return rope_salt(self.request.params.cache_salt, self.num_tokens, self.request.short_rope_len)

    @property
    def outgrown(self) -> bool:
        """Whether its output has brought it beyond ``short_rope_len``."""
        return self.num_prompt_tokens <= self.request.short_rope_len < self.num_tokens

    @property
    def run_until(self) -> int:
        """Tokens at which it leaves its row: for its length, or because all its KV has to be computed anew."""
        border, most = self.request.short_rope_len, self.max_num_tokens
        return border + 1 if self.num_tokens <= border < most else most

    @property
    def finished(self) -> bool:
        """Whether it takes no more tokens."""
        return self.status is SequenceStatus.FINISHED

    @property
    def ending(self) -> int | None:
        """How this use of its blocks ends, from which eviction learns, or None if another sequence of its request tells
        that: the outputs of one request are one use of its prompt."""
        request = self.request
        last = not request.num_pending and all(other.finished or other is self for other in request.sequences)
        return request.ending(self.output_token_ids) if last and request.params.beam is None else None

    def num_to_compute(self, size: int) -> int:
        """Of the last ``size`` scheduled tokens, how many are computed and not moved."""
        segments, stop = self.request.segments, self.num_scheduled_tokens
        return num_computed(segments, stop - size, stop) if segments else size

    def token_bytes(self) -> bytes:
        """All known tokens as int32 bytes."""
        prompt = self.request.prompt_token_ids.tobytes()
        return prompt + self.output_token_ids.tobytes() if self.output_token_ids else prompt

    def tokens_between(self, start: int, stop: int) -> bytes:
        """The known tokens from ``start`` to ``stop`` as int32 bytes."""
        prompt = self.request.prompt_token_ids
        length = len(prompt)
        if start >= length:
            return self.output_token_ids[start - length : stop - length].tobytes()
        if stop <= length:
            return prompt[start:stop].tobytes()
        return prompt[start:].tobytes() + self.output_token_ids[: stop - length].tobytes()


@dataclass(slots=True, eq=False)
class Request:
    """One prompt from which n sequences are generated.

    Times are seconds of whatever clock the caller passes in; NaN until they are known. ``params``: those
    that its gateway gave, with the adapter's content in their ``cache_salt``. ``num_cached_tokens``: of
    the prompt, found in the cache when it first ran; ``loaded_tokens``: those of them that were not on the device, by
    where they lay (one of ``SOURCES``). ``search``: how far its beam search has come; ``num_sampled_tokens``: of all
    its hypotheses. ``account``: of its API key, which its scheduler charges. ``queue_number``: by which those that
    arrived at the same time keep their order.
    ``sequences``: those created so far, by index; ``num_pending``: how many are still to be created (see
    ``create_sequences``). ``sink``, ``stream``: where the tokens of its outputs go, and the stream of the first one.
    ``stored``: blocks of its first sequence that were found in storage when it was placed, by the storage's identity.
    ``segments``: of its prompt, which are marked in ``prompt_token_ids``; ``stored_originals``: what ``stored`` is, of
    what they are moved from, by its tokens (int32 bytes). ``computes_for``: the sequence for which it
    computes a segment; then nobody is told of it, and it has no output.
    ``first_token_time``: when the first token of its first output was there. ``executors``: on which it was placed, and
    when, the last few. ``adapter_slot``: where its adapter is at the executor that runs it. ``timeline``: what explains
    its times; ``features``: those that it uses at its scheduler; ``ref``: what is remembered of it where it leaves
    traces. ``short_rope_len``: see ``rope_salt``; of the model that serves it.
    """

    request_id: str
    prompt_token_ids: "array[int]"
    max_tokens: int
    params: RequestParams
    arrival_time: float = 0.0
    sequences: list[RequestSequence] = field(default_factory=list)
    num_pending: int = 0
    sink: TokenSink | None = None
    stream: int = 0
    search: BeamSearch | None = None
    scheduled_time: float = float("nan")
    num_cached_tokens: int = 0
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    num_sampled_tokens: int = 0
    account: Account = field(default_factory=Account)
    queue_number: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    first_token_time: float = float("nan")
    segments: tuple[Segment, ...] = ()
    stored_originals: dict[bytes, dict[str, int]] = field(default_factory=dict)
    computes_for: RequestSequence | None = None
    executors: tuple[tuple[float, str], ...] = ()
    adapter_slot: int = -1
    timeline: Timeline = field(default_factory=Timeline)
    features: "tuple[Feature, ...]" = ()
    short_rope_len: int = ONE_ROPE
    ref: RequestRef = field(init=False)

    def __post_init__(self) -> None:
        adapter = self.params.adapter
        self.ref = RequestRef(self.request_id, self.params.key, adapter.name if adapter is not None else "")

    def placed(self, executor_id: str, now: float) -> None:
        """Note that an executor takes it on at ``now``, in seconds."""
        self.executors = (*self.executors[1 - _PLACEMENTS :], (now, executor_id))

    def create_sequences(self, *, every: bool = False) -> None:
        """Create its first sequence, unless there are some: a request that moves goes on with those it has.

        The others are created one by one, each when the one before starts, because there may be thousands of them, of
        which few run at a time. ``every``: create all of them now.
        """
        if not self.sequences:
            self.num_pending = 1 if self.params.beam is not None else self.params.n
            self.create_next()
        while every and self.num_pending:
            self.create_next()

    def create_next(self) -> RequestSequence:
        """Create the next sequence that is pending, with a block table like that of the one before."""
        index = len(self.sequences)
        block_size = self.sequences[-1].table.block_size if index else 1
        params = self.params
        sampling = sequence_sampling(params.sampling, index)
        if params.beam is not None:
            wanted = params.beam.num_candidates(len(sampling.stop_token_ids))
            sampling = msgspec.structs.replace(sampling, temperature=0.0, logprobs=wanted, beam=True)
        stop_ids = _stop_set(sampling.stop_token_ids)
        made = RequestSequence(
            self, index, sampling, BlockTable(block_size, params.cache_salt, self.ref), stop_ids=stop_ids
        )
        made.sink, made.stream = self.sink, self.stream + index
        self.sequences.append(made)
        self.num_pending -= 1
        return made

    def replace_sequences(self, sequences: list[RequestSequence]) -> None:
        """Have these sequences from now on, and forget what happened to the others.

        They refer to the request, and what happened to them refers to them: else they would wait for the garbage
        collector, which looks seldom.
        """
        for sequence in self.sequences:
            if sequence not in sequences:
                sequence.history = ()
        self.sequences = sequences

    def fail(self) -> None:
        """End what has not finished."""
        self.num_pending = 0
        for sequence in self.sequences:
            if not sequence.finished:
                sequence.end("error")

    def aborted(self, index: int) -> RequestSequence:
        """An output that has nothing to show."""
        sequence = RequestSequence(self, index, self.params.sampling, BlockTable(1))
        sequence.end("abort")
        return sequence

    def ending(self, output_token_ids: Sequence[int]) -> int:
        """How a use of its prefix ends that has brought this output (see ``eviction.ending``)."""
        reuse = self.params.reuse
        return eviction.ending(
            len(output_token_ids),
            retention=reuse.retention,
            tool_call=any(token in output_token_ids for token in reuse.tool_call_ids),
            priority=self.params.priority,
        )

    @property
    def owner(self) -> "Request":
        """Itself, or the request for a segment of which it computes."""
        return self if self.computes_for is None else self.computes_for.request

    @property
    def cached_tokens(self) -> dict[str, int]:
        """Tokens of the prompt that were found when it first ran, by where they lay (see ``SOURCES``)."""
        on_device = {tier_name(DEVICE): self.num_cached_tokens - sum(self.loaded_tokens.values())}
        return dict.fromkeys(SOURCES, 0) | on_device | self.loaded_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all its outputs."""
        return sum(len(sequence.output_token_ids) for sequence in self.sequences)

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: who is served first, and who is preempted last."""
        return (self.params.priority, self.arrival_time)

    @property
    def finished(self) -> bool:
        """Whether all its sequences have finished."""
        # Looks at the last one first: sequences mostly end in their order, and this is asked after each of them.
        return not self.num_pending and all(
            sequence.status is SequenceStatus.FINISHED for sequence in reversed(self.sequences)
        )


def sequence_sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    """Sampling parameters of sequence ``index``: its own random stream, and prompt logprobs reported once."""
    if index == 0:
        return sampling
    seed = (sampling.seed + index * _SEED_STRIDE) % 2**64
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=None)


@lru_cache(maxsize=16)
def _stop_set(stop_token_ids: tuple[int, ...]) -> frozenset[int]:
    """What each token is looked up in: one set for all requests that end alike, because it is touched so often."""
    return frozenset(stop_token_ids)

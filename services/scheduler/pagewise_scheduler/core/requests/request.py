"""Requests and their sequences: the parameters of a generation, and its progress."""

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
from pagewise_shared.thinking import ThinkingState

from pagewise_scheduler.core.memory import eviction
from pagewise_scheduler.core.memory.block_table import BlockTable, WindowTable
from pagewise_scheduler.core.memory.eviction_history import RequestRef
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.timeline import Timeline
from pagewise_scheduler.core.requests.virtual_tokens import Account

if TYPE_CHECKING:
    from pagewise_scheduler.core.features.beams import BeamSearch
    from pagewise_scheduler.core.features.feature import Feature

FinishReason = Literal["stop", "length", "abort", "error"]

_HISTORY = 64
_PLACEMENTS = 8
_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: neighbouring sequences get far-apart random streams


class TokenSink(Protocol):
    """Receives the tokens that come back: parallel lists of the streams to which they belong, and of the tokens."""

    streams: list[int]
    tokens: list[int]


class SequenceStatus(Enum):
    """WAITING (for admission, fresh or preempted) -> PREFILL -> DECODE -> FINISHED; preemption leads back to WAITING.

    A sequence that leaves its row while its last token there is in flight is DRAINING. When the token comes, it
    finishes, migrates, or waits again.
    """

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    DRAINING = auto()
    FINISHED = auto()


@dataclass(slots=True, frozen=True)
class Preempted:
    """A preemption for the request ``by``: the sequence dropped its ``blocks``, of which ``freed`` were not shared.
    ``time``: seconds of the caller's clock."""

    time: float
    reason: str
    blocks: int
    freed: int
    by: RequestRef | None = None


@dataclass(slots=True, eq=False)
class RequestSequence:
    """One of a request's n outputs.

    Fields:
        output_token_ids: tokens of returned steps, in order. Together with the prompt they suffice to continue the
            sequence on another executor.
        sink, stream: the receiver of its tokens, and its stream number there, until it ends; None: no receiver.
        row: its row of the executor while it runs, else -1.
        num_scheduled_tokens: leading known tokens whose K and V are computed, or will be by a step in flight.
            Updated only in PREFILL, because in DECODE each step computes one more.
        decode_base: the position that its first decode computes.
        num_computed_tokens: leading known tokens that returned steps have computed, while it prefills.
        prefilled: whether its last prefill step has returned; from then on all tokens but the newest are computed.
        block_due, length_due: the steps in which it needs its next block, and reaches its length.
        last_step: the newest planned step that computes it.
        path: while it waits, the cached blocks of its prefix at the last look-up.
        num_tokens_preempted: its output tokens at its last preemption.
        history: its last recoveries and preemptions, the newest last.
        num_passed: number of sequences that started before it while it was the head of the queue.
        draft_after, draft_pause: the number of its tokens from which on drafts are allowed, and the number of tokens
            that it has taken without a draft since the last draft.
        thinking: how far it has used its thinking budget, as far as drafts need to know; None: it has none.
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
    thinking: ThinkingState | None = None

    def note(self, event: object) -> None:
        """Remember an event of its memory: a ``Recovery`` with which it begins or comes back, or ``Preempted``."""
        # A tuple, because an empty one takes no memory, and thousands of sequences have no events yet.
        self.history = (*self.history[1 - _HISTORY :], event)

    def came_back(self, num_computed: int) -> bool:
        """A step has computed its first ``num_computed`` tokens; False: it was preempted or has ended meanwhile."""
        drains = self.status is SequenceStatus.DRAINING
        if self.row < 0 and not drains:
            return False
        self.num_computed_tokens = num_computed
        self.prefilled = (drains or self.status is SequenceStatus.DECODE) and num_computed == self.decode_base
        return True

    def end(self, reason: FinishReason | None, stop_reason: str | int | None = None) -> None:
        """Let it take no more tokens. ``reason``: None if no client is to be informed."""
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
        """The number of tokens at which it ends for its length."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens

    @property
    def cache_salt(self) -> str | None:
        """The salt of the cache that it may share now: its request's, or another one beyond ``short_rope_len``."""
        return rope_salt(self.request.params.cache_salt, self.num_tokens, self.request.short_rope_len)

    @property
    def outgrown(self) -> bool:
        """Whether its output has brought it beyond ``short_rope_len``."""
        return self.num_prompt_tokens <= self.request.short_rope_len < self.num_tokens

    @property
    def run_until(self) -> int:
        """The number of tokens at which it leaves its row: for its length, or because LongRoPE makes its KV useless."""
        border, most = self.request.short_rope_len, self.max_num_tokens
        return border + 1 if self.num_tokens <= border < most else most

    @property
    def finished(self) -> bool:
        """Whether it takes no more tokens."""
        return self.status is SequenceStatus.FINISHED

    @property
    def ending(self) -> int | None:
        """How this use of its blocks ends, from which eviction learns; None if it is not the last sequence of its
        request to end, because all outputs of a request are one use of its prompt."""
        request = self.request
        last = not request.num_pending and all(other.finished or other is self for other in request.sequences)
        return request.ending(self.output_token_ids) if last and request.params.beam is None else None

    def num_to_compute(self, size: int) -> int:
        """The number of the last ``size`` scheduled tokens that are computed, not moved from segments."""
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
    """One prompt from which n sequences are generated. Times are seconds of the caller's clock; NaN: not known yet.

    Fields:
        params: from its gateway; ``cache_salt`` includes the hash of the adapter.
        sequences: the sequences created so far, by index. num_pending: number of sequences still to be created.
        sink, stream: the receiver of its outputs' tokens, and the stream of the first output.
        search: the state of its beam search. num_sampled_tokens: the tokens of all its hypotheses.
        scheduled_time, first_token_time: when it first ran, and when the first token of its first output came.
        num_cached_tokens: tokens of the prompt that were in the cache when it first ran.
        loaded_tokens: the part of these tokens that was not on the device, by source (one of ``SOURCES``).
        account: the account of its API key, which its scheduler charges.
        queue_number: orders requests that arrived at the same time.
        stored: blocks of its first sequence that were in storage when it was placed, by the storage's identity.
        segments: segments of its prompt; ``prompt_token_ids`` marks them.
        places: the places of its prompt where other prompts are expected to leave it, as numbers of tokens before them.
        stored_originals: like ``stored``, for the originals of segments, by their tokens (int32 bytes).
        computes_for: the sequence that needs the segment which this request computes. Such a request has no output and
            no client.
        executors: the last executors on which it was placed, each with the time.
        adapter_slot: the slot of its adapter at the executor that runs it.
        timeline: the causes of its waiting times. features: the features that it uses at its scheduler.
        short_rope_len: most tokens of a sequence with the short factors of LongRoPE.
        ref: identifies it in records that outlive it, of the cache and of other requests.
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
    search: "BeamSearch | None" = None
    scheduled_time: float = float("nan")
    num_cached_tokens: int = 0
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    num_sampled_tokens: int = 0
    account: Account = field(default_factory=Account)
    queue_number: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    first_token_time: float = float("nan")
    segments: tuple[Segment, ...] = ()
    places: Sequence[int] = ()
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
        """Note that it is placed on an executor at ``now``, in seconds."""
        self.executors = (*self.executors[1 - _PLACEMENTS :], (now, executor_id))

    @property
    def placed_at(self) -> float:
        """When it was placed on its executor, or when it arrived, if it was not placed yet."""
        return self.executors[-1][0] if self.executors else self.arrival_time

    def create_sequences(self, *, every: bool = False) -> None:
        """Create its first sequence, unless it has sequences: a request that migrates continues with them.

        Each further one is created when the one before starts, because there may be thousands of them, of which few run
        at a time. ``every``: create all of them now.
        """
        if not self.sequences:
            self.num_pending = 1 if self.params.beam is not None else self.params.n
            self.create_next()
        while every and self.num_pending:
            self.create_next()

    def create_next(self) -> RequestSequence:
        """Create the next sequence that is pending, with a block table like its predecessor's."""
        index = len(self.sequences)
        block_size, windows = 1, tuple[WindowTable, ...]()
        if index:
            before = self.sequences[-1].table
            block_size, windows = before.block_size, tuple(type(one)() for one in before.windows)
        params = self.params
        sampling = sequence_sampling(params.sampling, index)
        if params.beam is not None:
            wanted = params.beam.num_candidates(len(sampling.stop_token_ids))
            sampling = msgspec.structs.replace(sampling, temperature=0.0, logprobs=wanted, beam=True)
        stop_ids = _stop_set(sampling.stop_token_ids)
        table = BlockTable(block_size, params.cache_salt, self.ref, windows)
        thinking = ThinkingState(sampling.thinking) if sampling.thinking is not None else None
        made = RequestSequence(self, index, sampling, table, stop_ids=stop_ids, thinking=thinking)
        made.sink, made.stream = self.sink, self.stream + index
        self.sequences.append(made)
        self.num_pending -= 1
        return made

    def replace_sequences(self, sequences: list[RequestSequence]) -> None:
        """Have these sequences from now on."""
        # A sequence and the events of its history refer to each other. Without this, the others would stay in memory
        # until the garbage collector runs, which is seldom.
        for sequence in self.sequences:
            if sequence not in sequences:
                sequence.history = ()
        self.sequences = sequences

    def fail(self) -> None:
        """End all sequences that have not finished."""
        self.num_pending = 0
        for sequence in self.sequences:
            if not sequence.finished:
                sequence.end("error")

    def aborted(self, index: int) -> RequestSequence:
        """A new output without tokens that was aborted."""
        sequence = RequestSequence(self, index, self.params.sampling, BlockTable(1))
        sequence.end("abort")
        return sequence

    def ending(self, output_token_ids: Sequence[int]) -> int:
        """How a use of its prefix ends with this output, see ``eviction.ending``."""
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
        """Tokens of the prompt that were in the cache when it first ran, by their source (see ``SOURCES``)."""
        on_device = {tier_name(DEVICE): self.num_cached_tokens - sum(self.loaded_tokens.values())}
        return dict.fromkeys(SOURCES, 0) | on_device | self.loaded_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all its outputs."""
        return sum(len(sequence.output_token_ids) for sequence in self.sequences)

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: the least is served first and preempted last."""
        return (self.params.priority, self.arrival_time)

    @property
    def finished(self) -> bool:
        """Whether all its sequences have finished."""
        # The last sequence first, because sequences mostly end in their order, and this runs after the end of each.
        return not self.num_pending and all(
            sequence.status is SequenceStatus.FINISHED for sequence in reversed(self.sequences)
        )


def sequence_sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    """Sampling parameters of sequence ``index``: each has its own random stream; only the first has prompt logprobs."""
    if index == 0:
        return sampling
    seed = (sampling.seed + index * _SEED_STRIDE) % 2**64
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=None)


@lru_cache(maxsize=16)
def _stop_set(stop_token_ids: tuple[int, ...]) -> frozenset[int]:
    # Each token is looked up in such a set. Requests with equal stop tokens share one, which then stays in the
    # processor's cache.
    return frozenset(stop_token_ids)

"""A step: its limits, its record while it is in flight, and its result."""

from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from pagewise_shared.protocol import (
    RowFailure,
    StepResult,
    TokenLogprobs,
    unpack_int32s,
)

from pagewise_scheduler.core.requests.request import FinishReason, Request, RequestSequence
from pagewise_scheduler.core.tiers.cost_model import CostModel

_GOOD_STEPS_TO_WIDEN = 16

Chunks = list[tuple[RequestSequence, int]]
"""Sequences, and how many of their known tokens a step computes."""

Drafts = dict[RequestSequence, "array[int]"]
"""Sequences that decode, and the tokens that are drafted behind their known tokens."""

Proposals = Sequence[tuple[RequestSequence, int]]
"""Sequences, and the number of tokens that a draft model proposes for each."""

Finish = Callable[[RequestSequence, FinishReason, str | int | None], None]


class StepMismatchError(Exception):
    """A result does not belong to the oldest step in flight, or is not of its shape: the executor is out of step."""


class StepInFlight:
    """A planned step whose result has not come back: a token for each of ``decoding``, and ``chunks``.

    ``completed``: the sequences whose prefill it ends. ``ending``: the sequences whose length allows no further token.
    ``drafts``: the drafts of some decodes. ``sampled``: the sequences that get a token, in the order of
    ``StepResult.tokens``, ``completed`` last; a sequence with a draft occurs once per token that is drawn for it, until
    it is known how many it keeps. ``chunk_rows``: the sequences of the chunks by row. ``computed``: the sequences of
    the chunks with the token up to which each is computed. ``attention``: pairs of tokens that attend in the chunks.
    ``context``: the sum of the tokens before the ends of the chunks. ``proposals``: the sequences whose tokens the
    executor's draft model takes, and how many tokens it proposes behind them, which ``proposed`` then has.
    """

    def __init__(
        self,
        step: int,
        decoding: list[RequestSequence],
        chunks: Chunks,
        completed: list[RequestSequence],
        ending: list[RequestSequence],
        drafts: Drafts,
        proposals: Proposals = (),
    ) -> None:
        self.proposals, self.proposed = proposals, array("i")
        self.step, self.completed, self.ending, self.drafts = step, completed, ending, drafts
        self.num_seqs = len(decoding) + len(chunks)
        self.num_tokens, self.attention, self.context = len(decoding) + self.num_draft_tokens, 0.0, 0
        for sequence, size in chunks:
            computed = sequence.num_to_compute(size)
            self.num_tokens += computed
            self.attention += computed * (sequence.num_scheduled_tokens - size / 2)
            self.context += sequence.num_scheduled_tokens
        self.sampled = decoding
        if drafts:
            self.sampled = [sequence for sequence in decoding if sequence not in drafts]
            self.sampled += chain.from_iterable([sequence] * (len(draft) + 1) for sequence, draft in drafts.items())
        if completed:
            self.sampled = self.sampled + completed
        self.chunk_rows = {sequence.row: sequence for sequence, _ in chunks}
        self.computed = [(sequence, sequence.num_scheduled_tokens) for sequence, _ in chunks]

    def took(self, seconds: float, costs: CostModel) -> None:
        """Report the seconds that the step took to ``costs``; 0: unknown."""
        if seconds and self.chunk_rows:
            costs.computed(seconds, self.num_tokens, self.attention, self.context)
        if seconds and (num_decoding := self.num_seqs - len(self.chunk_rows)):
            costs.decoded(num_decoding, seconds)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of its drafts; behind each draft one token more is drawn."""
        return sum(map(len, self.drafts.values()))

    def give_up_drafts(self) -> None:
        """Draft nothing more for the sequences of a step that has failed, or in which its executor has died.

        The drafts may be the cause, and so may be the draft model that proposes some behind the step. The same drafts
        would be made again, and end requests that run without them.
        """
        for sequence in (*self.drafts, *(one for one, _ in self.proposals)):
            sequence.draft_after = sequence.max_num_tokens

    @property
    def begun(self) -> list[RequestSequence]:
        """The sequences of clients whose prefill it has ended."""
        return [one for one in self.completed if not one.finished and one.request.computes_for is None]

    @property
    def requests(self) -> set[Request]:
        """The requests of clients whose sequences it runs, or whose segments it computes."""
        return {sequence.request.owner for sequence in chain(self.sampled, self.chunk_rows.values())}

    def failing_requests(self, block_size: int) -> list[Request]:
        """The requests that fail with the step: its only request, if the step has and proposes no draft, and cannot be
        made smaller."""
        if self.num_seqs > 1 or self.num_tokens > max(1, block_size) or self.drafts or self.proposals:
            return []
        return list(self.requests)


@dataclass(slots=True)
class StepOutput:
    """The changes that a result made, beside the tokens that were appended to sequences.

    Fields:
        begun: sequences whose prefill has ended with a token.
        computed: sequences of whose prompts a chunk has come back, and the token up to which it computed.
        logprobs: log-probabilities of sampled tokens, for the sequences that asked for them.
        finished: sequences that ended with this result, ``finish_reason`` set.
        num_tokens: tokens that the step computed. num_sent: tokens that went to sinks.
    """

    begun: list[RequestSequence] = field(default_factory=list)
    computed: Chunks = field(default_factory=list)
    logprobs: dict[RequestSequence, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[tuple[Request, tuple[TokenLogprobs, ...]]] = field(default_factory=list)
    finished: list[RequestSequence] = field(default_factory=list)
    num_tokens: int = 0
    num_sent: int = 0


class StepLimits:
    """How large a step may be: ``max_num_seqs`` sequences and ``max_num_batched_tokens`` tokens.

    A failed step halves both; a run of good steps doubles them again, up to the configured size. So repeated failures
    end at a step with a single sequence, which identifies the request that cannot run even alone.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError("a step holds at least one sequence and one token")
        # Decodes go first and each takes one token: the budget has to hold all of them.
        self.configured_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.configured_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = self.configured_num_seqs
        self.max_num_batched_tokens = self.configured_num_batched_tokens
        self._good_steps = 0

    def step_failed(self, num_seqs: int, num_tokens: int) -> None:
        """A step of this size failed: go below half of it."""
        self._good_steps = 0
        self.max_num_seqs = max(1, min(self.max_num_seqs, num_seqs) // 2)
        self.max_num_batched_tokens = max(self.max_num_seqs, min(self.max_num_batched_tokens, num_tokens) // 2)

    def step_succeeded(self) -> None:
        """A step came back: after enough of them, widen again."""
        self._good_steps += 1
        if self._good_steps >= _GOOD_STEPS_TO_WIDEN:
            self._good_steps = 0
            self.max_num_seqs = min(self.configured_num_seqs, self.max_num_seqs * 2)
            self.max_num_batched_tokens = min(self.configured_num_batched_tokens, self.max_num_batched_tokens * 2)


def check_result(
    step: StepInFlight | None, result: StepResult, tokens: Sequence[int] | None = None
) -> tuple[StepInFlight, Sequence[int]]:
    """Check that ``result`` belongs to ``step``, the oldest step in flight; returns the step and the result's tokens.

    ``tokens``: of ``result``, if they are unpacked already.

    Raises:
        StepMismatchError: it is another step's, or of the wrong shape.
        ProtocolError: its tokens are no whole number of int32 values.
    """
    if step is None or result.step != step.step:
        expected = f"step {step.step}" if step else "none in flight"
        raise StepMismatchError(f"result of step {result.step}, expected {expected}")
    if tokens is None:
        tokens = unpack_int32s(result.tokens)
    if len(tokens) != len(step.sampled):
        raise StepMismatchError(f"step {step.step} returned {len(tokens)} tokens for {len(step.sampled)} sequences")
    if len(result.proposed) != 4 * (wanted := sum(count for _, count in step.proposals)):
        raise StepMismatchError(f"step {step.step} returned {len(result.proposed)} bytes for {wanted} proposed tokens")
    step.proposed = unpack_int32s(result.proposed)
    given = {entry.index: len(entry.top_ids) // 4 for entry in result.logprobs}
    for index, sequence in enumerate(step.completed, len(step.sampled) - len(step.completed)):
        for feature in sequence.request.features:
            if given.get(index, 0) < feature.num_candidates(sequence):
                raise StepMismatchError(f"step {step.step} returned too few log-probabilities for a sequence")
    return step, tokens


def failed(
    step: StepInFlight | None, result: StepResult, requests: Container[str]
) -> Iterator[tuple[RequestSequence, RowFailure]]:
    """The sequences whose rows failed in ``result``, and why; nothing if it does not belong to ``step``.

    ``requests``: the ids of the requests that count.
    """
    if step is None or result.step != step.step:
        return
    for failure in result.failures:
        sequence = step.sampled[failure.index] if failure.index < len(step.sampled) else None
        if sequence is not None and not sequence.finished and sequence.request.request_id in requests:
            yield sequence, failure


def take_logprobs(step: StepInFlight, result: StepResult, output: StepOutput) -> set[RequestSequence]:
    """Put log-probabilities into ``output``; returns the sequences whose log-probabilities and tokens features took."""
    taken: set[RequestSequence] = set()
    for entry in result.logprobs:
        if 0 <= entry.index < len(step.sampled):
            sequence = step.sampled[entry.index]
            if sequence.finished:
                continue
            if any(feature.take_logprobs(sequence, entry, output) for feature in sequence.request.features):
                taken.add(sequence)
            else:
                output.logprobs[sequence] = entry
    for prompt in result.prompt_logprobs:
        if (owner := step.chunk_rows.get(prompt.row)) is not None:
            output.prompt_logprobs.append((owner.request, prompt.entries))
    return taken


def take_tokens(
    step: StepInFlight, tokens: Sequence[int], taken: Container[RequestSequence], output: StepOutput, finish: Finish
) -> None:
    """Append each token to its sequence and to its sink, and ``finish`` sequences that stop or reach their length.

    ``taken``: sequences whose tokens features have taken.
    """
    stopped: list[tuple[RequestSequence, int]] = []
    num_without_sink = 0
    for sequence, token in zip(step.sampled, tokens, strict=True):  # runs for every token
        sink = sequence.sink
        if sink is not None:
            sequence.output_token_ids.append(token)
            sink.streams.append(sequence.stream)
            sink.tokens.append(token)
        else:
            num_without_sink += 1
            if sequence.finished or sequence in taken or not sequence.request.max_tokens:
                continue
            sequence.output_token_ids.append(token)
        if token in sequence.stop_ids:
            stopped.append((sequence, token))
    output.num_sent = len(step.sampled) - num_without_sink
    _finish_stopped(step, stopped, output, finish)


def _finish_stopped(
    step: StepInFlight, stopped: list[tuple[RequestSequence, int]], output: StepOutput, finish: Finish
) -> None:
    ended: list[RequestSequence] = []
    # An executor samples an end before ``min_tokens`` only if the grammar allows nothing else.
    for sequence, token in stopped:
        if len(sequence.output_token_ids) > sequence.sampling.min_tokens or sequence.sampling.grammar:
            finish(sequence, "stop", token)
            ended.append(sequence)
    for sequence in step.ending:
        if not sequence.finished and sequence.num_tokens >= sequence.max_num_tokens:
            finish(sequence, "length", None)
            ended.append(sequence)
    output.finished += [sequence for sequence in ended if sequence.request.computes_for is None]

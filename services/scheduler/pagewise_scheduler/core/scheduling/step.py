"""A step: its limits, its plan with the copies in it, its record while it is in flight, and its result."""

from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
from pagewise_shared.block_hash import BlockHash, pack_names
from pagewise_shared.protocol import (
    DEVICE,
    BlockCopies,
    GroupedStepPlan,
    NewSequence,
    RowFailure,
    SegmentMove,
    StepPlan,
    StepResult,
    TokenLogprobs,
    pack_int32s,
    unpack_int32s,
)
from pagewise_shared.protocol.limits import MAX_MOVES, SEQUENCE_OVERHEAD_BYTES
from pagewise_shared.sampling import TokenConstraints
from pagewise_shared.segments import MAX_MOVED_TOKENS

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, name_of
from pagewise_scheduler.core.requests.request import FinishReason, Request, RequestSequence
from pagewise_scheduler.core.tiers.cost_model import CostModel
from pagewise_scheduler.core.tiers.tier import Copies

_GOOD_STEPS_TO_WIDEN = 16

Chunks = list[tuple[RequestSequence, int]]
"""Sequences, and how many of their known tokens a step computes."""

Drafts = dict[RequestSequence, "array[int]"]
"""Sequences that decode, and the tokens that are drafted behind their known tokens."""

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
    ``context``: the sum of the tokens before the ends of the chunks.
    """

    def __init__(
        self,
        step: int,
        decoding: list[RequestSequence],
        chunks: Chunks,
        completed: list[RequestSequence],
        ending: list[RequestSequence],
        drafts: Drafts,
    ) -> None:
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

        The drafts may be the cause. The same drafts would be made again, and end requests that run without them.
        """
        for sequence in self.drafts:
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
        """The requests that fail with the step: its only request, if it has no draft and cannot be made smaller."""
        if self.num_seqs > 1 or self.num_tokens > max(1, block_size) or self.drafts:
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


_Lists = dict[tuple[int, int, int], list[int | CachedBlock]]
"""Pairs of source block and target block, one after the other, by source tier, target tier and group of layers."""


class PendingCopies:
    """Collects the copies of the next plan in lists, each between two tiers, in an order that keeps every copy's source
    intact until it is read.

    Demotions come first, because the copies after them may write the blocks that they read on the device. Among the
    demotions, copies out of lower tiers come first, because the others write there. Copies inside the device come last.
    A list has a target more than once if its tier has evicted the block again before it came: the last source counts.
    """

    def __init__(self) -> None:
        self._inside: list[int] = []
        self._lists: list[_Lists] = []
        self._written: set[tuple[int, int, int | CachedBlock]] = set()

    def __bool__(self) -> bool:
        return bool(self._inside or self._lists)

    @property
    def demotes(self) -> bool:
        """Whether some of the copies go to a lower tier."""
        return bool(self._lists)

    def add(self, copies: Copies) -> None:
        """Add copies that have to be made before their sources are overwritten."""
        for source, source_block, target, target_block, group in copies:
            if target == DEVICE:
                assert isinstance(target_block, int)
                self._inside += (source_block, target_block)
                continue
            # If the source is the target of a copy of this plan, that copy has to come first: begin new lists.
            if not self._lists or (source, group, source_block) in self._written:
                self._lists.append({})
                self._written.clear()
            self._lists[-1].setdefault((source, target, group), []).extend((source_block, target_block))
            self._written.add((target, group, target_block))

    def give_up(self, blocks: Iterable[int]) -> None:
        """Drop the copies inside the device into these blocks."""
        targets = set(blocks)
        pairs = zip(self._inside[::2], self._inside[1::2], strict=True)
        self._inside = [block for pair in pairs if pair[1] not in targets for block in pair]

    def forget_copies_on_write(self) -> None:
        """Drop the copies inside the device, and keep the demotions."""
        self._inside = []

    def clear(self) -> None:
        """Drop all copies."""
        self._inside, self._lists = [], []
        self._written.clear()

    def take(self) -> list[BlockCopies]:
        """Remove and return all copies, in order."""
        taken = [
            _block_copies(*between, lists[between]) for lists in self._lists for between in sorted(lists, reverse=True)
        ]
        if self._inside:
            taken.append(BlockCopies(DEVICE, DEVICE, pack_int32s(self._inside)))
        self.clear()
        return taken


def _block_copies(source: int, target: int, group: int, pairs: list[int | CachedBlock]) -> BlockCopies:
    nodes = [node for node in pairs[1::2] if isinstance(node, CachedBlock)]
    if not nodes:
        return BlockCopies(source, target, pack_int32s(pairs), group=group)  # type: ignore[arg-type]
    indexed = chain.from_iterable(zip(pairs[::2], range(len(nodes)), strict=True))
    names = pack_names(map(name_of, nodes))
    return BlockCopies(source, target, pack_int32s(indexed), names=names, group=group)  # type: ignore[arg-type]


class PlanBuilder:
    """Collects the changes that the next plan carries.

    ``copies``: between blocks of this executor. ``chunks``: rows, and how many of their known tokens the step computes.
    ``computed``: rows, and how many of their first tokens have their KV now, because it was loaded. ``moves``: of parts
    of segments, made before anything is computed. ``drafts``: of sequences that decode. ``joined_bytes``: the bytes
    that the sequences that join take in the plan, with their constraints.
    """

    def __init__(self) -> None:
        self.copies = PendingCopies()
        self.clear()

    def clear(self) -> None:
        """Forget everything collected so far except the demotions: their blocks are in lower tiers already, as far as
        the tiers' bookkeeping says."""
        self.copies.forget_copies_on_write()
        self._left: list[int] = []
        self._joined: list[NewSequence] = []
        self._tables: list[tuple[int, int, int]] = []
        self.computed: list[tuple[int, int]] = []
        self.chunks: list[tuple[int, int]] = []
        self.moves: list[SegmentMove] = []
        self.drafts: Drafts = {}
        self._constraints: dict[TokenConstraints, int] = {}
        self.joined_bytes = 0
        self._windows: list[tuple[int, int, int]] = []
        self._states: list[tuple[int, int, int, int]] = []
        self._window_copies: dict[tuple[int, int], int] = {}  # by group and target block

    def leave(self, row: int) -> None:
        """The row's sequence leaves. Drops the changes that the next plan had for it."""
        joined = next((new for new in self._joined if new.row == row), None)
        if joined is None:
            self._left.append(row)
        else:  # the executor does not know the sequence yet
            self._joined.remove(joined)
            self.joined_bytes -= _size(joined)
            if not self._joined:
                self._constraints.clear()
                self.joined_bytes = 0
            self.copies.give_up(unpack_int32s(joined.blocks))
            for group, (_, blocks) in enumerate(joined.windows, 1):
                for block in unpack_int32s(blocks) if self._window_copies else ():
                    self._window_copies.pop((group, block), None)
        self._tables = [change for change in self._tables if change[0] != row]
        self.computed = [computed for computed in self.computed if computed[0] != row]
        self._windows = [change for change in self._windows if change[0] != row]
        self._states = [change for change in self._states if change[0] != row]
        self.moves = [move for move in self.moves if move.row != row]
        self.drafts = {sequence: draft for sequence, draft in self.drafts.items() if sequence.row != row}

    def copy(self, copies: Copies) -> None:
        """Make these copies before their sources are overwritten."""
        if copies:
            self.copies.add(copies)

    def set_blocks(self, row: int, index: int, blocks: list[int]) -> None:
        """The row's block table has ``blocks`` from ``index`` on."""
        self._tables += [(row, number, block) for number, block in enumerate(blocks, index)]

    def set_windows(self, row: int, added: Iterable[tuple[int, int, int]], *, joins: bool = False) -> None:
        """The row's tables of windowed layers have these further blocks, as ``grow_windows`` returns them.

        ``joins``: it takes its row in this plan, with its whole windows and the states with which it begins.
        """
        for group, token, block in added:
            if token >= 0:
                self._states.append((row, group, token, block))
            elif not joins:
                self._windows.append((row, group, block))

    def join(self, sequence: RequestSequence, num_computed_tokens: int, root: BlockHash) -> None:
        """The sequence takes its row, with the blocks it holds now. ``root``: the hash before its first block."""
        sampling, constraints = sequence.sampling, -1
        if (shared := sampling.constraints) is not None:
            sampling = msgspec.structs.replace(sampling, constraints=None)
            if shared not in self._constraints:
                self._constraints[shared] = len(self._constraints)
                self.joined_bytes += shared.num_bytes
            constraints = self._constraints[shared]
        windows = (one.joined() for one in sequence.table.windows)
        joined = NewSequence(
            row=sequence.row,
            tokens=sequence.token_bytes(),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
            blocks=pack_int32s(sequence.table.blocks),
            sampling=sampling,
            root=root,
            constraints=constraints,
            adapter=sequence.request.adapter_slot,
            windows=tuple((first, pack_int32s(blocks)) for first, blocks in windows),
        )
        self.joined_bytes += _size(joined)
        self._joined.append(joined)
        for group, one in enumerate(sequence.table.windows, 1):
            if one.source >= 0:
                self._window_copies[group, one.blocks[-1]] = one.source
                one.source = -1

    @property
    def moves_enough(self) -> bool:
        """Whether no other sequence with segments goes on in this plan."""
        return len(self.moves) >= MAX_MOVES or sum(one.stop - one.start for one in self.moves) >= MAX_MOVED_TOKENS

    def build(self, epoch: int, step: int, loads: list[BlockCopies], unmapped: bytes = b"") -> StepPlan:
        """The plan with everything collected so far. Empties the builder.

        ``loads``: copies to the device. ``unmapped``: see ``GroupedStepPlan``.
        """
        # Loads come last: they may overwrite the sources of demotions and of copies inside the device.
        copies = (*self.copies.take(), *loads) if self.copies or loads else ()
        if self._window_copies:
            copies = (*copies[: len(copies) - len(loads)], *_in_groups(self._window_copies), *loads)
        plan = StepPlan(
            epoch=epoch,
            step=step,
            left=tuple(self._left),
            copies=copies,
            joined=tuple(self._joined),
            tables=pack_int32s([*chain.from_iterable(self._tables)]) if self._tables else b"",
            computed=tuple(self.computed),
            chunks=tuple(self.chunks),
            constraints=tuple(self._constraints),
            moves=tuple(self.moves),
            drafts=tuple((sequence.row, draft.tobytes()) for sequence, draft in self.drafts.items()),
        )
        if unmapped or self._windows or self._states:
            windows, states = (pack_int32s([*chain.from_iterable(some)]) for some in (self._windows, self._states))
            plan = GroupedStepPlan(**msgspec.structs.asdict(plan), windows=windows, unmapped=unmapped, states=states)
        self.clear()
        return plan


def _in_groups(sources: dict[tuple[int, int], int]) -> Iterator[BlockCopies]:
    """The copies inside the device in each group of windowed layers. ``sources``: by group and target block."""
    by_group: dict[int, list[int]] = {}
    for (group, target), source in sources.items():
        by_group.setdefault(group, []).extend((source, target))
    for group, pairs in by_group.items():
        yield BlockCopies(DEVICE, DEVICE, pack_int32s(pairs), group=group)


def _size(joined: NewSequence) -> int:
    """An upper bound on the bytes of a sequence in a plan, without constraints that it shares with other sequences."""
    grammar = joined.sampling.grammar
    size = len(grammar) if grammar.isascii() else len(grammar.encode())
    windows = sum(len(blocks) for _, blocks in joined.windows)
    return len(joined.tokens) + len(joined.blocks) + windows + size + SEQUENCE_OVERHEAD_BYTES


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

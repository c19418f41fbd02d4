"""The input batch: the state of every sequence that the executor runs, kept from step to step.

A step plan carries changes only. The input batch applies them, refuses plans that contradict its state, and returns the
work of the step. Each sequence has a row: its index in the batch's arrays, the sampler and the plans. This module does
not import torch, because the simulated runner uses it too.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from pagewise_shared.protocol import DEVICE, NewSequence, SegmentMove, StepPlan
from pagewise_shared.sampling import SamplingParams
from pagewise_shared.segments import MOVED, TOKEN_ID

from pagewise_executor.block_copies import CopyJob
from pagewise_executor.plan_checks import (
    ANY_TOKEN,
    InvalidPlanError,
    check_constraints,
    check_sampling,
    check_tokens,
    checked_copies,
    with_constraints,
)
from pagewise_executor.step_work import (
    Chunk,
    Draft,
    Int32s,
    Int64s,
    SequenceState,
    StepWork,
    checked_drafts,
    checked_proposals,
)

_NO_SEGMENTS: Int64s = np.zeros((0, 2), np.int64)


class InputBatch:
    """The sequences of an executor, their block tables, and the set of rows that decode.

    Arrays that are indexed by row hold the state that every step reads. ``num_computed`` [num_rows]: the number of
    tokens whose K and V are in the pool. ``block_tables`` [num_rows, max_blocks] int32: the first ``num_blocks``
    [num_rows] entries of each row are valid. ``on_remove``: called when a sequence leaves, with its state, its blocks,
    and the number of its tokens that are in them. ``vocab_size``: plans may only name tokens below it. ``tiers``: the
    number of blocks of each tier below the device, by the tier's number; 0 if they have no ids. ``adapters``
    [num_rows]: the slot of each row's adapter, -1 for none, out of ``num_adapters`` slots. ``limits`` [num_rows]: the
    most tokens of each row, ``short_rope_len`` if it has joined with no more than that.
    """

    shares_prefixes = True

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        pool_blocks: int,
        tiers: Mapping[int, int] | None = None,
        vocab_size: int = ANY_TOKEN,
        num_adapters: int = 0,
        short_rope_len: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.block_size, self.pool_blocks = block_size, pool_blocks
        self._num_blocks_of = {DEVICE: pool_blocks, **(tiers or {})}
        self.max_model_len, self._short_rope_len = max_model_len, short_rope_len or max_model_len
        max_blocks = -(-max_model_len // block_size)
        self.sequences: dict[int, SequenceState] = {}
        self.num_computed: Int64s = np.zeros(num_rows, np.int64)
        self.num_blocks: Int64s = np.zeros(num_rows, np.int64)
        self.block_tables: Int32s = np.zeros((num_rows, max_blocks), np.int32)
        self.on_remove: Callable[[SequenceState, Int32s, int], None] = lambda sequence, blocks, num_computed: None
        self._num_rows, self._num_adapters = num_rows, num_adapters
        self.limits: Int64s = np.zeros(num_rows, np.int64)
        self.adapters: Int64s = np.full(num_rows, -1, np.int64)
        self._decoding: dict[int, None] = {}
        self._order: Int64s = np.zeros(0, np.int64)
        self._changed = False
        self._changed_tables: list[tuple[int, int, int]] = []

    def apply(self, plan: StepPlan) -> StepWork:
        """Apply the changes of a plan and return the work of the step.

        Raises:
            InvalidPlanError: the plan contradicts the batch, or names blocks or tokens that do not exist.
        """
        self._check_groups(plan)
        for row in plan.left:
            self.remove(row)
        check_constraints(plan.constraints, self.vocab_size)
        joined = [self._join(new, with_constraints(new, plan.constraints)) for new in plan.joined]
        self._change_tables(int32s(plan.tables))
        if self._changed:
            self._order = np.fromiter(self._decoding, np.int64, len(self._decoding))
        self._check_slots(self._order)
        for row, num_computed in plan.computed:
            self._set_computed(row, num_computed)
        drafts, verified, order = self._drafts(plan.drafts)
        work = StepWork(
            decoding=order,
            changed=self._changed or bool(drafts),
            chunks=verified + self._chunks(plan),
            joined=joined,
            left=list(plan.left),
            copies=self._copies(plan),
            changed_tables=self._changed_tables,
            moves=plan.moves,
            reached=[(row, int(self.num_computed[row]) + size) for row, size in plan.chunks],
            drafts=drafts,
        )
        self._check_moves(plan)
        if plan.proposals:
            work.proposals = checked_proposals(int32s(plan.proposals), work)
        self._changed, self._changed_tables = bool(drafts), []
        return work

    def remove(self, row: int) -> None:
        """Remove a sequence; its row is free for another one.

        Raises:
            InvalidPlanError: the row holds none.
        """
        if (held := self.sequences.pop(row, None)) is None:
            raise InvalidPlanError(f"row {row} leaves but holds no sequence")
        if row in self._decoding:
            del self._decoding[row]
            self._changed = True
        self.on_remove(held, self.block_tables[row, : self.num_blocks[row]], int(self.num_computed[row]))

    def advance(self, work: StepWork) -> None:
        """Count the tokens of an issued step as computed. Rows whose prefill is complete decode from now on."""
        self.num_computed[work.decoding] += 1
        for draft in work.drafts:
            self.num_computed[draft.row] = draft.start + 1 + draft.num_accepted
        for row, num_computed in work.reached:
            self.num_computed[row] = num_computed
        for chunk in work.chunks:
            if chunk.completes:
                self._decoding[chunk.row] = None
                self._changed = True

    def flat_batch(self, work: StepWork) -> tuple[Int64s, Int64s]:
        """Return the row and the position of each token of a step [tokens]: decodes first, then prefill chunks."""
        rows = np.concatenate([work.decoding, *(np.full(c.size, c.row, np.int64) for c in work.chunks)])
        positions = np.concatenate(
            [self.num_computed[work.decoding], *(np.arange(c.start, c.start + c.size) for c in work.chunks)]
        )
        return rows, positions

    def sampled_positions(self, work: StepWork) -> Int64s:
        """Return the positions of the tokens that a step samples, in the order of the sampled rows."""
        sampled = [position for c in work.drafted for position in range(c.start + 1, c.start + c.size + 1)]
        sampled += [c.start + c.size for c in work.chunks[len(work.drafts) :] if c.completes]
        return np.concatenate([self.num_computed[work.decoding] + 1, np.array(sampled, np.int64)])

    def chunk_tokens(self, work: StepWork) -> Int64s:
        """Return the tokens of the chunks of a step [tokens of all chunks]."""
        tokens = [draft.computed_tokens for draft in work.drafts]
        tokens += [self.sequences[c.row].tokens[c.start : c.start + c.size] for c in work.chunks[len(work.drafts) :]]
        return np.concatenate([np.zeros(0, np.int64), *tokens])

    def kept_logits(self, work: StepWork) -> tuple[list[int], list[tuple[Chunk, int]]]:
        """Return the indices of the flat batch whose logits are needed: of the sampled rows, then of prompts that
        report log-probabilities; and the chunks of these prompts, each with the number of positions it reports."""
        kept = list(range(len(work.decoding)))
        extra: list[int] = []
        reported: list[tuple[Chunk, int]] = []
        for offset, chunk in work.chunk_offsets():
            kept += range(offset + chunk.size - chunk.num_sampled, offset + chunk.size)
            held = self.sequences[chunk.row]
            if held.sampling.prompt_logprobs is not None:
                count = min(chunk.size, held.num_prompt_tokens - 1 - chunk.start)
                if count > 0:
                    extra += range(offset, offset + count)
                    reported.append((chunk, count))
        return kept + extra, reported

    def slot_mapping(self, rows: Int64s, positions: Int64s) -> Int64s:
        """Return the pool slot of each position [n] of its row [n]: block id times block size plus offset."""
        blocks = self.block_tables[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def overwritten(self, work: StepWork) -> Int32s:
        """Return the blocks of the device that the step, or a copy that it begins, writes to: the targets of copies,
        and blocks without computed tokens that are new in tables."""
        found = [job.pairs[:, 1] for job in work.copies if job.target == DEVICE]
        for row, start, stop in work.changed_tables:
            computed = int(self.num_computed[row]) // self.block_size
            found.append(self.block_tables[row, max(start, computed) : stop])
        return np.concatenate([np.zeros(0, np.int32), *found])

    def _check_groups(self, plan: StepPlan) -> None:
        """Check that a plan knows the groups of layers: here there is one."""
        if plan.windows or plan.unmapped or plan.states or any(new.windows for new in plan.joined):
            raise InvalidPlanError("the plan has tables of several groups, but the model has one group of layers")

    def _copies(self, plan: StepPlan) -> list[CopyJob]:
        return checked_copies(plan, [self._num_blocks_of])

    def _join(self, new: NewSequence, sampling: SamplingParams) -> int:
        if not 0 <= new.row < self._num_rows:
            raise InvalidPlanError(f"row {new.row} is not one of the {self._num_rows} rows")
        if new.row in self.sequences:
            raise InvalidPlanError(f"row {new.row} is taken")
        marked = int32s(new.tokens)
        tokens, segments = marked, _NO_SEGMENTS
        if len(marked) and marked.max() >= MOVED:
            tokens = marked & TOKEN_ID
            segments = _stretches(marked & MOVED != 0)
        if not 0 <= new.num_computed_tokens < len(tokens) <= self.max_model_len:
            raise InvalidPlanError(
                f"row {new.row} joins with {len(tokens)} tokens, {new.num_computed_tokens} of them computed; "
                f"at most {self.max_model_len} fit"
            )
        check_tokens(tokens, new.num_prompt_tokens, self.vocab_size)
        check_sampling(sampling, self.vocab_size)
        if len(segments) and segments[-1, 1] >= new.num_prompt_tokens:
            raise InvalidPlanError(f"row {new.row} joins with a segment that ends its prompt, or is not in it")
        self.sequences[new.row] = SequenceState(tokens, new.num_prompt_tokens, sampling, marked, segments, new.root)
        if not -1 <= new.adapter < self._num_adapters:
            raise InvalidPlanError(f"row {new.row} joins with adapter {new.adapter} of {self._num_adapters}")
        self.adapters[new.row] = new.adapter
        self.limits[new.row] = self._short_rope_len if len(tokens) <= self._short_rope_len else self.max_model_len
        self.num_computed[new.row] = new.num_computed_tokens
        self.num_blocks[new.row] = 0
        self._extend(new.row, int32s(new.blocks))
        return new.row

    def _change_tables(self, triples: Int32s) -> None:
        if len(triples) % 3:
            raise InvalidPlanError("changes to block tables come in triples of row, index and block")
        for row, index, block in triples.reshape(-1, 3).tolist():
            if row not in self.sequences:
                raise InvalidPlanError(f"row {row} gets a block but holds no sequence")
            if not 0 <= index <= self.num_blocks[row]:
                raise InvalidPlanError(f"row {row} gets block {index} but holds {self.num_blocks[row]}")
            if index == self.num_blocks[row]:
                self._extend(row, np.array([block], np.int32))
            elif 0 <= block < self.pool_blocks:
                self.block_tables[row, index] = block
                self._changed_tables.append((row, index, index + 1))
            else:
                raise InvalidPlanError(f"row {row} gets a block outside the pool of {self.pool_blocks}")

    def _extend(self, row: int, blocks: Int32s) -> None:
        if len(blocks) and not (blocks.min() >= 0 and blocks.max() < self.pool_blocks):
            raise InvalidPlanError(f"row {row} gets a block outside the pool of {self.pool_blocks}")
        held = int(self.num_blocks[row])
        if held + len(blocks) > self.block_tables.shape[1]:
            raise InvalidPlanError(f"row {row} gets more than {self.block_tables.shape[1]} blocks")
        self.block_tables[row, held : held + len(blocks)] = blocks
        self.num_blocks[row] = held + len(blocks)
        if len(blocks):
            self._changed_tables.append((row, held, held + len(blocks)))

    def _chunks(self, plan: StepPlan) -> list[Chunk]:
        if len({row for row, _ in plan.chunks}) < len(plan.chunks):
            raise InvalidPlanError("a row has two chunks in one step")
        return [chunk for row, size in plan.chunks for chunk in self._chunks_of(row, size)]

    def _chunks_of(self, row: int, size: int) -> list[Chunk]:
        """Return the chunks for the next ``size`` tokens of a row: one, or several with segments in between."""
        held = self.sequences.get(row)
        if held is None or row in self._decoding:
            raise InvalidPlanError(f"row {row} has no known tokens left to compute")
        start = int(self.num_computed[row])
        if not 0 < size <= len(held.tokens) - start:
            raise InvalidPlanError(f"row {row}: a chunk of {size} tokens from {start}, of {len(held.tokens)} known")
        if start + size > self.num_blocks[row] * self.block_size:
            raise InvalidPlanError(f"row {row}: {self.num_blocks[row]} blocks do not hold {start + size} tokens")
        stop, whole = start + size, len(held.tokens)
        if not len(held.segments):
            return [Chunk(row, start, size, completes=stop == whole)]
        edges = [start, *held.segments.clip(start, stop).ravel().tolist(), stop]
        parts = [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]
        return [Chunk(row, first, last - first, completes=last == whole) for first, last in parts]

    def _drafts(self, drafts: tuple[tuple[int, bytes], ...]) -> tuple[list[Draft], list[Chunk], Int64s]:
        """Return the drafts of a plan, the chunks that verify them, and the rows that decode without a draft."""
        if not drafts:
            return [], [], self._order
        if lost := [row for row, _ in drafts if row not in self._decoding]:
            raise InvalidPlanError(f"row {lost[0]} has a draft but does not decode")
        found = [Draft(row, int(self.num_computed[row]), int32s(tokens)) for row, tokens in drafts]
        slots = [int(min(self.num_blocks[one.row] * self.block_size, self.limits[one.row])) for one in found]
        found = checked_drafts(found, self.sequences, slots, self.vocab_size)
        verified = [Chunk(one.row, one.start, 1 + len(one.tokens), completes=False, drafted=True) for one in found]
        return found, verified, self._order[~np.isin(self._order, [one.row for one in found])]

    def _check_moves(self, plan: StepPlan) -> None:
        """Check the moves of a plan: rows that go on past moved tokens get all of them."""
        if not plan.moves and not plan.chunks:
            return
        moved = Counter[int]()
        for move in plan.moves:
            self._check_move(move)
            moved[move.row] += move.stop - move.start
        for row, size in plan.chunks:
            start = int(self.num_computed[row])
            stretches = self.sequences[row].segments.clip(start, start + size)
            if (passed := int((stretches[:, 1] - stretches[:, 0]).sum())) != moved[row]:
                raise InvalidPlanError(
                    f"row {row} goes on past {passed} tokens of segments, of which {moved[row]} move"
                )

    def _check_move(self, move: SegmentMove) -> None:
        if move.row not in self.sequences:
            raise InvalidPlanError(f"row {move.row} gets a segment but holds no sequence")
        size, blocks = self.block_size, int32s(move.blocks)
        first = move.first * size
        if not 0 <= first <= move.start - move.distance < move.stop - move.distance <= first + len(blocks) * size:
            raise InvalidPlanError(f"row {move.row}: the blocks of a segment do not hold its tokens")
        if not 0 <= move.start < move.stop <= self.num_blocks[move.row] * size:
            raise InvalidPlanError(f"row {move.row} has no slots for tokens {move.start} to {move.stop} of a segment")
        if not (blocks.min() >= 0 and blocks.max() < self.pool_blocks):
            raise InvalidPlanError(f"row {move.row} gets a segment from outside the pool of {self.pool_blocks}")

    def _check_slots(self, order: Int64s) -> None:
        short = self.num_computed[order] >= np.minimum(self.num_blocks[order] * self.block_size, self.limits[order])
        if short.any():
            raise InvalidPlanError(f"row {int(order[short][0])} has no slot for its next token")

    def _set_computed(self, row: int, num_computed: int) -> None:
        held = self.sequences.get(row)
        if held is None or row in self._decoding:
            raise InvalidPlanError(f"row {row} has no known tokens left to have computed")
        most = min(len(held.tokens) - 1, int(self.num_blocks[row]) * self.block_size)
        if not self.num_computed[row] <= num_computed <= most:
            raise InvalidPlanError(
                f"row {row} is to have computed {num_computed} tokens; it has {self.num_computed[row]}, at most {most}"
            )
        self.num_computed[row] = num_computed


def _stretches(marks: npt.NDArray[np.bool_]) -> Int64s:
    """Return start and stop of each stretch of marks that are set [n, 2]."""
    return np.flatnonzero(np.diff(marks, prepend=False, append=False)).reshape(-1, 2)


def int32s(data: bytes) -> Int32s:
    """Return the values of int32 bytes.

    Raises:
        InvalidPlanError: they are not a whole number of values.
    """
    if len(data) % 4:
        raise InvalidPlanError(f"{len(data)} bytes are not a whole number of int32 values")
    return np.frombuffer(data, np.int32)

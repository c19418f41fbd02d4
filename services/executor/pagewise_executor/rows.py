"""Rows: what the executor remembers of the sequences it runs. Applies plans, and refuses those that make no sense.

No torch here: the simulated runner keeps its rows in the same table.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pagewise_shared.protocol import DEVICE, NewSequence, StepPlan
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.block_copies import CopyJob
from pagewise_executor.plan_checks import ANY_TOKEN, InvalidPlanError, check_sampling, check_tokens, checked_copies

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class Row:
    """One sequence: its known tokens when it joined, and how it is sampled.

    ``root``: where its chain of block hashes begins. ``sampled``: tokens that came after those known, as far as the
    host has heard of them.
    """

    tokens: Int32s
    num_prompt_tokens: int
    sampling: SamplingParams
    root: bytes = b""
    sampled: "array[int]" = field(default_factory=lambda: array("i"))

    def known_tokens(self, start: int) -> bytes:
        """The tokens from ``start`` on, as int32 bytes."""
        known = len(self.tokens)
        return self.tokens[start:].tobytes() + self.sampled[max(0, start - known) :].tobytes()


@dataclass(slots=True, frozen=True)
class Chunk:
    """Compute ``size`` known tokens of ``row`` from position ``start``; ``completes``: the last of them samples."""

    row: int
    start: int
    size: int
    completes: bool


@dataclass(slots=True)
class StepWork:
    """What a plan asks to compute.

    ``decoding`` [num_decodes]: rows that compute one token each, in order. ``changed``: its members are not those of
    the step before. ``copies``: of blocks, in order. ``changed_tables``: (row, start, stop) of stretches of block
    tables that are new.
    """

    decoding: Int64s
    changed: bool
    chunks: list[Chunk]
    joined: list[int]
    left: list[int]
    copies: list[CopyJob]
    changed_tables: list[tuple[int, int, int]]

    @property
    def sampled_rows(self) -> list[int]:
        """Rows that get a token, in the order of ``StepResult.tokens``."""
        return [*self.decoding.tolist(), *(chunk.row for chunk in self.chunks if chunk.completes)]


class RowTable:
    """Rows, their block tables and the decode set, as arrays that a step indexes with the rows it runs.

    ``num_computed`` [rows]: tokens whose K and V are in the pool. ``tables`` [rows, max_blocks] int32, of which the
    first ``num_blocks`` [rows] entries count. ``on_leave``: told of a row that leaves, its blocks, and how many of its
    tokens are in them. ``vocab_size``: tokens that plans may name. ``tiers``: blocks of each tier below the device, by
    its number.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        pool_blocks: int,
        tiers: Mapping[int, int] | None = None,
        vocab_size: int = ANY_TOKEN,
    ) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.pool_blocks = pool_blocks
        self._num_blocks_of = {DEVICE: pool_blocks, **(tiers or {})}
        self.max_model_len = max_model_len
        max_blocks = -(-max_model_len // block_size)
        self.rows: dict[int, Row] = {}
        self.num_computed: Int64s = np.zeros(num_rows, np.int64)
        self.num_blocks: Int64s = np.zeros(num_rows, np.int64)
        self.tables: Int32s = np.zeros((num_rows, max_blocks), np.int32)
        self.on_leave: Callable[[Row, Int32s, int], None] = lambda row, blocks, num_computed: None
        self._num_rows = num_rows
        self._decoding: dict[int, None] = {}
        self._order: Int64s = np.zeros(0, np.int64)
        self._changed = False
        self._changed_tables: list[tuple[int, int, int]] = []

    def apply(self, plan: StepPlan) -> StepWork:
        """Take over a plan's changes and tell what is to be computed.

        Raises:
            InvalidPlanError: the plan names rows, blocks or tokens that are not there.
        """
        for row in plan.left:
            if row not in self.rows:
                raise InvalidPlanError(f"row {row} leaves but holds no sequence")
            self.let_go(row)
        for new in plan.joined:
            self._join(new)
        self._change_tables(_int32s(plan.tables))
        if self._changed:
            self._order = np.fromiter(self._decoding, np.int64, len(self._decoding))
        order = self._order
        self._check_slots(order)
        for row, num_computed in plan.computed:
            self._set_computed(row, num_computed)
        if len({row for row, _ in plan.chunks}) < len(plan.chunks):
            raise InvalidPlanError("a row has two chunks in one step")
        work = StepWork(
            decoding=order,
            changed=self._changed,
            chunks=[self._chunk(row, size) for row, size in plan.chunks],
            joined=[new.row for new in plan.joined],
            left=list(plan.left),
            copies=checked_copies(plan, self._num_blocks_of),
            changed_tables=self._changed_tables,
        )
        self._changed, self._changed_tables = False, []
        return work

    def let_go(self, row: int) -> None:
        """The row's sequence is gone."""
        held = self.rows.pop(row)
        if row in self._decoding:
            del self._decoding[row]
            self._changed = True
        self.on_leave(held, self.tables[row, : self.num_blocks[row]], int(self.num_computed[row]))

    def advance(self, work: StepWork) -> None:
        """The step has been issued: its tokens count as computed, and rows that completed decode from now on."""
        self.num_computed[work.decoding] += 1
        for chunk in work.chunks:
            self.num_computed[chunk.row] = chunk.start + chunk.size
            if chunk.completes:
                self._decoding[chunk.row] = None
                self._changed = True

    def batch(self, work: StepWork) -> tuple[Int64s, Int64s]:
        """Row and position of each token of a step's flat batch [tokens]: decodes, then chunks."""
        rows = np.concatenate([work.decoding, *(np.full(c.size, c.row, np.int64) for c in work.chunks)])
        positions = np.concatenate(
            [self.num_computed[work.decoding], *(np.arange(c.start, c.start + c.size) for c in work.chunks)]
        )
        return rows, positions

    def slots(self, rows: Int64s, positions: Int64s) -> Int64s:
        """Pool slots of ``positions`` [n] of ``rows`` [n]: block id times block size plus the offset inside."""
        blocks = self.tables[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def _join(self, new: NewSequence) -> None:
        if not 0 <= new.row < self._num_rows:
            raise InvalidPlanError(f"row {new.row} is not one of the {self._num_rows} rows")
        if new.row in self.rows:
            raise InvalidPlanError(f"row {new.row} is taken")
        tokens = _int32s(new.tokens)
        if not 0 <= new.num_computed_tokens < len(tokens) <= self.max_model_len:
            raise InvalidPlanError(
                f"row {new.row} joins with {len(tokens)} tokens, {new.num_computed_tokens} of them computed; "
                f"at most {self.max_model_len} fit"
            )
        check_tokens(tokens, new.num_prompt_tokens, self.vocab_size)
        check_sampling(new.sampling, self.vocab_size)
        self.rows[new.row] = Row(tokens, new.num_prompt_tokens, new.sampling, new.root)
        self.num_computed[new.row] = new.num_computed_tokens
        self.num_blocks[new.row] = 0
        blocks = _int32s(new.blocks)
        self._extend(new.row, blocks)

    def _change_tables(self, triples: Int32s) -> None:
        if len(triples) % 3:
            raise InvalidPlanError("changes to block tables come in triples of row, index and block")
        for row, index, block in triples.reshape(-1, 3).tolist():
            if row not in self.rows:
                raise InvalidPlanError(f"row {row} gets a block but holds no sequence")
            if not 0 <= index <= self.num_blocks[row]:
                raise InvalidPlanError(f"row {row} gets block {index} but holds {self.num_blocks[row]}")
            if index == self.num_blocks[row]:
                self._extend(row, np.array([block], np.int32))
            elif 0 <= block < self.pool_blocks:
                self.tables[row, index] = block
                self._changed_tables.append((row, index, index + 1))
            else:
                raise InvalidPlanError(f"row {row} gets a block outside the pool of {self.pool_blocks}")

    def _extend(self, row: int, blocks: Int32s) -> None:
        if len(blocks) and not (blocks.min() >= 0 and blocks.max() < self.pool_blocks):
            raise InvalidPlanError(f"row {row} gets a block outside the pool of {self.pool_blocks}")
        held = int(self.num_blocks[row])
        if held + len(blocks) > self.tables.shape[1]:
            raise InvalidPlanError(f"row {row} gets more than {self.tables.shape[1]} blocks")
        self.tables[row, held : held + len(blocks)] = blocks
        self.num_blocks[row] = held + len(blocks)
        if len(blocks):
            self._changed_tables.append((row, held, held + len(blocks)))

    def _chunk(self, row: int, size: int) -> Chunk:
        held = self.rows.get(row)
        if held is None or row in self._decoding:
            raise InvalidPlanError(f"row {row} has no known tokens left to compute")
        start = int(self.num_computed[row])
        if not 0 < size <= len(held.tokens) - start:
            raise InvalidPlanError(f"row {row}: a chunk of {size} tokens from {start}, of {len(held.tokens)} known")
        if start + size > self.num_blocks[row] * self.block_size:
            raise InvalidPlanError(f"row {row}: {self.num_blocks[row]} blocks do not hold {start + size} tokens")
        return Chunk(row, start, size, completes=start + size == len(held.tokens))

    def _check_slots(self, order: Int64s) -> None:
        short = self.num_computed[order] >= np.minimum(self.num_blocks[order] * self.block_size, self.max_model_len)
        if short.any():
            raise InvalidPlanError(f"row {int(order[short][0])} has no slot for its next token")

    def _set_computed(self, row: int, num_computed: int) -> None:
        held = self.rows.get(row)
        if held is None or row in self._decoding:
            raise InvalidPlanError(f"row {row} has no known tokens left to have computed")
        most = min(len(held.tokens) - 1, int(self.num_blocks[row]) * self.block_size)
        if not self.num_computed[row] <= num_computed <= most:
            raise InvalidPlanError(
                f"row {row} is to have computed {num_computed} tokens; it has {self.num_computed[row]}, at most {most}"
            )
        self.num_computed[row] = num_computed


def _int32s(data: bytes) -> Int32s:
    if len(data) % 4:
        raise InvalidPlanError(f"{len(data)} bytes are no whole number of int32 values")
    return np.frombuffer(data, np.int32)

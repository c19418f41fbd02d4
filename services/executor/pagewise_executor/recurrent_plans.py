"""The plans of recurrent layers on the device: which blocks of states each sequence of a step reads and writes.

The pages of blocks are in a table on the device. A step sends the pages of blocks that rows got since the step before,
and of each sequence the numbers of its blocks. CUDA graphs read both from memory that stays.
"""

from collections.abc import Sequence

import numpy as np
import torch
from pagewise_kernels.recurrent import CHUNK, FIELDS, ChunkPlan

from pagewise_executor.grouped_batch import GroupedBatch
from pagewise_executor.models.recurrent import RecurrentContext
from pagewise_executor.state_tables import Piece, StateTables
from pagewise_executor.step_work import Int32s
from pagewise_executor.uploads import Uploads

_ALIGNED = 4
"""Parts of the buffer begin at multiples of so many int32, as in ``mixed_graphs``."""
_CUTS = 16
"""Switches within the chunks of a step by a graph; a step with more runs without one."""


class RecurrentPlans:
    """Makes the plan of each step, and gives it to ``context``.

    ``state_bytes`` of all layers; ``num_rows`` of the input batch; ``most_tokens`` of a step by a graph with chunks.
    """

    def __init__(
        self, context: RecurrentContext, state_bytes: int, num_rows: int, most_tokens: int, device: torch.device
    ) -> None:
        self._context, self._state_bytes, self._num_rows, self._device = context, state_bytes, num_rows, device
        self._upload = Uploads(device)
        lengths = self._lengths(num_rows, longer=False), self._lengths(most_tokens, longer=True)
        self._static = torch.zeros(max(map(sum, lengths)), dtype=torch.int32, device=device)
        self._states: StateTables | None = None

    def attach(self, memory: torch.Tensor) -> None:
        """Make the table of the blocks in ``memory``, pages uint8 [pages, page bytes]."""
        pages = -(-self._state_bytes // memory.shape[1])
        self._context.tables = torch.zeros(len(memory) // pages, pages, dtype=torch.int32, device=self._device)

    def reset(self, batch: GroupedBatch) -> None:
        """Use the empty ``batch`` from now on."""
        self._states = batch.states

    def begin(self) -> None:
        """Give the plan of a step that the batch has applied to the recurrent layers; or, when a step with drafts is
        counted, the plan of the tokens that rows keep."""
        assert self._states is not None
        counts, firsts, chunks = _arrays(self._states.sequences)
        named = self._states.take_named()
        there = self._upload.together(counts, firsts, chunks, named, self._states.pages_of(named))
        self._change(*there[3:])
        longer = len(chunks) > len(firsts) - 1 or not chunks[:, 5].all()
        self._context.plan = ChunkPlan(there[0], there[1], there[2], longer)

    def fits(self, size: int) -> bool:
        """Return whether the step has no more chunks than a graph of ``size`` tokens has."""
        assert self._states is not None
        _, firsts, chunks = self._lengths(size, longer=True)
        most = sum(-(-count // CHUNK) for pieces in self._states.sequences for count, _ in pieces)
        return most <= chunks // FIELDS and len(self._states.sequences) < firsts

    def begin_static(self, size: int, *, longer: bool) -> None:
        """Write the plan of a step to the static buffer.

        ``size``: of the graph, in sequences with one token each; or in tokens if they may have more, ``longer``.
        """
        assert self._states is not None
        named = self._states.take_named()
        lengths = self._lengths(size, longer=longer)
        packed = np.zeros(sum(lengths), np.int32)
        counts, firsts, chunks = _arrays(self._states.sequences)
        packed[0], at = counts[0], lengths[0]
        packed[at : at + lengths[1]] = len(chunks)
        packed[at : at + len(firsts)] = firsts
        packed[at + lengths[1] : at + lengths[1] + chunks.size] = chunks.ravel()
        plan, *changes = self._upload.together(packed, named, self._states.pages_of(named))
        self._static[: len(packed)].copy_(plan)
        self._change(*changes)

    def use_static(self, size: int, *, longer: bool) -> None:
        """Let the recurrent layers read the plan in the static buffer: see ``begin_static``."""
        lengths = self._lengths(size, longer=longer)
        counts, firsts, chunks = torch.split(self._static[: sum(lengths)], lengths)
        most = 1 + (min(size, self._num_rows) if longer else size)
        count = (self._chunks(size) if longer else size) * FIELDS
        self._context.plan = ChunkPlan(counts, firsts[:most], chunks[:count].view(-1, FIELDS), longer)
        self._context.drafted = slice(0)

    def clear(self) -> None:
        """Fill the static buffer with padding."""
        self._static.zero_()

    def _change(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        if len(blocks):
            self._context.tables.index_copy_(0, blocks, pages)

    def _chunks(self, size: int) -> int:
        return min(size, self._num_rows) + size // CHUNK + _CUTS

    def _lengths(self, size: int, *, longer: bool) -> list[int]:
        """Return the lengths of counts, firsts and chunks in the static buffer."""
        sequences, chunks = (min(size, self._num_rows), self._chunks(size)) if longer else (size, size)
        return [_aligned(length) for length in (1, sequences + 1, chunks * FIELDS)]


def _arrays(sequences: Sequence[Sequence[tuple[int, Piece]]]) -> tuple[Int32s, Int32s, Int32s]:
    """Return the arrays of a ``ChunkPlan``."""
    firsts, chunks, tokens = [0], [], 0
    for pieces in sequences:
        begin, read = pieces[0][1].offset, pieces[0][1].read
        alone = len(pieces) == 1 and pieces[0][0] == 1 and pieces[0][1].written >= 0
        for size, piece in pieces:
            stop = piece.offset + size
            for at in range(piece.offset, stop, CHUNK):
                end = min(at + CHUNK, stop)
                chunks.append((at, end, read, piece.written if end == stop else -1, begin, alone))
            tokens = stop
        firsts.append(len(chunks))
    made = np.array(chunks, np.int32).reshape(-1, FIELDS)
    return np.array([tokens], np.int32), np.array(firsts, np.int32), made


def _aligned(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED

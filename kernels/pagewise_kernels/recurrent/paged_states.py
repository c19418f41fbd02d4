"""The states of sequences in pages, and the chunks in which a step computes them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHUNK = 64
"""Most tokens of a chunk."""
FIELDS = 6
"""Of a chunk: start, stop, read, written, begin, alone."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The tokens of a step, in chunks of at most CHUNK tokens, each of one sequence.

    ``counts`` int32 [1]: the tokens of the step; those behind are padding. ``firsts`` int32 [sequences + 1]: the first
    chunk of each sequence, and behind the last one their number. ``chunks`` int32 [chunks, FIELDS]: the tokens [start,
    stop) of the flat batch; the block from which the states of the sequence come, -1 if it begins; the block into which
    its states go behind the chunk, -1 for none; the first token of the sequence in the step; and whether this token is
    its only one. Chunks without tokens, and sequences without chunks, are padding. ``longer``: sequences may have more
    tokens than one.

    Two sequences write different blocks, and a block that one of them writes is read by no other one. A block that a
    sequence reads may be the first that it writes.
    """

    counts: torch.Tensor
    firsts: torch.Tensor
    chunks: torch.Tensor
    longer: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors."""
        return self.counts, self.firsts, self.chunks

    def check(self) -> None:
        """Raises ValueError or TypeError if shapes or types do not fit."""
        if any(one.dtype != torch.int32 or not one.is_contiguous() for one in self.tensors):
            raise TypeError(f"a plan is contiguous int32, not {[one.dtype for one in self.tensors]}")
        if self.firsts.dim() != 1 or not len(self.firsts) or self.chunks.shape[1:] != (FIELDS,):
            raise ValueError(f"a plan has {FIELDS} fields for each chunk, not {list(self.chunks.shape)}")


class BlockStates:
    """One state of a layer in the blocks of all sequences.

    ``memory`` uint8 [pages, page bytes]; ``tables`` int32 [blocks, pages per block]: the pages of each block. The state
    has ``dtype``, and begins at byte ``start`` of a block.

    Raises:
        ValueError: the state, or pages, begin in the middle of a value.
    """

    def __init__(self, memory: torch.Tensor, tables: torch.Tensor, start: int, dtype: torch.dtype) -> None:
        size = dtype.itemsize
        if memory.dim() != 2 or memory.shape[1] % size or start % size:
            raise ValueError(f"values of {size} bytes do not fit pages of {memory.shape[-1]} from byte {start} on")
        if tables.dim() != 2 or tables.dtype != torch.int32 or not tables.is_contiguous():
            raise ValueError(f"tables are contiguous int32 [blocks, pages], not {tables.dtype} {list(tables.shape)}")
        self.values, self.tables, self.start = memory.view(dtype), tables, start // size
        self.page, self.pages = memory.shape[1] // size, tables.shape[1]

    def check(self, num_values: int) -> None:
        """Raises ValueError if a block has no room for so many values."""
        if self.start + num_values > self.page * self.pages:
            raise ValueError(f"{num_values} values from {self.start} on do not fit {self.pages} pages of {self.page}")

    def has_whole_rows(self, width: int) -> bool:
        """Return whether each row of ``width`` values of a matrix lies in one page."""
        return self.page % width == 0 and self.start % width == 0


@triton.jit
def matrix_at(pages, first, rows, row_mask, columns, column_mask, WIDTH: tl.constexpr, PAGE: tl.constexpr,
              WHOLE_ROWS: tl.constexpr):  # fmt: skip
    """Where the elements [rows, columns] of a matrix lie, whose rows have WIDTH values, from the value ``first`` of a
    block on."""
    if WHOLE_ROWS:
        at = first + rows * WIDTH
        page = tl.load(pages + at // PAGE, mask=row_mask, other=0).to(tl.int64)
        return (page * PAGE + at % PAGE)[:, None] + columns[None, :]
    at = first + rows[:, None] * WIDTH + columns[None, :]
    page = tl.load(pages + at // PAGE, mask=row_mask[:, None] & column_mask[None, :], other=0).to(tl.int64)
    return page * PAGE + at % PAGE

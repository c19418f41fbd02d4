"""LoRA for a batch that mixes adapters: y += B A x, with the A and B of each token's adapter.

Hu and others 2021 (arXiv 2106.09685). The tokens of a batch are sorted by adapter and cut into tiles of one adapter
each, so that a program multiplies with one pair of matrices; S-LoRA (arXiv 2311.03285) and Punica (arXiv 2310.18547)
group them likewise. One kernel shrinks all tokens to the rank, and one expands them again. The sums over the inputs may
be split, because the tokens of a decode step give too few programs; the second kernel adds the parts up, in one order.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import check_device, interpreted, launch

MAX_PARTS = 3
"""Linear layers that may be joined to one."""
LEAST_RANK = 16
"""Tensor cores multiply no smaller matrices: lower ranks are padded with zeros."""

_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class LoraTiles(NamedTuple):
    """The tokens of a batch by adapter.

    ``tiles`` int32 [tiles, 3]: slot of the adapter, -1 for a tile that is not used, and the stretch of ``order`` that
    has its tokens, at most ``rows``. ``order`` int32 [n]: tokens.
    """

    tiles: torch.Tensor
    order: torch.Tensor
    rows: int


@triton.jit(do_not_specialize=["num_ordered"])
def lora_shrink_kernel(
    x,
    a,
    tiles,
    order,
    shrunk,
    num_ordered,
    stride_x,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Programs: tile of tokens, tile of ranks, part of the inputs."""
    tile, split = tl.program_id(0), tl.program_id(2)
    wait_for_predecessor(PDL)
    slot = tl.load(tiles + 3 * tile)
    if slot >= 0:
        at = tl.load(tiles + 3 * tile + 1) + tl.arange(0, ROWS)
        there = at < tl.load(tiles + 3 * tile + 2)
        rows = tl.load(order + at, mask=there, other=0).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, INNER)
        x_at = x + rows[:, None] * stride_x + inner[None, :]
        a_at = a + (slot.to(tl.int64) * SIZE_OUT + columns[None, :]) * SIZE_IN + inner[:, None]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(split * INNER, SIZE_IN, SPLIT * INNER):
            left = inner + start < SIZE_IN
            x_tile = tl.load(x_at + start, mask=there[:, None] & left[None, :], other=0.0)
            a_tile = tl.load(a_at + start, mask=left[:, None] & (columns < SIZE_OUT)[None, :], other=0.0)
            acc = tl.dot(x_tile.to(COMPUTE), a_tile.to(COMPUTE), acc, input_precision=PRECISION)
        to = shrunk + (split * num_ordered + at).to(tl.int64)[:, None] * SIZE_OUT + columns[None, :]
        tl.store(to, acc, mask=there[:, None] & (columns < SIZE_OUT)[None, :])


@triton.jit(do_not_specialize=["num_ordered"])
def lora_expand_kernel(
    shrunk,
    b,
    tiles,
    order,
    y,
    num_ordered,
    stride_y,
    RANK: tl.constexpr,
    SIZE_SHRUNK: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Programs: tile of tokens, tile of outputs, which lies in one of up to three parts: the first two end at ``FIRST``
    and ``SECOND``."""
    tile, number = tl.program_id(0), tl.program_id(1)
    wait_for_predecessor(PDL)
    slot = tl.load(tiles + 3 * tile)
    if slot >= 0:
        at = tl.load(tiles + 3 * tile + 1) + tl.arange(0, ROWS)
        there = at < tl.load(tiles + 3 * tile + 2)
        rows = tl.load(order + at, mask=there, other=0).to(tl.int64)
        before_second: tl.constexpr = (FIRST + COLUMNS - 1) // COLUMNS
        before_third: tl.constexpr = before_second + (SECOND - FIRST + COLUMNS - 1) // COLUMNS
        part = (number >= before_second).to(tl.int32) + (number >= before_third).to(tl.int32)
        begin = tl.where(part == 0, 0, tl.where(part == 1, FIRST, SECOND))
        end = tl.where(part == 0, FIRST, tl.where(part == 1, SECOND, SIZE_OUT))
        tiles_before = tl.where(part == 0, 0, tl.where(part == 1, before_second, before_third))
        columns = begin + (number - tiles_before) * COLUMNS + tl.arange(0, COLUMNS)
        ranks = tl.arange(0, CHUNK)
        from_at = shrunk + at.to(tl.int64)[:, None] * SIZE_SHRUNK + (part * RANK + ranks)[None, :]
        b_at = b + (slot.to(tl.int64) * SIZE_OUT + columns[None, :]) * RANK + ranks[:, None]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, RANK, CHUNK):
            h = tl.zeros([ROWS, CHUNK], tl.float32)
            for split in range(SPLIT):
                piece = num_ordered.to(tl.int64) * split * SIZE_SHRUNK
                h += tl.load(from_at + piece + start, mask=there[:, None], other=0.0)
            b_tile = tl.load(b_at + start, mask=(columns < end)[None, :], other=0.0)
            acc = tl.dot(h.to(COMPUTE), b_tile.to(COMPUTE), acc, input_precision=PRECISION)
        y_at, mask = y + rows[:, None] * stride_y + columns[None, :], there[:, None] & (columns < end)[None, :]
        acc += tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_at, acc.to(y.dtype.element_ty), mask=mask)


def padded_rank(rank: int) -> int:
    """Return the rank that matrices of this rank are padded to."""
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


def add_lora(
    x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: tuple[int, ...], tiles: LoraTiles
) -> None:
    """Add B A x to y [tokens, outs] in place, for the tokens in ``tiles``; x [tokens, ins].

    ``a`` [slots, parts · rank, ins] and ``b`` [slots, outs, rank]: of each adapter, whose B has been scaled; the rank
    is padded (``padded_rank``). ``ends`` [parts]: where the outputs of each part end.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    (slots, shrunk_size, ins), (_, outs, rank) = a.shape, b.shape
    parts = len(ends)
    if not 1 <= parts <= MAX_PARTS or shrunk_size != parts * rank or rank != padded_rank(rank) or ends[-1] != outs:
        raise ValueError(f"{parts} parts of rank {rank} that end at {ends} are not {list(a.shape)} and {list(b.shape)}")
    if x.shape != (len(x), ins) or y.shape != (len(x), outs) or len(b) != slots:
        raise ValueError(f"x {list(x.shape)} and y {list(y.shape)} do not fit {list(a.shape)} and {list(b.shape)}")
    if x.stride(1) != 1 or y.stride(1) != 1 or not a.is_contiguous() or not b.is_contiguous():
        raise ValueError("rows of x and y, and all of a and b, have to be contiguous")
    if x.dtype not in _COMPUTE or {y.dtype, a.dtype, b.dtype} != {x.dtype}:
        raise TypeError(f"x, y, a and b are of one floating-point type, not {x.dtype}, {y.dtype}, {a.dtype}, {b.dtype}")
    check_device(x, y, a, b, tiles.tiles, tiles.order)
    num_ordered, rows = len(tiles.order), tiles.rows
    wide = x.dtype == torch.float32
    split = 8 if rows == LEAST_RANK and ins >= 1024 else 1
    inner = 32 if interpreted() or wide else 128 if rows == LEAST_RANK else 64
    columns = 32 if interpreted() else 64
    shrunk = torch.empty(split, num_ordered, shrunk_size, dtype=torch.float32, device=x.device)
    compute = {
        "COMPUTE": tl.float32 if interpreted() else _COMPUTE[x.dtype],
        "PRECISION": "ieee" if wide else "tf32",
        "num_warps": 4,
        "num_stages": 3,
    }
    shrink_columns = min(64, triton.next_power_of_2(shrunk_size))
    launch(
        lora_shrink_kernel,
        (len(tiles.tiles), triton.cdiv(shrunk_size, shrink_columns), split),
        x, a, tiles.tiles, tiles.order, shrunk, num_ordered, x.stride(0),
        SIZE_IN=ins, SIZE_OUT=shrunk_size, ROWS=rows, COLUMNS=shrink_columns, INNER=inner, SPLIT=split, **compute,
    )  # fmt: skip
    first, second = ends[0], ends[min(1, parts - 1)]
    edges = (0, first, second, outs)
    column_tiles = sum(triton.cdiv(stop - start, columns) for start, stop in pairwise(edges))
    launch(
        lora_expand_kernel,
        (len(tiles.tiles), column_tiles),
        shrunk, b, tiles.tiles, tiles.order, y, num_ordered, y.stride(0),
        RANK=rank, SIZE_SHRUNK=shrunk_size, SIZE_OUT=outs, FIRST=first, SECOND=second, ROWS=rows, COLUMNS=columns,
        CHUNK=min(rank, 16 if wide else 64), SPLIT=split, **compute,
    )  # fmt: skip

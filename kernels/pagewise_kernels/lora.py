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
from pagewise_kernels.products import FLOATS, compute_options
from pagewise_kernels.shapes import power_of_two

MAX_PARTS = 3
"""Linear layers that may be joined to one."""
LEAST_RANK = 16
"""Tensor cores multiply no smaller matrices: lower ranks are padded with zeros."""


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
    x, a, tiles, order, shrunk, num_ordered,
    stride_x,
    SIZE_IN: tl.constexpr, SIZE_OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    SPLIT: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
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
    shrunk, b, tiles, order, y, num_ordered,
    stride_y,
    RANK: tl.constexpr, SIZE_SHRUNK: tl.constexpr, SIZE_OUT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: tile of tokens, tile of outputs in one of up to three parts: the first two end at ``FIRST`` and
    ``SECOND``."""
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


class LoraLayer:
    """The adapters of a linear layer, of which each slot has one; they are checked here, and not at each launch.

    ``a`` [slots, parts · rank, ins] and ``b`` [slots, outs, rank], whose B has been scaled; the rank is padded
    (``padded_rank``). ``ends`` [parts]: where the outputs of each part end.

    Raises:
        ValueError: shapes or strides do not fit. TypeError: types do not.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, ends: tuple[int, ...]) -> None:
        (slots, self.size_shrunk, self.ins), (*_, self.outs, self.rank) = a.shape, b.shape
        sizes = (slots, len(ends) * padded_rank(self.rank), ends[-1], padded_rank(self.rank))
        if not 1 <= len(ends) <= MAX_PARTS or sizes != (len(b), self.size_shrunk, self.outs, self.rank):
            raise ValueError(
                f"{len(ends)} parts of rank {self.rank} that end at {ends} are not {list(a.shape)} and {list(b.shape)}"
            )
        if a.dtype != b.dtype or a.dtype not in FLOATS or not (a.is_contiguous() and b.is_contiguous()):
            raise TypeError(f"a and b are contiguous, of one floating-point type, not {a.dtype} and {b.dtype}")
        self.a, self.b = a, b
        self.edges = (0, ends[0], ends[min(1, len(ends) - 1)], self.outs)


class _Tile(NamedTuple):
    """The tile of a program that shrinks (``inner``) or expands (``columns``). ``chunk``: ranks that are multiplied at
    once. ``split``: programs that share the inputs of a token."""

    inner: int
    columns: int
    chunk: int
    split: int


def _tile(layer: LoraLayer, rows: int) -> _Tile:
    wide, few = layer.a.dtype == torch.float32, rows == LEAST_RANK
    chunk, split = min(layer.rank, 16 if wide else 64), 8 if few and layer.ins >= 1024 else 1
    if interpreted():
        return _Tile(32, 32, chunk, split)
    return _Tile(32 if wide else 128 if few else 64, 64, chunk, split)


def add_lora(x: torch.Tensor, y: torch.Tensor, layer: LoraLayer, tiles: LoraTiles) -> None:
    """Add B A x to y [tokens, outs] in place, for the tokens in ``tiles``; x [tokens, ins].

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    a, b, size_shrunk = layer.a, layer.b, layer.size_shrunk
    if (x.shape, y.shape) != ((len(x), layer.ins), (len(x), layer.outs)) or x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError(
            f"x {list(x.shape)} and y {list(y.shape)} do not fit {list(a.shape)} and {list(b.shape)}, or their rows are"
            " not contiguous"
        )
    if x.dtype != a.dtype or y.dtype != a.dtype:
        raise TypeError(f"x, y, a and b are of one floating-point type, not {x.dtype}, {y.dtype} and {a.dtype}")
    check_device(x, y, a, b, tiles.tiles, tiles.order)
    num_ordered, rows, tile = len(tiles.order), tiles.rows, _tile(layer, tiles.rows)
    shrunk = torch.empty(tile.split, num_ordered, size_shrunk, dtype=torch.float32, device=x.device)
    options = {"SPLIT": tile.split, "ROWS": rows, "num_warps": 4, "num_stages": 3, **compute_options(x.dtype)}
    shrink_columns = min(64, power_of_two(size_shrunk))
    launch(
        lora_shrink_kernel,
        (len(tiles.tiles), triton.cdiv(size_shrunk, shrink_columns), tile.split),
        x, a, tiles.tiles, tiles.order, shrunk, num_ordered, x.stride(0),
        SIZE_IN=layer.ins, SIZE_OUT=size_shrunk, COLUMNS=shrink_columns, INNER=tile.inner, **options,
    )  # fmt: skip
    column_tiles = sum(triton.cdiv(stop - start, tile.columns) for start, stop in pairwise(layer.edges))
    launch(
        lora_expand_kernel,
        (len(tiles.tiles), column_tiles),
        shrunk, b, tiles.tiles, tiles.order, y, num_ordered, y.stride(0),
        RANK=layer.rank, SIZE_SHRUNK=size_shrunk, SIZE_OUT=layer.outs, FIRST=layer.edges[1], SECOND=layer.edges[2],
        COLUMNS=tile.columns, CHUNK=tile.chunk, **options,
    )  # fmt: skip

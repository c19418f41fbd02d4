"""Linear layers for the few rows of a decode step, which take as long as their weights take to read.

    out = x · weightᵀ + bias        or, with gate and up in one weight,        silu(x · gateᵀ) · (x · upᵀ)

Weights are of 16 bits, or float8 (e4m3) with a scale per output; then the rows of x are float8 with a scale each, too.

The product is computed transposed, as cuBLAS and CUTLASS's "swap AB" do it for few rows: a tile of the weight is the
left operand, whose 64 rows the tensor cores of Hopper take from shared memory as they are, and x the right one, of
16, 64 or 128. So weights of eight bits are never converted, and no register holds one. Where there are fewer tiles than
multiprocessors, the inner dimension is split, and the program that finishes the last part of a tile adds up all of
them in their order: results do not depend on which program that was.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import prefetch_rows, wait_for_predecessor
from pagewise_kernels.kv_layer import FP8
from pagewise_kernels.kv_write import FP8_MOST, round_to_e4m3
from pagewise_kernels.launch import called_by_kernels, check_device, interpreted, is_hopper, launch, num_sms
from pagewise_kernels.products import FLOATS, check_product, check_types, compute_options
from pagewise_kernels.quantised import scale_of
from pagewise_kernels.shapes import check_rows, power_of_two

MOST_ROWS = 256
"""With more rows products take as long as the tensor cores do, for which libraries are better. Up to there theirs have
too few tiles for all multiprocessors where outputs are few: with 4,096 of them 64 tiles of 128 · 128."""
MOST_ROUNDED_ROWS = 2
"""So many rows are rounded to float8 by the product itself: each of its programs reads them whole for their scales."""
_MOST_PARTS = tl.constexpr(4)
_PREFETCHED_BYTES = 1024
"""Of each of its rows of the weight, a program brings so many into the L2 cache while the kernel before still runs: 64
to 128 KiB on each multiprocessor, for which memory takes 2 to 4 µs, about as long as the small kernels do."""


@triton.jit
def _row_scales(x, num_rows, stride_x, size_in, ROWS: tl.constexpr, PADDED: tl.constexpr, MOST: tl.constexpr):
    """The scales by which ``quantise_rows`` divides the first rows of x, float32 [ROWS]; 1 for rows that are not."""
    rows, inner = tl.arange(0, ROWS), tl.arange(0, PADDED)
    scales = tl.full([ROWS], 1.0, tl.float32)
    for row in range(num_rows):
        values = tl.load(x + row * stride_x + inner, mask=inner < size_in, other=0.0).to(tl.float32)
        scales = tl.where(rows == row, scale_of(values, 0, MOST), scales)
    return scales


@called_by_kernels
def sum_of_parts(parts, stride_part, at, num_parts, AT_ONCE: tl.constexpr):
    """The sum of ``num_parts`` parts, of which each has its values ``at``, in their order.

    ``AT_ONCE``: parts that are not there are masked, so no read waits for the one before; registers have to suffice.
    """
    total = tl.load(parts + at, cache_modifier=".cg")
    for part in tl.static_range(1, _MOST_PARTS):
        if AT_ONCE:
            there = part + tl.zeros_like(at) < num_parts  # Triton 3.9 interprets no mask of one element
            total += tl.load(parts + part * stride_part + at, mask=there, other=0.0, cache_modifier=".cg")
        elif part < num_parts:
            total += tl.load(parts + part * stride_part + at, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def skinny_linear_kernel(
    x, x_scales, weight, weight_scales, bias, out, parts, arrivals, num_rows, size_in, size_out, part_size,
    stride_x, stride_weight, stride_out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr, ROUNDED_SIZE: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, MOST: tl.constexpr, PREFETCHED: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: tile of columns and rows, neighbours with the same columns; part of the inner dimension, ``part_size``
    inputs.

    ``parts`` float32 [parts, 1 or 2 for gate and up, tiles, COLUMNS, ROWS]; ``arrivals`` int32 [tiles], 0 before and
    after. ``ROUNDED_SIZE``: inputs of a row up to a power of two, where rows have to be rounded, otherwise 0.
    ``WHOLE``: parts consist of whole tiles.
    """
    tile, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row_tiles = tl.cdiv(num_rows, ROWS)
    rows, inner = (tile % row_tiles) * ROWS + tl.arange(0, ROWS), tl.arange(0, INNER)
    columns = (tile // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    row_there, column_there = rows < num_rows, columns < size_out
    read = tl.minimum(columns, size_out - 1)  # so that no load needs a mask for them
    first, last = part * part_size, tl.minimum((part + 1) * part_size, size_in)
    gate_rows = weight + read.to(tl.int64) * stride_weight
    up_rows = gate_rows + tl.cast(size_out, tl.int64) * stride_weight
    gate_at, up_at = gate_rows[:, None] + inner[None, :], up_rows[:, None] + inner[None, :]
    x_at = x + rows.to(tl.int64)[None, :] * stride_x + inner[:, None]
    if PDL:  # prefetch for the first turns of the loop: the kernel before is a small one, so memory has time
        prefetch_rows(gate_rows + first, last - first, PREFETCHED)
        if GATED:
            prefetch_rows(up_rows + first, last - first, PREFETCHED)
    wait_for_predecessor(PDL)
    if ROUNDED_SIZE > 0:
        scales = _row_scales(x, num_rows, stride_x, size_in, ROWS, ROUNDED_SIZE, MOST)
        inverse = 1.0 / scales
    elif HAS_SCALES:
        scales = tl.load(x_scales + rows, mask=row_there, other=0.0)
    gate = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(first, last, INNER):
        if WHOLE:
            a = tl.load(x_at + start, mask=row_there[None, :], other=0.0)
            g = tl.load(gate_at + start)
            u = tl.load(up_at + start) if GATED else g
        else:
            left = start + inner < last
            a = tl.load(x_at + start, mask=row_there[None, :] & left[:, None], other=0.0)
            g = tl.load(gate_at + start, mask=left[None, :], other=0.0)
            u = tl.load(up_at + start, mask=left[None, :], other=0.0) if GATED else g
        if ROUNDED_SIZE > 0:
            a = a.to(tl.float32) * inverse[None, :]
            a = round_to_e4m3(a) if tl.float32 == COMPUTE else a
        # Hopper's tensor cores keep about 14 bits of a sum of float8: after INNER products the sum continues in
        # float32.
        gate = tl.dot(g.to(COMPUTE), a.to(COMPUTE), gate, input_precision=PRECISION, max_num_imprecise_acc=INNER)
        if GATED:
            up = tl.dot(u.to(COMPUTE), a.to(COMPUTE), up, input_precision=PRECISION, max_num_imprecise_acc=INNER)
    at = (tile * COLUMNS + tl.arange(0, COLUMNS))[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    stride_part = tl.num_programs(0) * COLUMNS * ROWS
    finished = num_parts == 1
    if num_parts > 1:
        # ``attention/merging.py`` explains why the last program reads no stale data, and may reset the counter.
        here = part * (2 if GATED else 1) * stride_part
        tl.store(parts + here + at, gate)
        if GATED:
            tl.store(parts + here + stride_part + at, up)
        tl.debug_barrier()
        finished = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == num_parts - 1
        if finished:
            tl.store(arrivals + tile, 0)
            gate = sum_of_parts(parts, (2 if GATED else 1) * stride_part, at, num_parts, ROWS <= 64)
            if GATED:
                up = sum_of_parts(parts + stride_part, 2 * stride_part, at, num_parts, ROWS <= 64)
    if finished:
        if HAS_SCALES:
            gate *= tl.load(weight_scales + read)[:, None] * scales[None, :]
            if GATED:
                up *= tl.load(weight_scales + size_out + read)[:, None] * scales[None, :]
        if HAS_BIAS:
            gate += tl.load(bias + read).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(bias + size_out + read).to(tl.float32)[:, None]
        kind = out.dtype.element_ty
        if GATED:  # rounded in between, as a linear layer and ``silu_mul`` do it
            gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
            gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
        out_at = out + rows.to(tl.int64)[None, :] * stride_out + columns[:, None]
        tl.store(out_at, gate.to(kind), mask=row_there[None, :] & column_there[:, None])


class _Tile(NamedTuple):
    """The tile of a program: ``columns`` of the result (of gate and of up each), ``inner`` inputs in each turn of its
    loop, for ``rows``; with ``stages`` of them in shared memory. ``parts``: programs for each tile of columns."""

    rows: int
    columns: int
    inner: int
    parts: int
    num_warps: int
    stages: int


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, x_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None, gated: bool = False, dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """x · weightᵀ + bias [rows, out] for x [rows, in] of at most MOST_ROWS rows, weight [out, in] and bias [out].

    ``gated``: weight and bias hold gate and, behind it, up, [2 · out, in] and [2 · out], and the result is
    silu(gate) · up. ``weight_scales`` float32 [out or 2 · out]: the weight is float8_e4m3fn, and multiplied by them.
    x is then float8_e4m3fn as well, with ``x_scales`` float32 [rows], or it is of 16 or 32 bits, has at most
    MOST_ROUNDED_ROWS rows, and the kernel rounds it with the scales of ``quantise_rows``. It multiplies by the
    reciprocal of a scale instead of dividing by the scale, so a value near the middle of two float8 numbers may be
    rounded to the other one. ``dtype``: the type of the result, by default the type of x. The same row may differ
    slightly between calls with different numbers of rows.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    check_product("skinny_linear", x, weight, bias)
    (rows, size_in), outs, ways = x.shape, len(weight), 1 + gated
    size_out, dtype = outs // ways, dtype or x.dtype
    rounded = _check_types(x, weight, x_scales, weight_scales, dtype)
    if rows > MOST_ROWS or outs % ways:
        raise ValueError(f"{rows} rows, {outs} outputs: at most {MOST_ROWS} rows, and two for a gate")
    check_device(x, weight, bias, x_scales, weight_scales)
    sms = num_sms(x.device)
    tile = _tile(rows, size_out, weight.dtype, x.dtype, gated, sms, is_hopper(x.device))
    tiles = triton.cdiv(size_out, tile.columns) * triton.cdiv(rows, tile.rows)
    part_size = tile.inner * triton.cdiv(size_in, tile.inner * tile.parts)
    num_parts = triton.cdiv(size_in, part_size)
    out = torch.empty(rows, size_out, dtype=dtype, device=x.device)
    shape = (num_parts * (num_parts > 1), ways, tiles, tile.columns, tile.rows)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    launch(
        skinny_linear_kernel,
        (tiles, num_parts),
        x, x if x_scales is None else x_scales, weight, weight if weight_scales is None else weight_scales,
        weight if bias is None else bias, out, parts, arrival_counters(x.device, sms), rows, size_in, size_out,
        part_size, x.stride(0), weight.stride(0), out.stride(0),
        ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, GATED=gated, HAS_BIAS=bias is not None,
        HAS_SCALES=weight_scales is not None, ROUNDED_SIZE=power_of_two(size_in) if rounded else 0,
        WHOLE=size_in % part_size == 0, MOST=FP8_MOST, **compute_options(weight.dtype),
        PREFETCHED=_PREFETCHED_BYTES // weight.element_size(), num_warps=tile.num_warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _check_types(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor | None,
    dtype: torch.dtype,
) -> bool:
    """Return whether the rows of x have to be rounded to float8; raise TypeError or ValueError if types do not fit."""
    if weight_scales is None:
        if x_scales is not None or weight.dtype != x.dtype or not {x.dtype, dtype} <= FLOATS.keys():
            raise TypeError(
                "without scales x and weight are of one floating-point type, as the result is, not "
                f"{x.dtype}, {weight.dtype} and {dtype}"
            )
        return False
    if weight.dtype != FP8:
        raise TypeError(f"weights with scales are float8_e4m3fn, not {weight.dtype}")
    rounded = x_scales is None
    check_types(x, weight, dtype, quantised=not rounded)
    if rounded and len(x) > MOST_ROUNDED_ROWS:
        raise ValueError(f"{len(x)} rows cannot be rounded by the product, {MOST_ROUNDED_ROWS} can")
    for name, scales, rows in (("x_scales", x_scales, len(x)), ("weight_scales", weight_scales, len(weight))):
        if scales is not None:
            check_rows(name, scales, rows, torch.float32)
    return rounded


def _tile(
    rows: int, size_out: int, dtype: torch.dtype, of_x: torch.dtype, gated: bool, sms: int, hopper: bool
) -> _Tile:
    """Return the tile of a program, so that all programs are on the device at once, with the same work.

    Then each has its share of the memory's bandwidth, and none comes later. 48 KiB or more of the weight are on their
    way to each multiprocessor, where the bandwidth times the latency of memory is about 30. The tile of x comes from
    the L2 cache once for each tile of columns, so these are wider where rows are many.
    """
    tile_rows, columns, inner, num_warps, deep, shallow = _TILES[16 if rows <= 16 else 64 if rows <= 64 else 128, gated]
    if interpreted():
        columns, inner = 32, 64 * dtype.itemsize
    tiles = triton.cdiv(size_out, columns) * triton.cdiv(rows, tile_rows)
    parts = next(parts for parts in (4, 2, 1) if tiles * parts <= sms or parts == 1)
    stages = deep if tiles * parts <= sms else shallow
    stage_bytes = (columns * (2 if gated else 1) + tile_rows * of_x.itemsize // dtype.itemsize) * inner
    memory = (220 if hopper else 96) * 1024  # Hopper has twice as much shared memory as most
    stages = max(1, min(stages, memory // stage_bytes))
    return _Tile(tile_rows, columns, inner // dtype.itemsize, parts, num_warps, stages)


_TILES = {
    (16, False): (16, 64, 256, 4, 6, 5),
    (16, True): (16, 64, 256, 4, 5, 3),
    (64, False): (64, 128, 128, 8, 6, 4),
    (64, True): (64, 128, 128, 8, 5, 2),
    (128, False): (128, 128, 128, 8, 6, 6),
    (128, True): (128, 128, 128, 8, 4, 4),
}
"""By rows, and whether gate and up are computed: rows and columns of a tile, bytes of inputs, warps, stages where no
two programs share a multiprocessor, and where they do."""


@functools.cache
def arrival_counters(device: torch.device, sms: int) -> torch.Tensor:
    """Return the counters of finished parts, int32 [sms]: a product that is split has no more tiles.

    One for all products of a device: they run one after the other, and each leaves zeros.
    """
    return torch.zeros(sms, dtype=torch.int32, device=device)

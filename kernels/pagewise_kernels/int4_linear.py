"""Linear layers with weights in four bits, which become numbers in registers.

    out = x · ((codes - zeros) · scales)ᵀ + bias

As in ``mxfp4_experts``, a tile of the weight is the left operand, which tensor cores take from registers, and four
codes lie in a word of 16 bits, 32 inputs apart. A code in the lowest bits of the mantissa of 128 (in float16: of 1024)
is a number of 16 bits; minus that and the zero it is a whole number, which is exact, and times the scale it is rounded
to the type of x. Where there are fewer tiles than multiprocessors, the inner dimension is split as in
``skinny_linear``.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.input_slots import slots_of
from pagewise_kernels.launch import check_device, interpreted, is_hopper, launch, num_sms
from pagewise_kernels.products import FLOATS, compute_options
from pagewise_kernels.skinny_linear import arrival_counters, sum_of_parts

BLOCK, AT_ONCE = 32, 4
"""Inputs between two codes of a word, and codes of a word."""


class PackedInt4(NamedTuple):
    """A weight [outs, ins] in the layout that the kernel reads; its slots are a multiple of 128.

    A slot has an input, or is empty. ``codes`` int16 [slots / 128, outs, 32]: the lowest four bits are of the first of
    four blocks of slots. ``scales`` floats [slots / group, outs], of the type of x. ``zeros`` uint8, likewise; None:
    all are 8. ``order`` int64 [slots]: the input of each slot, or ``ins``: none; None: the inputs have their own order.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    ins: int
    group: int


def pack(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_of: torch.Tensor, dtype: torch.dtype
) -> PackedInt4:
    """Return a weight in the layout of the kernel.

    ``codes`` uint8 [outs, ins]: from 0 to 15. ``scales`` float32 and ``zeros`` uint8 [outs, groups]; ``group_of`` int64
    [ins]. ``dtype``: of x, to which scales are rounded.

    Raises:
        ValueError: a scale is not finite in that type.
    """
    outs, ins = codes.shape
    slots, group = slots_of(group_of.cpu())
    turn = AT_ONCE * BLOCK
    slots = torch.nn.functional.pad(slots, (0, -len(slots) % turn), value=-1)
    own = bool(torch.equal(slots[:ins], torch.arange(ins)))
    first = slots.view(-1, group)[:, 0]
    slots, first, device = slots.to(codes.device), first.to(codes.device), codes.device
    placed = codes[:, slots.clamp(0)].masked_fill_(slots < 0, 0).view(outs, -1, AT_ONCE, BLOCK).int()
    words = placed[:, :, 0] | placed[:, :, 1] << 4 | placed[:, :, 2] << 8 | placed[:, :, 3] << 12
    taken = group_of.to(device)[first.clamp(0)]
    rounded = scales[:, taken].masked_fill(first < 0, 0).to(dtype)
    if not bool(rounded.isfinite().all()):
        raise ValueError(f"a scale of weights in four bits is not finite in {dtype}")
    return PackedInt4(
        words.to(torch.int16).transpose(0, 1).contiguous(), rounded.t().contiguous(),
        None if zeros is None else zeros[:, taken].t().contiguous(),
        None if own else torch.where(slots < 0, ins, slots), ins, group,
    )  # fmt: skip


def unpack(weight: PackedInt4) -> torch.Tensor:
    """Return the weight float32 [outs, ins] of a layout of the kernel, for checks."""
    words = weight.codes.int()
    codes = torch.stack([words >> 4 * block & 15 for block in range(AT_ONCE)], 2)  # [slots / 128, outs, 4, 32]
    numbers = codes.transpose(0, 1).flatten(1).float()
    scales, zeros = (
        torch.full_like(weight.scales, 8.0, dtype=torch.float32) if part is None else part.float()
        for part in (weight.scales, weight.zeros)
    )
    spread = [part.t().repeat_interleave(weight.group, 1)[:, : numbers.shape[1]] for part in (scales, zeros)]
    slots = (numbers - spread[1]) * spread[0]
    if weight.order is None:
        return slots[:, : weight.ins]
    placed = slots.new_zeros(len(slots), weight.ins + 1)
    return placed.index_copy_(1, weight.order, slots)[:, : weight.ins]


_KINDS = {torch.bfloat16: ("bf16x2", 0x43004300, 0x3F803F80, 0x80008000, 128.0),
          torch.float16: ("f16x2", 0x64006400, 0x3C003C00, 0x80008000, 1024.0)}  # fmt: skip
"""The type of a pair in PTX, the bits of two numbers whose lowest bits a code takes, of ones, of minus zeros, and the
number."""


_OF_BLOCKS = ("NUMBERS", "NUMBERS_1", "NUMBERS_2", "NUMBERS_3")


@functools.cache
def instructions(dtype: torch.dtype, block: int) -> str:
    """Return PTX that makes of two words two weights of a block, given minus the zeros and the scales.

    Only products with a sum exist for pairs of bfloat16 before Hopper.
    """
    kind, bits, ones, nothing, _ = _KINDS[dtype]
    return (
        f"{{ .reg .b32 code, one, none; mov.b32 one, {ones}; mov.b32 none, {nothing}; shr.b32 code, $1, {4 * block}; "
        f"lop3.b32 code, code, {0x000F000F}, {bits}, 0xea; "
        f"fma.rn.{kind} code, code, one, $2; fma.rn.{kind} $0, code, $3, none; }}"
    )


@triton.jit
def _weights(
    words, scale, zero, block: tl.constexpr, COMPUTE: tl.constexpr, NUMBERS: tl.constexpr, NUMBERS_1: tl.constexpr,
    NUMBERS_2: tl.constexpr, NUMBERS_3: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """The weights of a block of inputs, [outs, BLOCK]."""
    if NUMBERS != "":
        first_two: tl.constexpr = NUMBERS if block == 0 else NUMBERS_1
        last_two: tl.constexpr = NUMBERS_2 if block == 2 else NUMBERS_3
        numbers: tl.constexpr = first_two if block < 2 else last_two
        made = tl.inline_asm_elementwise(
            numbers, "=r,r,r,r", [words, (-LEAST - zero).to(COMPUTE)[:, None], scale.to(COMPUTE)[:, None]],
            tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
        return made.to(COMPUTE, bitcast=True)
    code = (words.to(tl.int32) >> 4 * block) & 15
    return ((code.to(tl.float32) - zero[:, None]) * scale.to(tl.float32)[:, None]).to(COMPUTE)


@triton.jit(do_not_specialize=["num_rows"])
def int4_linear_kernel(
    x, codes, scales, zeros, bias, out, parts, arrivals, num_rows, size_in, size_out, part_size, stride_x, stride_out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, NUMBERS: tl.constexpr,
    NUMBERS_1: tl.constexpr, NUMBERS_2: tl.constexpr, NUMBERS_3: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: tile of columns and rows, neighbours with the same columns; part of the inner dimension, ``part_size``
    slots. ``parts`` and ``arrivals``: as of ``skinny_linear_kernel``. ``WHOLE``: no slot is beyond ``size_in``."""
    tile, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row_tiles = tl.cdiv(num_rows, ROWS)
    rows, inner = (tile % row_tiles) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    columns = (tile // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    read = tl.minimum(columns, size_out - 1)  # so that no load needs a mask for them, nor for rows
    x_rows = x + tl.minimum(rows, num_rows - 1).to(tl.int64) * stride_x
    first, last = part * part_size, tl.minimum((part + 1) * part_size, size_in)
    wait_for_predecessor(PDL)
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(first, last, 4 * BLOCK):
        words = tl.load(codes + (start // (4 * BLOCK) * size_out + read).to(tl.int64)[:, None] * BLOCK + inner[None, :])
        for block in tl.static_range(4):
            if block * BLOCK % GROUP == 0:
                at = (start + block * BLOCK) // GROUP * size_out + read
                scale = tl.load(scales + at)
                zero = tl.load(zeros + at).to(tl.float32) if HAS_ZEROS else tl.full([COLUMNS], 8.0, tl.float32)
            inputs = start + block * BLOCK + inner
            if WHOLE:
                a = tl.load(x_rows[None, :] + inputs[:, None])
            else:
                a = tl.load(x_rows[None, :] + inputs[:, None], mask=(inputs < size_in)[:, None], other=0.0)
            w = _weights(words, scale, zero, block, COMPUTE, NUMBERS, NUMBERS_1, NUMBERS_2, NUMBERS_3, LEAST)
            acc = tl.dot(w, a.to(COMPUTE), acc, input_precision=PRECISION)
    at = (tile * COLUMNS + tl.arange(0, COLUMNS))[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    finished = num_parts == 1
    if num_parts > 1:
        # ``attention/merging.py`` explains why the last program reads no stale data, and may reset the counter.
        stride_part = tl.num_programs(0) * COLUMNS * ROWS
        tl.store(parts + part * stride_part + at, acc)
        tl.debug_barrier()
        finished = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == num_parts - 1
        if finished:
            tl.store(arrivals + tile, 0)
            acc = sum_of_parts(parts, stride_part, at, num_parts, ROWS <= 64)
    if finished:
        if HAS_BIAS:
            acc += tl.load(bias + read).to(tl.float32)[:, None]
        out_at = out + rows.to(tl.int64)[None, :] * stride_out + columns[:, None]
        there = (rows < num_rows)[None, :] & (columns < size_out)[:, None]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=there)


class _Tile(NamedTuple):
    """``stages``: turns of the loop, of 128 inputs, that are in shared memory."""

    rows: int
    columns: int
    num_warps: int
    stages: int


_TILES = (_Tile(16, 64, 4, 8), _Tile(64, 128, 8, 4), _Tile(128, 256, 8, 4))
"""For ever more rows."""


def int4_linear(x: torch.Tensor, weight: PackedInt4, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x · weightᵀ + bias [rows, outs] for x [rows, ins], in float16, bfloat16 or float32, and bias [outs].

    The same row may differ slightly between calls with different numbers of rows.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    size_out = weight.codes.shape[1]
    if x.dim() != 2 or x.shape[1] != weight.ins or x.stride(1) != 1:
        raise ValueError(f"int4_linear takes contiguous rows of {weight.ins} inputs, not {list(x.shape)}")
    if bias is not None and (bias.shape != (size_out,) or not bias.is_contiguous()):
        raise ValueError(f"the bias has a value of each of {size_out} outputs, not {list(bias.shape)}")
    if x.dtype not in FLOATS or x.dtype != weight.scales.dtype or (bias is not None and bias.dtype not in FLOATS):
        raise TypeError(f"x and scales are of one type of floats, not {x.dtype} and {weight.scales.dtype}")
    check_device(x, weight.codes, weight.scales, weight.zeros, bias)
    if weight.order is not None:  # the last input is of empty slots
        x = torch.nn.functional.pad(x, (0, 1)).index_select(1, weight.order)
    (rows, size_in), sms = x.shape, num_sms(x.device)
    tile = _tile(rows, x)
    tiles = triton.cdiv(size_out, tile.columns) * triton.cdiv(rows, tile.rows)
    most = next(parts for parts in (4, 2, 1) if tiles * parts <= sms or parts == 1)
    turn = AT_ONCE * BLOCK
    part_size = turn * triton.cdiv(size_in, turn * most)
    num_parts = triton.cdiv(size_in, part_size)
    out = torch.empty(rows, size_out, dtype=x.dtype, device=x.device)
    shape = (num_parts * (num_parts > 1), tiles, tile.columns, tile.rows)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    in_asm = x.dtype in _KINDS and not interpreted()
    numbers = [instructions(x.dtype, block) if in_asm else "" for block in range(AT_ONCE)]
    launch(
        int4_linear_kernel, (tiles, num_parts),
        x, weight.codes, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias, out, parts, arrival_counters(x.device, sms), rows, size_in, size_out,
        part_size, x.stride(0), out.stride(0),
        ROWS=tile.rows, COLUMNS=tile.columns, BLOCK=BLOCK, GROUP=weight.group, HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None, WHOLE=size_in % turn == 0, **compute_options(x.dtype),
        **dict(zip(_OF_BLOCKS, numbers, strict=True)), LEAST=_KINDS[x.dtype][-1] if in_asm else 0.0,
        num_warps=tile.num_warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _tile(rows: int, x: torch.Tensor) -> _Tile:
    hopper = is_hopper(x.device)
    tile = _TILES[0 if rows <= 16 or x.dtype == torch.float32 else 1 if rows <= 256 or not hopper else 2]
    if interpreted():
        return tile._replace(columns=32)
    if not hopper:  # which has twice as much shared memory as most
        turn = tile.columns * AT_ONCE * BLOCK // 2 + tile.rows * AT_ONCE * BLOCK * x.dtype.itemsize
        return tile._replace(stages=max(1, min(tile.stages, 96 * 1024 // turn)))
    return tile

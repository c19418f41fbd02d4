"""The experts of gpt-oss with weights in MXFP4, which stay in four bits in memory and become numbers in registers.

    out = Σ over the experts e of a token of    weight_e · (down_e · a + b_e),    a = gate · σ(alpha · gate) · (up + 1)

As in ``experts``, whose sort and sums these are, pairs of a token and an expert are cut into tiles of one expert, and a
tile of the weight is the left operand. Tensor cores take that from registers. Four codes lie in a word of 16 bits, a
block of 32 inputs apart, so that a few operations on 32 bits make two numbers each, which a product takes as they are:
sign and lower bits move to their places in float16 or bfloat16. That makes numbers that are too small by a power of
two, which multiplies the scale of the block. It is exact: results equal the results of the dequantised weights.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.experts import check_pairs, sorted_pairs, store_sums
from pagewise_kernels.launch import interpreted, is_hopper, launch
from pagewise_kernels.mxfp4 import BLOCK, Mxfp4Weights, dequantised
from pagewise_kernels.products import compute_options

_AT_ONCE = 4
"""Blocks of an output whose codes share words, and whose scales share a word."""
_LARGEST = 128
"""The largest scale: 2. The factor that makes up for small numbers has to fit beside it."""


class PackedWeights(NamedTuple):
    """Weights of all experts in the layout that the kernels read; ins are padded to a multiple of 128.

    ``codes`` int16 [experts, ins / 128, outs, 32]: the lowest four bits are the first of four blocks. ``scales`` int32
    [experts, ins / 128, outs]: of four blocks. ``bias`` floats [experts, outs]. ``ins``: without padding.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor
    ins: int

    def dequantised(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [outs, ins] of an expert in a type of floats."""
        words = self.codes[expert].transpose(0, 1).int()
        codes = torch.stack([words >> 4 * at & 15 for at in range(_AT_ONCE)], dim=2).flatten(1, 2)
        scales = torch.stack([self.scales[expert].t() >> 8 * at & 255 for at in range(_AT_ONCE)], dim=2).flatten(1)
        return dequantised(codes, scales, dtype)[:, : self.ins]


def pack(weights: Mxfp4Weights) -> PackedWeights:
    """Return weights in the layout of the kernels.

    Raises:
        ValueError: scales are larger than 2.
    """
    experts, outs, ins = weights.shape
    if len(weights.scales) and int(weights.scales.max()) > _LARGEST:
        raise ValueError(f"weights in MXFP4 have scales up to 2, not 2^{int(weights.scales.max()) - 127}")
    turns = -(-ins // (_AT_ONCE * BLOCK))
    device, padding = weights.blocks.device, turns * _AT_ONCE - ins // BLOCK
    codes = torch.empty(experts, turns, outs, BLOCK, dtype=torch.int16, device=device)
    scales = torch.empty(experts, turns, outs, dtype=torch.int32, device=device)
    for expert in range(experts):  # one after the other, which takes little memory beside them
        blocks = torch.nn.functional.pad(weights.blocks[expert], (0, 0, 0, padding))
        apart = torch.stack([blocks & 15, blocks >> 4], dim=-1).view(outs, turns, _AT_ONCE, BLOCK).int()
        words = apart[:, :, 0] | apart[:, :, 1] << 4 | apart[:, :, 2] << 8 | apart[:, :, 3] << 12
        codes[expert] = words.to(torch.int16).transpose(0, 1)
        scales[expert] = torch.nn.functional.pad(weights.scales[expert], (0, padding)).view(torch.int32).t()
    return PackedWeights(codes, scales, weights.bias.contiguous(), ins)


def instructions(lowest: int) -> str:
    """Return PTX that makes of two words of four codes the four pairs of numbers of 16 bits.

    ``lowest``: the place of the lowest bit of a code in a number.
    """
    lines = []
    for at in range(_AT_ONCE):
        left, sign = lowest - 4 * at, 12 - 4 * at
        lines += [
            f"{'shl' if left >= 0 else 'shr'}.b32 size, $4, {abs(left)};",
            f"and.b32 size, size, {0x70007 << lowest};",
            f"shl.b32 sign, $4, {sign};",
            f"lop3.b32 ${at}, sign, {0x80008000}, size, 0xea;",  # (sign & mask) | size
        ]
    return f"{{ .reg .b32 size, sign; {' '.join(lines)} }}"


_NUMBERS = {torch.bfloat16: instructions(6), torch.float16: instructions(9), torch.float32: ""}
_SHIFTED = {torch.bfloat16: 126, torch.float16: 14, torch.float32: 126}
"""The exponent of the power of two by which numbers are too small: one less than the bias of each type."""


@triton.jit
def _mxfp4_product(
    codes, scales, columns, size_out, x_rows, size_in,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, NUMBERS: tl.constexpr,
    SHIFTED: tl.constexpr,
):  # fmt: skip
    """weight · xᵀ in float32, of ``columns`` of the codes of an expert, and pointers to rows of ``size_in`` inputs."""
    inner = tl.arange(0, BLOCK)
    acc = tl.zeros([columns.shape[0], x_rows.shape[0]], tl.float32)
    for start in range(0, size_in, 4 * BLOCK):
        at = start // (4 * BLOCK) * size_out + columns
        words = tl.load(codes + at[:, None] * BLOCK + inner[None, :])
        powers = tl.load(scales + at)
        if NUMBERS != "":
            made = tl.inline_asm_elementwise(
                NUMBERS, "=r,=r,=r,=r,r", [words], (tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2
            )
        for block in tl.static_range(4):
            if NUMBERS != "":
                w = made[block].to(COMPUTE, bitcast=True)
            else:
                code = words.to(tl.int32) >> 4 * block
                w = (((code & 7) << 22) | (code & 8) << 28).to(tl.float32, bitcast=True)
            power = ((((powers >> 8 * block) & 255) + SHIFTED) << 23).to(tl.float32, bitcast=True)
            read = start + block * BLOCK + inner
            if WHOLE:
                a = tl.load(x_rows[None, :] + read[:, None])
            else:
                a = tl.load(x_rows[None, :] + read[:, None], mask=(read < size_in)[:, None], other=0.0)
            w = w * power.to(w.dtype)[:, None]
            acc = tl.dot(w, a.to(COMPUTE), acc, input_precision=PRECISION)
    return acc


@triton.jit
def mxfp4_gate_up_kernel(
    x, codes, scales, bias, tiles, order, activated,
    stride_x, stride_codes, stride_scales, size_in, size_out, limit, alpha,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, NUMBERS: tl.constexpr, SHIFTED: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: tile of columns of gate and up, which take turns; tile of pairs. Their activation, in the order of
    ``order``.

    ``size_out``: columns of gate and up together.
    """
    entry = tiles + 3 * tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    read = tl.minimum(columns, size_out - 1)
    wait_for_predecessor(PDL)
    expert = tl.load(entry).to(tl.int64)
    if expert >= 0:
        at = tl.load(entry + 1) + tl.arange(0, ROWS)
        there = at < tl.load(entry + 2)
        # Rows behind the end compute the first token, and store nothing: no load of the loop needs a mask.
        tokens = tl.load(order + at, mask=there, other=0) // TOP_K
        acc = _mxfp4_product(
            codes + expert * stride_codes, scales + expert * stride_scales, read, size_out,
            x + tokens.to(tl.int64) * stride_x, size_in, BLOCK, WHOLE, COMPUTE, PRECISION, NUMBERS, SHIFTED,
        )  # fmt: skip
        kind = activated.dtype.element_ty  # rounded in between, as by a linear layer
        acc = (acc + tl.load(bias + expert * size_out + read).to(tl.float32)[:, None]).to(kind).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(acc, [COLUMNS // 2, 2, ROWS]), [0, 2, 1]))
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        gate = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
        inner = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        to = activated + at.to(tl.int64)[None, :] * (size_out // 2) + inner[:, None]
        tl.store(to, gate.to(kind), mask=there[None, :] & (inner < size_out // 2)[:, None])


@triton.jit
def mxfp4_down_kernel(
    activated, codes, scales, bias, weights, tiles, order, parts, counters, out,
    stride_codes, stride_scales, size_in, size_out,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, NUMBERS: tl.constexpr, SHIFTED: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: tile of columns; tile of pairs. Each pair's part of its token's result, and the sums of all parts."""
    entry = tiles + 3 * tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    read, column_there = tl.minimum(columns, size_out - 1), (columns < size_out)[:, None]
    wait_for_predecessor(PDL)
    expert = tl.load(entry).to(tl.int64)
    if expert >= 0:
        at = tl.load(entry + 1) + tl.arange(0, ROWS)
        there = at < tl.load(entry + 2)
        pairs = tl.load(order + at, mask=there, other=0)
        acc = _mxfp4_product(
            codes + expert * stride_codes, scales + expert * stride_scales, read, size_out,
            activated + tl.where(there, at, 0).to(tl.int64) * size_in, size_in,
            BLOCK, WHOLE, COMPUTE, PRECISION, NUMBERS, SHIFTED,
        )  # fmt: skip
        acc += tl.load(bias + expert * size_out + read).to(tl.float32)[:, None]
        store_sums(acc, pairs, there, columns, column_there, weights, parts, counters, out, size_out, TOP_K)


class _Tile(NamedTuple):
    """``rows``: pairs. ``columns``: outputs, of which a half of each are gate and up. ``stages``: turns of the loop, of
    128 inputs, that are in shared memory."""

    rows: int
    columns: int
    num_warps: int
    stages: int


_TILES = (_Tile(16, 64, 4, 8), _Tile(64, 128, 8, 4), _Tile(128, 256, 8, 4))
"""For ever more pairs per expert. Three programs of the first fit on a multiprocessor: they have 72 KiB of codes under
way."""


def sum_of_mxfp4_experts(
    x: torch.Tensor,
    gate_up: PackedWeights,
    down: PackedWeights,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    *,
    limit: float,
    alpha: float,
) -> torch.Tensor:
    """Return the weighted sums [tokens, hidden] of the results of each token's experts for x [tokens, hidden].

    ``gate_up``: outputs of gate and up take turns. ``chosen`` int32 and ``weights``, both [tokens, k], contiguous.
    ``limit``: of gates and of absolute ups. The same row may differ slightly between calls with different numbers of
    rows.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    hidden, experts, inner = x.shape[1], len(down.codes), down.ins
    if (gate_up.ins, *gate_up.bias.shape, *down.bias.shape) != (hidden, experts, 2 * inner, experts, hidden):
        raise ValueError(f"x {list(x.shape)} does not fit experts of {gate_up.ins} and {down.ins} inputs")
    check_pairs(x, chosen, weights, gate_up.codes, down.codes)
    tile = _tile(chosen.numel(), experts, x)
    columns = triton.cdiv(hidden, tile.columns)
    order, tiles, activated, *sums = sorted_pairs(x, chosen, experts, tile.rows, columns, inner)
    kind = torch.float32 if interpreted() else x.dtype
    options = {
        "TOP_K": chosen.shape[1], "ROWS": tile.rows, "COLUMNS": tile.columns, "BLOCK": BLOCK, "NUMBERS": _NUMBERS[kind],
        "SHIFTED": _SHIFTED[kind], **compute_options(x.dtype), "num_warps": tile.num_warps, "num_stages": tile.stages,
    }  # fmt: skip
    launch(
        mxfp4_gate_up_kernel, (triton.cdiv(2 * inner, tile.columns), len(tiles)),
        x, *gate_up[:3], tiles, order, activated, x.stride(0), gate_up.codes.stride(0), gate_up.scales.stride(0),
        hidden, 2 * inner, limit, alpha, WHOLE=hidden % (_AT_ONCE * BLOCK) == 0, **options,
    )  # fmt: skip
    launch(
        mxfp4_down_kernel, (columns, len(tiles)),
        activated, *down[:3], weights, tiles, order, *sums, down.codes.stride(0), down.scales.stride(0),
        inner, hidden, WHOLE=inner % (_AT_ONCE * BLOCK) == 0, **options,
    )  # fmt: skip
    return sums[-1]


def _tile(pairs: int, experts: int, x: torch.Tensor) -> _Tile:
    """Return the tile of a program: as narrow as an expert's pairs are few, where only its weights count."""
    few, hopper = pairs <= 16 * experts or x.dtype == torch.float32, is_hopper(x.device)
    tile = _TILES[0 if few else 1 if pairs <= 64 * experts or not hopper else 2]  # elsewhere the largest would spill
    if interpreted():
        return tile._replace(columns=32)
    if not hopper:  # which has twice as much shared memory as most
        turn = tile.columns * _AT_ONCE * BLOCK // 2 + tile.rows * _AT_ONCE * BLOCK * x.dtype.itemsize
        return tile._replace(stages=max(1, min(tile.stages, 96 * 1024 // turn)))
    return tile

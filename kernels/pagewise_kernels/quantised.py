"""Linear layers with weights in eight bits, FP8 (e4m3) or int8, and the quantisation of their inputs.

    out = (x · x_scales) · (weight · weight_scales)ᵀ + bias

A scale belongs to a block of the weight: an output (per channel), the whole weight (per tensor), a run of inputs of one
output (per group), or a rectangle (per block). Scales of inputs belong to a row, or to a run of it. Scales that are
constant along the sum are multiplied behind it, other scales after each part of it, in float32 (as DeepSeek-V3 does,
arXiv 2412.19437, section 3.3.2). Sums of int8 are whole numbers.
"""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.kv_layer import FP8
from pagewise_kernels.kv_write import FP8_MOST, round_to_e4m3
from pagewise_kernels.launch import capability, check_device, interpreted, launch
from pagewise_kernels.products import FLOATS, check_product, check_types, compute_options
from pagewise_kernels.shapes import power_of_two

MOST = {FP8: FP8_MOST, torch.int8: 127.0}
"""The largest value of each type that weights and inputs may have."""

_LARGEST = 65536
_SUMS = {} if interpreted() else {torch.int8: tl.int32}
"""The type of a sum of products, if it is not float32."""


@triton.jit
def e4m3_from_bits(bits):
    """The float32 of e4m3 in uint8, without instructions for it: as float16 the bits mean 2^-8 of the number."""
    wide = bits.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def scale_of(wide, AXIS: tl.constexpr, MOST: tl.constexpr):
    """The divisor of float32 numbers along ``AXIS`` that makes the largest of them MOST; 1 for zeros.

    Bits of numbers without a sign compare as the numbers do, and the bits of NaN are the greatest. So a NaN makes the
    scale and all products NaN, because int8 has none: a broken layer must not go on with plausible values.
    """
    most = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS).to(tl.float32, bitcast=True)
    return tl.where(most == 0, 1.0, most / MOST)


@triton.jit
def quantise_rows_kernel(
    x, values, scales, static_scale,
    stride_x, stride_values, stride_scales,
    SIZE: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, STATIC: tl.constexpr,
    INTEGER: tl.constexpr, MOST: tl.constexpr, ROUND_FIRST: tl.constexpr, UE8M0: tl.constexpr = False,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: row, GROUPS groups of it."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, PADDED)
    wait_for_predecessor(PDL)
    at = groups[:, None] * GROUP + within[None, :]
    inside = (within < GROUP)[None, :] & (at < SIZE)
    wide = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(wide, 1, MOST)
    if UE8M0:
        # The next power of two has no bits of a fraction; a NaN stays one. The division is a product with 1 / 448 in
        # float32, which is so near that quotients that are powers of two come out as these.
        power = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(scale == scale, power.to(tl.float32, bitcast=True), scale)
    if STATIC:
        scale = tl.where(scale == scale, tl.load(static_scale), scale)
    tl.store(scales + row * stride_scales + groups, scale, mask=groups * GROUP < SIZE)
    scaled = wide / scale[:, None]
    if STATIC or INTEGER:  # which also makes numbers of NaN, as integers have to be
        scaled = tl.minimum(tl.maximum(scaled, -MOST), MOST)
    if INTEGER:
        # Adding 1.5 * 2^23 leaves the nearest whole number, ties to even, in the lowest bits.
        scaled = (scaled + 12582912.0) - 12582912.0
    elif ROUND_FIRST:
        scaled = round_to_e4m3(scaled)
    tl.store(values + row * stride_values + at, scaled.to(values.dtype.element_ty), mask=inside)


def quantise_rows(
    x: torch.Tensor, dtype: torch.dtype, *, group: int | None = None, static_scale: torch.Tensor | None = None,
    ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Quantise x [rows, size] to ``dtype`` (float8_e4m3fn or int8), as one kernel.

    ``group``: neighbouring values with one scale, by default the row. The largest value of each becomes 448 or 127;
    with ``ue8m0`` scales are rounded up to powers of two, as DeepSeek V3.1 has them. With ``static_scale`` (float32,
    one value) all have that scale, and larger values are clamped.
    Returns values [rows, size] and float32 scales [rows, groups], whose product is x. The scale of a group with a NaN
    is NaN.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"quantise_rows takes contiguous rows [rows, size], not {list(x.shape)}")
    if x.dtype not in FLOATS or dtype not in MOST:
        raise TypeError(f"quantise_rows makes float8_e4m3fn or int8 of floats, not {dtype} of {x.dtype}")
    rows, size = x.shape
    group = min(group or size, size)
    if not 1 <= group <= _LARGEST:
        raise ValueError(f"groups of {group} are not supported, only groups of 1 to {_LARGEST}")
    if static_scale is not None and (
        (static_scale.numel(), static_scale.dtype, group) != (1, torch.float32, size) or ue8m0
    ):
        raise ValueError("a static scale is one float32 for all rows, without groups, and is not rounded")
    values = torch.empty(rows, size, dtype=dtype, device=x.device)
    num_groups = triton.cdiv(size, group)
    scales = torch.empty(rows, num_groups, dtype=torch.float32, device=x.device)
    check_device(x, values, static_scale)
    padded = power_of_two(group)
    groups = max(1, min(power_of_two(num_groups), 2048 // padded))
    launch(
        quantise_rows_kernel,
        (rows, triton.cdiv(num_groups, groups)),
        x, values, scales, scales if static_scale is None else static_scale,
        x.stride(0), values.stride(0), scales.stride(0),
        SIZE=size, GROUP=group, PADDED=padded, GROUPS=groups, STATIC=static_scale is not None,
        INTEGER=dtype == torch.int8, MOST=MOST[dtype], ROUND_FIRST=interpreted(), UE8M0=ue8m0,
        num_warps=min(32, max(4, padded * groups // 2048)),
    )  # fmt: skip
    return values, scales


@triton.jit(do_not_specialize=["num_rows"])
def scaled_linear_kernel(
    x, x_scales, weight, weight_scales, bias, out, num_rows,
    stride_x, stride_x_scales, stride_weight, stride_weight_scales, stride_out,
    SIZE_IN: tl.constexpr, SIZE_OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, X_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_X_SCALES: tl.constexpr, FROM_BITS: tl.constexpr, COMPUTE: tl.constexpr, SUM: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: tile of rows, tile of columns; neighbours share the weights of a tile of columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    row_there, column_there = rows < num_rows, columns < SIZE_OUT
    x_at = x + rows.to(tl.int64)[:, None] * stride_x + inner[None, :]
    weight_at = weight + columns.to(tl.int64)[None, :] * stride_weight + inner[:, None]
    x_scales_at = x_scales + rows.to(tl.int64) * stride_x_scales
    weight_scales_at = weight_scales + (columns // BLOCK_OUT).to(tl.int64) * stride_weight_scales
    in_parts: tl.constexpr = (BLOCK_IN < SIZE_IN) or (X_GROUP < SIZE_IN)
    wait_for_predecessor(PDL)
    # Hopper's tensor cores keep about 14 bits of a sum of float8: after INNER products the sum continues in float32.
    sums = tl.zeros([ROWS, COLUMNS], SUM)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SIZE_IN, INNER):
        left = inner + start < SIZE_IN
        a = tl.load(x_at + start, mask=row_there[:, None] & left[None, :], other=0.0)
        b = tl.load(weight_at + start, mask=column_there[None, :] & left[:, None], other=0.0)
        if FROM_BITS:
            b = e4m3_from_bits(b)
        if in_parts:
            part = tl.dot(
                a.to(COMPUTE), b.to(COMPUTE), out_dtype=SUM, input_precision=PRECISION, max_num_imprecise_acc=INNER
            ).to(tl.float32)
            scale = tl.load(weight_scales_at + start // BLOCK_IN, mask=column_there, other=0.0)[None, :]
            if HAS_X_SCALES:
                scale *= tl.load(x_scales_at + start // X_GROUP, mask=row_there, other=0.0)[:, None]
            acc += part * scale
        else:
            sums = tl.dot(
                a.to(COMPUTE), b.to(COMPUTE), sums, out_dtype=SUM, input_precision=PRECISION,
                max_num_imprecise_acc=INNER,
            )  # fmt: skip
    if not in_parts:
        acc = sums.to(tl.float32) * tl.load(weight_scales_at, mask=column_there, other=0.0)[None, :]
        if HAS_X_SCALES:
            acc *= tl.load(x_scales_at, mask=row_there, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=column_there, other=0.0).to(tl.float32)[None, :]
    out_at = out + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=row_there[:, None] & column_there[None, :])


def scaled_linear(
    x: torch.Tensor, x_scales: torch.Tensor | None, weight: torch.Tensor, weight_scales: torch.Tensor,
    block: tuple[int, int], bias: torch.Tensor | None = None, *, group: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """A linear layer whose weight [out, in] is float8_e4m3fn or int8, for x [rows, in]; returns [rows, out].

    ``block``: outputs and inputs that share a scale of weight_scales, float32 [blocks of outputs, blocks of inputs];
    see ``computable`` for the possible sizes. x is of the weight's type, with x_scales, float32 [rows, groups] of
    ``group`` inputs each, by default a row, or it is float16, bfloat16 or float32 without. bias [out]. ``dtype``: of
    the result, by default of x. Rows of int8 sums do not depend on the number of rows; others do in their last bits,
    because the tile does.

    Raises:
        ValueError: shapes, strides, blocks or devices do not fit. TypeError: types do not.
    """
    check_product("scaled_linear", x, weight, bias)
    quantised = x_scales is not None
    dtype = dtype or x.dtype
    check_types(x, weight, dtype, quantised=quantised)
    rows, size_in = x.shape
    size_out = weight.shape[0]
    block_out, block_in = min(block[0], size_out), min(block[1], size_in)
    _check_scales(
        weight_scales, (triton.cdiv(size_out, block_out), triton.cdiv(size_in, block_in)),
        f"weights {list(weight.shape)} in blocks {list(block)}",
    )  # fmt: skip
    group = min(group or size_in, size_in)
    if x_scales is not None:
        _check_scales(x_scales, (rows, triton.cdiv(size_in, group)), f"{rows} rows in groups of {group}")
    check_device(x, x_scales, weight, weight_scales, bias)
    from_bits = _computes_from_bits(x, weight)
    tile, num_warps, num_stages = _tile(rows, x.dtype)
    inner = _part(tile[2], size_in, block_in, group, quantised)
    out = torch.empty(rows, size_out, dtype=dtype, device=x.device)
    row_scales = weight_scales if x_scales is None else x_scales  # not read, or read
    launch(
        scaled_linear_kernel,
        (triton.cdiv(rows, tile[0]), triton.cdiv(size_out, tile[1])),
        x, row_scales, weight.view(torch.uint8) if from_bits else weight, weight_scales,
        weight_scales if bias is None else bias, out, rows, x.stride(0), row_scales.stride(0), weight.stride(0),
        weight_scales.stride(0), out.stride(0),
        SIZE_IN=size_in, SIZE_OUT=size_out, ROWS=tile[0], COLUMNS=tile[1], INNER=inner, BLOCK_OUT=block_out,
        BLOCK_IN=block_in, X_GROUP=group, HAS_BIAS=bias is not None, HAS_X_SCALES=quantised, FROM_BITS=from_bits,
        SUM=_SUMS.get(x.dtype, tl.float32), num_warps=num_warps, num_stages=num_stages, **compute_options(x.dtype),
    )  # fmt: skip
    return out


def _computes_from_bits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether weights in float8 are converted from their bits, because the device knows no float8.

    Raises:
        ValueError: x is float8, and the device knows none.
    """
    if weight.dtype != FP8 or (capability(x.device) >= 89 and not interpreted()):
        return False
    if x.dtype == FP8 and not interpreted():
        raise ValueError("products of float8 need compute capability 8.9")
    return x.dtype != FP8


def computable(size_in: int, block_in: int, group: int | None = None, *, quantised: bool) -> bool:
    """Whether ``scaled_linear`` takes weights with a scale for every ``block_in`` of ``size_in`` inputs.

    ``group``: inputs of a row that share a scale, None for all of them. ``quantised``: inputs have eight bits, too.
    """
    smallest = _smallest_part(quantised)
    return all(size >= size_in or size & -size >= smallest for size in (block_in, group or size_in))


def _smallest_part(quantised: bool) -> int:
    """How much of the sum tensor cores compute at once at least: 32 bytes of each operand."""
    return 32 if quantised else 16


def _part(inner: int, size_in: int, block_in: int, group: int, quantised: bool) -> int:
    """How much of the sum is computed at once: no more than one scale is for."""
    if not computable(size_in, block_in, group, quantised=quantised):
        raise ValueError(
            f"scales for {min(block_in, group)} inputs are not supported, for multiples of "
            f"{_smallest_part(quantised)} they are"
        )
    for size in (block_in, group):
        if size < size_in:
            inner = min(inner, size & -size)
    return inner


def _check_scales(scales: torch.Tensor, shape: tuple[int, int], name: str) -> None:
    if scales.shape != shape or scales.dtype != torch.float32 or (shape[1] > 1 and scales.stride(1) != 1):
        raise ValueError(
            f"{name} have scales in float32 {list(shape)} with contiguous rows, not {scales.dtype} "
            f"{list(scales.shape)} with strides {list(scales.stride())}"
        )


def _tile(rows: int, dtype: torch.dtype) -> tuple[tuple[int, int, int], int, int]:
    """Rows, columns and part of the sum of a program, its warps and stages; not measured on a GPU yet."""
    if interpreted():
        return (16, 32, 32), 4, 1
    if dtype == torch.float32:
        return (32, 64, 32), 4, 3
    if rows <= 16:
        return (16, 32, 256 if dtype in MOST else 128), 4, 4
    if rows <= 64:
        return (64, 64, 128), 4, 3
    return (128, 128, 128 if dtype in MOST else 64), 8, 3

"""A linear layer whose rows do not depend on one another: the same bits in a batch of one and in a batch of thousands.

Libraries choose another kernel, and with it another order of sums, for another number of rows. This one has a single
tile, sums up its inner dimension in one order and never splits it.
"""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.products import FLOATS, check_product, compute_options


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x, weight, bias, out, num_rows,
    stride_x, stride_weight, stride_out,
    SIZE_IN: tl.constexpr, SIZE_OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: tile of columns, tile of rows; neighbours share the weights of a tile of columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    row_there, column_there = (rows < num_rows)[:, None], (columns < SIZE_OUT)[None, :]
    x_at = x + rows.to(tl.int64)[:, None] * stride_x + inner[None, :]
    weight_at = weight + columns.to(tl.int64)[None, :] * stride_weight + inner[:, None]
    wait_for_predecessor(PDL)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SIZE_IN, INNER):
        if SIZE_IN % INNER == 0:
            a = tl.load(x_at + start, mask=row_there, other=0.0)
            b = tl.load(weight_at + start, mask=column_there, other=0.0)
        else:
            left = inner + start < SIZE_IN
            a = tl.load(x_at + start, mask=row_there & left[None, :], other=0.0)
            b = tl.load(weight_at + start, mask=column_there & left[:, None], other=0.0)
        acc = tl.dot(a.to(COMPUTE), b.to(COMPUTE), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < SIZE_OUT, other=0.0).to(tl.float32)[None, :]
    out_at = out + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=row_there & column_there)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x · weightᵀ + bias for x [rows, in], weight [out, in] and bias [out]; returns [rows, out].

    A row of the result depends on that row of x alone, bit for bit.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    check_product("linear", x, weight, bias)
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        raise TypeError(f"x and weight are of one floating-point type, not {x.dtype} and {weight.dtype}")
    check_device(x, weight, bias)
    rows, size_in = x.shape
    size_out = weight.shape[0]
    out = torch.empty(rows, size_out, dtype=x.dtype, device=x.device)
    wide = x.dtype == torch.float32
    tile = (16, 32, 32) if interpreted() else (32, 64, 32) if wide else (64, 64, 64)
    launch(
        linear_kernel,
        (triton.cdiv(rows, tile[0]), triton.cdiv(size_out, tile[1])),
        x, weight, weight if bias is None else bias, out, rows, x.stride(0), weight.stride(0), out.stride(0),
        SIZE_IN=size_in, SIZE_OUT=size_out, ROWS=tile[0], COLUMNS=tile[1], INNER=tile[2], HAS_BIAS=bias is not None,
        num_warps=4, num_stages=3 if wide else 4, **compute_options(x.dtype),
    )  # fmt: skip
    return out

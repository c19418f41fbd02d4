"""Gate, up and their activation as one matrix product: silu(x · gateᵀ) · (x · upᵀ), for the few rows of a decode step.

So few rows read the weights once and compute little. A program reads the same rows of gate and up, so that it has both
factors of its results in registers, and neither of them goes through memory.
"""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import prefetch_rows, wait_for_predecessor
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.matmul import COMPUTE_TYPES
from pagewise_kernels.shapes import power_of_two

MOST_ROWS = 64


@triton.jit(do_not_specialize=["num_rows"])
def gated_linear_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    stride_x,
    stride_weight,
    stride_out,
    SIZE_IN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Programs: tile of columns of the result, with all rows."""
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    row_there, column_there = (rows < num_rows)[:, None], (columns < SIZE)[None, :]
    x_at = x + rows[:, None] * stride_x + inner[None, :]
    gate_at = weight + columns.to(tl.int64)[None, :] * stride_weight + inner[:, None]
    up_at = gate_at + tl.cast(SIZE, tl.int64) * stride_weight
    if PDL:  # what the first turns of the loop read: the kernel before is a small one, so memory has time
        gate_rows = weight + tl.minimum(columns, SIZE - 1).to(tl.int64) * stride_weight
        prefetch_rows(gate_rows, SIZE_IN, 2 * INNER)
        prefetch_rows(gate_rows + tl.cast(SIZE, tl.int64) * stride_weight, SIZE_IN, 2 * INNER)
    wait_for_predecessor(PDL)
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SIZE_IN, INNER):
        if SIZE_IN % INNER == 0:
            a = tl.load(x_at + start, mask=row_there, other=0.0)
            g = tl.load(gate_at + start, mask=column_there, other=0.0)
            u = tl.load(up_at + start, mask=column_there, other=0.0)
        else:
            left = inner + start < SIZE_IN
            a = tl.load(x_at + start, mask=row_there & left[None, :], other=0.0)
            g = tl.load(gate_at + start, mask=column_there & left[:, None], other=0.0)
            u = tl.load(up_at + start, mask=column_there & left[:, None], other=0.0)
        gate = tl.dot(a.to(COMPUTE), g.to(COMPUTE), gate, input_precision=PRECISION)
        up = tl.dot(a.to(COMPUTE), u.to(COMPUTE), up, input_precision=PRECISION)
    if HAS_BIAS:
        gate += tl.load(bias + columns, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + SIZE + columns, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
    # Rounded in between, as a linear layer and ``silu_mul`` do it.
    kind = out.dtype.element_ty
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    out_at = out + rows[:, None] * stride_out + columns[None, :]
    tl.store(out_at, (activated * up).to(kind), mask=row_there & column_there)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up [rows, size] for gate and up = x · weightᵀ + bias.

    x [rows, in] of at most MOST_ROWS rows, weight [2 · size, in] and bias [2 · size], gate first.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(
            f"gated_linear takes x [rows, in] and weight [2 * size, in], not {list(x.shape)} and {list(weight.shape)}"
        )
    rows, size_in = x.shape
    size = len(weight) // 2
    if rows > MOST_ROWS or len(weight) % 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"{rows} rows, {len(weight)} outputs: at most {MOST_ROWS} rows, twice the size, a bias of each"
        )
    if x.dtype not in COMPUTE_TYPES or weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise TypeError(f"x, weight and bias are of one floating-point type, not {x.dtype} and {weight.dtype}")
    check_device(*(tensor for tensor in (x, weight, bias) if tensor is not None))
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    tile_rows = max(16, power_of_two(rows))
    # Shared memory for four tiles of 16 bits is 60 to 73 KB, so three programs share a multiprocessor.
    columns, inner = (16, 32) if interpreted() else (32, 64 if tile_rows == 64 or x.dtype == torch.float32 else 128)
    launch(
        gated_linear_kernel,
        (triton.cdiv(size, columns),),
        x, weight, weight if bias is None else bias, out, rows, x.stride(0), weight.stride(0), out.stride(0),
        SIZE_IN=size_in, SIZE=size, ROWS=tile_rows, COLUMNS=columns, INNER=inner,
        HAS_BIAS=bias is not None, COMPUTE=tl.float32 if interpreted() else COMPUTE_TYPES[x.dtype],
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=4,
    )  # fmt: skip
    return out

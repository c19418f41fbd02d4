"""SiLU·mul, the gate of Llama's MLP (SwiGLU, Shazeer, arXiv 2002.05202): gate · sigmoid(gate) · up."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import check_device, launch

_PIECE = 2048


@triton.jit
def silu_mul_kernel(
    gate_up, out,
    stride_in, stride_out,
    SIZE: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: row, piece of the row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = columns < SIZE
    wait_for_predecessor(PDL)
    gate = tl.load(gate_up + row * stride_in + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_in + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    # Rounded in between, as the models do it.
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * stride_out + columns, (activated * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up for gate_up [rows, 2 · size], gate first. Returns ``out`` [rows, size], by default a new tensor.

    Raises:
        ValueError: shapes, strides or devices do not fit.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"silu_mul takes contiguous rows [rows, 2 * size], not {list(gate_up.shape)}")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size) if out is None else out
    if out.shape != (rows, size) or out.dtype != gate_up.dtype or out.stride(1) != 1:
        raise ValueError(f"out is {gate_up.dtype} {[rows, size]}, not {out.dtype} {list(out.shape)}")
    check_device(gate_up, out)
    grid = (rows, triton.cdiv(size, _PIECE))
    launch(silu_mul_kernel, grid, gate_up, out, gate_up.stride(0), out.stride(0), SIZE=size, PIECE=_PIECE, num_warps=4)
    return out

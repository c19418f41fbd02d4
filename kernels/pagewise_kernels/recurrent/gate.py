"""The norm and the gate of the results of recurrent layers."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import launch
from pagewise_kernels.recurrent.layers import Recurrence
from pagewise_kernels.recurrent.paged_states import ChunkPlan
from pagewise_kernels.shapes import power_of_two

_VALUES = 2048
"""Of a program, or one row: of each of its 128 threads 16 values."""


@triton.jit(do_not_specialize=["num_rows"])
def gate_kernel(
    results, projected, out, counts, gate_from, weight, stride, num_rows, eps,
    PARTS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, HAS_NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr, IS_SILU: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: ROWS of SIZE values, of which a token has PARTS. Tokens that are padding get zeros."""
    rows, within = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    tokens, columns = rows // PARTS, (rows % PARTS * SIZE)[:, None] + within[None, :]
    inside = (rows < num_rows)[:, None] & (within < SIZE)[None, :]
    at = tokens.to(tl.int64)[:, None] * (PARTS * SIZE) + columns
    wait_for_predecessor(PDL)
    real = inside & (tokens < tl.load(counts))[:, None]
    x = tl.load(results + at, mask=real, other=0.0).to(tl.float32)
    places = tl.load(gate_from + columns, mask=real, other=0)
    gate = tl.load(projected + tokens.to(tl.int64)[:, None] * stride + places, mask=real, other=0.0).to(tl.float32)
    gate = (gate if IS_SILU else 1.0) / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        x *= gate
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        x *= scale * tl.load(weight + columns, mask=real, other=0.0)
    if not GATE_FIRST:
        x *= gate
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


def gate_results(layer: Recurrence, results: torch.Tensor, projected: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
    """Return the results [tokens, heads · value] behind their norm and gate; those of padding are zeros."""
    tokens, inner = results.shape
    size = layer.value if layer.norm is None else layer.norm_size
    parts, padded = inner // size, power_of_two(size)
    rows = max(1, _VALUES // padded)
    out = torch.empty_like(results)
    launch(
        gate_kernel, (triton.cdiv(tokens * parts, rows),), results, projected, out, plan.counts, layer.gate_from,
        layer.rate if layer.norm is None else layer.norm, projected.stride(0), tokens * parts, float(layer.eps),
        PARTS=parts, SIZE=size, PADDED=padded, ROWS=rows, HAS_NORM=layer.norm is not None,
        GATE_FIRST=layer.gate_first, IS_SILU=layer.gate == "silu", num_warps=4,
    )  # fmt: skip
    return out

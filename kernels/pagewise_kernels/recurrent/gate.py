"""The norm and the gate of the results of recurrent layers."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import launch
from pagewise_kernels.recurrent.layers import Recurrence
from pagewise_kernels.recurrent.paged_states import ChunkPlan
from pagewise_kernels.shapes import power_of_two

_PIECE = 1024
"""Values of a program where there is no norm."""


@triton.jit
def gate_kernel(
    results, projected, out, counts, gate_from, weight, stride, eps,
    INNER: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, HAS_NORM: tl.constexpr, GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: token, SIZE of its values, which a norm covers. Tokens that are padding get zeros."""
    token = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, PADDED)
    columns = tl.program_id(1) * SIZE + within
    inside = (within < SIZE) & (columns < INNER)
    wait_for_predecessor(PDL)
    real = inside & (token < tl.load(counts))
    x = tl.load(results + token * INNER + columns, mask=real, other=0.0).to(tl.float32)
    places = tl.load(gate_from + columns, mask=real, other=0)
    gate = tl.load(projected + token * stride + places, mask=real, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        x *= gate
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
        x *= scale * tl.load(weight + columns, mask=real, other=0.0)
    if not GATE_FIRST:
        x *= gate
    tl.store(out + token * INNER + columns, x.to(out.dtype.element_ty), mask=inside)


def gate_results(
    layer: Recurrence, results: torch.Tensor, projected: torch.Tensor, plan: ChunkPlan
) -> torch.Tensor:
    """Return the results [tokens, heads · value] behind their norm and gate; those of padding are zeros."""
    tokens, inner = results.shape
    size = min(inner, _PIECE) if layer.norm is None else layer.norm_size
    out = torch.empty_like(results)
    launch(
        gate_kernel, (tokens, triton.cdiv(inner, size)), results, projected, out, plan.counts, layer.gate_from,
        layer.rate if layer.norm is None else layer.norm, projected.stride(0), float(layer.eps),
        INNER=inner, SIZE=size, PADDED=power_of_two(size), HAS_NORM=layer.norm is not None, GATE_FIRST=layer.gate_first,
        num_warps=min(8, max(1, power_of_two(size) // 256)),
    )  # fmt: skip
    return out

"""Launches the attention kernel; what decode and prefill have in common."""

from typing import NamedTuple

import torch
import triton.language as tl

from pagewise_kernels.attention.checks import Scales, Shape
from pagewise_kernels.attention.config import TileConfig
from pagewise_kernels.attention.kernel import attention_kernel
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.shapes import power_of_two

_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Parts(NamedTuple):
    """Where partial results go.

    ``values`` float32 [n, heads, head_dim] and ``highs`` [n, heads], log2 of their weights: those of query i are
    ``first[i]`` and the ``number[i] - 1`` after it. ``arrivals`` int32 [queries, kv_heads]: zeros.
    """

    values: torch.Tensor
    highs: torch.Tensor
    first: torch.Tensor
    number: torch.Tensor
    arrivals: torch.Tensor


def _parts_at_once(size: int, num_warps: int) -> int:
    """How many parts of ``size`` values the last program reads together: they take 64 registers of each thread."""
    return max(1, min(16, num_warps * 32 * 64 // size))


def run_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    out: torch.Tensor,
    shape: Shape,
    config: TileConfig,
    *,
    positions: torch.Tensor,
    units: torch.Tensor,
    num_units: torch.Tensor,
    programs: int,
    parts: Parts | None,
    scale: float | None,
    softcap: float | None,
    window: int | None,
    scales: Scales | None,
    order: torch.Tensor | None = None,
    first_units: torch.Tensor | None = None,
    split: int = 0,
    strict: bool = False,
) -> None:
    """Run ``units`` int32 [n, UNIT_FIELDS], of which ``num_units`` int32 [1] count, on ``programs`` programs.

    ``positions`` int32 [queries]: the last context token that each query sees. ``parts``: where partial results go,
    which are merged in the same launch. ``order`` int32: the queries of units with several of them are entries of it;
    by default they are neighbours. ``first_units`` int32 [programs / kv_heads]: the runs of ``plan_decode_kernel``.
    ``split``: see ``attention_kernel``. ``strict``: parts are merged in order, products and sums are not fused.

    Raises:
        ValueError: ``scale`` is not positive, or the plan is on another device than q.
    """
    check_device(q, positions)  # by a handle an address of the host would go to the device as it is
    scale = shape.head_dim**-0.5 if scale is None else scale
    if scale <= 0:
        raise ValueError(f"the scale of attention is positive, not {scale}")
    has_scales = scales is not None
    k_scales, v_scales = (scales.keys, scales.values) if scales is not None else (positions, positions)
    partial = parts or Parts(*(positions,) * 5)
    rows = power_of_two(shape.group)
    at_once = 0 if parts is None else 1 if strict else _parts_at_once(rows * shape.dim, config.num_warps)
    # The interpreter computes with numpy, which has no bfloat16.
    compute = tl.float32 if interpreted() else _COMPUTE[q.dtype]
    launch(
        attention_kernel,
        (programs,),
        q, keys, values, k_scales, v_scales, out, partial.values, partial.highs, tables, positions, units, num_units,
        partial.first, partial.number, partial.arrivals, positions if order is None else order,
        positions if first_units is None else first_units,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2),
        *(k_scales.stride() if has_scales else (0, 0, 0)),
        out.stride(0), out.stride(1), tables.stride(0),
        float(scale), float(softcap or 1.0), int(window or 0),
        KV_HEADS=shape.kv_heads, GROUP=shape.group, BLOCK_SIZE=shape.block_size, HEAD_DIM=shape.head_dim,
        DIM=shape.dim, ROWS=rows, M=config.rows, TILE=config.tile, SPLIT=split, HAS_WINDOW=window is not None,
        HAS_SOFTCAP=bool(softcap), HAS_SCALES=has_scales, PARTS=at_once,
        HAS_ORDER=order is not None, HAS_RUNS=first_units is not None, COMPUTE=compute,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=not strict,
    )  # fmt: skip

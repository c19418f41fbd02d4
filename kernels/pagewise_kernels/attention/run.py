"""Launches the attention kernel; what decode, prefill and cascade have in common."""

import torch
import triton.language as tl

from pagewise_kernels.attention.checks import Scales, Shape
from pagewise_kernels.attention.config import TileConfig
from pagewise_kernels.attention.kernel import attention_kernel
from pagewise_kernels.launch import interpreted, launch

_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


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
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
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

    ``positions`` int32 [queries]: the last context token that each query sees. ``parts``: where partial results go
    (parts, log2 of their weights, index of each query's first part). ``order`` int32: a unit's queries are entries of
    it, by default they are neighbours themselves. ``first_units`` int32 [programs / kv_heads]: the runs of
    ``plan_decode_kernel``. ``split`` and ``strict``: see ``attention_kernel``, ``merge_parts``.
    """
    has_scales = scales is not None
    k_scales, v_scales = (scales.keys, scales.values) if scales is not None else (positions, positions)
    partial = parts or (positions, positions, positions)
    # The interpreter computes with numpy, which has no bfloat16.
    compute = tl.float32 if interpreted() else _COMPUTE[q.dtype]
    launch(
        attention_kernel,
        (programs,),
        q, keys, values, k_scales, v_scales, out, partial[0], partial[1], tables, positions, units, num_units,
        partial[2], positions if order is None else order,
        positions if first_units is None else first_units,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2),
        *(k_scales.stride() if has_scales else (0, 0, 0)),
        out.stride(0), out.stride(1), tables.stride(0),
        float(scale if scale is not None else shape.head_dim**-0.5), float(softcap or 1.0), int(window or 0),
        KV_HEADS=shape.kv_heads, GROUP=shape.group, BLOCK_SIZE=shape.block_size, HEAD_DIM=shape.head_dim,
        DIM=shape.dim, M=config.rows, TILE=config.tile, SPLIT=split, HAS_WINDOW=window is not None,
        HAS_SOFTCAP=bool(softcap), HAS_SCALES=has_scales, HAS_PARTS=parts is not None,
        HAS_ORDER=order is not None, HAS_RUNS=first_units is not None, COMPUTE=compute,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=not strict,
    )  # fmt: skip

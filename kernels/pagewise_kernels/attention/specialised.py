"""Prefill attention by specialised warps, for Hopper: see ``specialised_kernel``."""

import math

import torch

from pagewise_kernels.attention.checks import check_attention, check_out
from pagewise_kernels.attention.config import TileConfig
from pagewise_kernels.attention.prefill import PrefillPlan
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.launch import capability, check_device, launch, num_sms

SPECIALISED = TileConfig(rows=128, tile=128, num_warps=4, num_stages=2)
"""The units that the kernel computes. ``num_warps``: of a consumer, of which there are two."""


def specialised_error(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Return why the kernel cannot compute such layers with KV of the same type; empty if it can."""
    if capability(device) // 10 != 9:
        return "it needs compute capability 9.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim not in (64, 128):
        return f"heads of {head_dim}, not 64 or 128"
    if heads // kv_heads > SPECIALISED.rows:
        return f"{heads // kv_heads} query heads share a KV head, not {SPECIALISED.rows} at most"
    if block_size < 16 or block_size & (block_size - 1):
        return f"blocks of {block_size} tokens, no power of two from 16 on"
    return ""


def specialised_prefill_attention(
    q: torch.Tensor,
    layer: KVLayer,
    tables: torch.Tensor,
    plan: PrefillPlan,
    *,
    out: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """As ``prefill_attention``, for plans with the configuration ``SPECIALISED`` and without a window.

    Raises:
        ValueError: shapes, strides or devices do not fit, or the kernel cannot compute them. TypeError: types do not.
    """
    shape = check_attention(q, layer, tables)
    out = check_out(q, out)
    check_device(q, plan.units)
    if plan.config != SPECIALISED or plan.window is not None or plan.deterministic:
        raise ValueError("the plan is for another kernel")
    error = specialised_error(q.shape[1], layer.kv_heads, layer.head_dim, layer.block_size, q.dtype, q.device)
    if error or layer.dtype != q.dtype:
        raise ValueError(f"attention by specialised warps: {error or f'KV in {layer.dtype}, queries in {q.dtype}'}")
    of_block, of_token, of_head = layer.strides
    piece = 16 * of_token if shape.block_size > 16 else of_block
    if of_block % piece:
        raise ValueError(f"attention by specialised warps: blocks are {of_block} apart, no multiple of {piece}")
    from pagewise_kernels.attention.specialised_kernel import specialised_prefill_kernel

    strides = piece, of_token, of_head
    launch(
        specialised_prefill_kernel,
        (min(plan.programs, num_sms(q.device)),),
        q, layer.keys, layer.values, out, tables, plan.units, plan.unit_count,
        *q.stride()[:2], *strides, *strides, *out.stride()[:2], tables.stride(0),
        (scale if scale is not None else shape.head_dim**-0.5) * math.log2(math.e),
        KV_HEADS=shape.kv_heads, GROUP=shape.group, BLOCK_SIZE=shape.block_size,
        BLOCK_STRIDE=of_block // piece, DIM=shape.head_dim, TILE=SPECIALISED.tile,
        STAGES=SPECIALISED.num_stages, num_warps=SPECIALISED.num_warps,
    )  # fmt: skip
    return out

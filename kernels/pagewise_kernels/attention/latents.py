"""Attention to latents (multi-head latent attention, MLA) over a paged context: decode and prefill.

Plans are the same as for other attention: ``kv_heads`` is the number of groups of query heads (``latent_groups``),
``head_dim`` the size of a latent and ``rotated`` the size of the part of a vector before it.
"""

import torch

from pagewise_kernels.attention.config import TileConfig
from pagewise_kernels.attention.decode import DecodePlan
from pagewise_kernels.attention.latent_kernel import latent_decode_attention_kernel, latent_prefill_attention_kernel
from pagewise_kernels.attention.prefill import PrefillPlan, StaticPrefillPlan
from pagewise_kernels.attention.run import COMPUTE, parts_at_once, registers
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.shapes import power_of_two

MAX_LATENT = 512


def decode_latents(
    q: torch.Tensor, layer: KVLayer, tables: torch.Tensor, plan: DecodePlan, *, out: torch.Tensor, scale: float
) -> None:
    """Write the attention of q [queries, heads, rotated + latent], one query for each sequence, to ``out``.

    ``layer``: of latents. tables int32 [rows, blocks]. ``plan``: planned with the contexts' lengths and rows; queries
    of length 0 get zeros. out [queries, heads, latent]: sums of latents.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    _check(q, layer, tables, out)
    if len(q) > plan.max_queries or plan.parts.values.shape[1:] != out.shape[1:]:
        raise ValueError(
            f"the plan is for {plan.max_queries} queries of {list(plan.parts.values.shape[1:])}, not {list(out.shape)}"
        )
    groups, config, parts = plan.parts.arrivals.shape[1], plan.config, plan.parts
    check_device(q, plan.units)
    rows = min(16, power_of_two(q.shape[1] // groups))
    launch(
        latent_decode_attention_kernel, (plan.programs,),
        q, layer.keys, out, parts.values, parts.highs, parts.totals, tables, plan.units, parts.arrivals,
        *q.stride()[:2], *layer.strides[:2], *out.stride()[:2], tables.stride(0), scale,
        ROWS=rows, PARTS=parts_at_once(rows * power_of_two(layer.latent), config.num_warps),
        **_options(q, layer, groups, config), maxnreg=registers(config),
    )  # fmt: skip


def prefill_latents(
    q: torch.Tensor, layer: KVLayer, tables: torch.Tensor, plan: PrefillPlan | StaticPrefillPlan, *, out: torch.Tensor,
    scale: float,
) -> None:  # fmt: skip
    """Write the causal attention of the chunks of ``plan``, whose own latents are in the pool already, to ``out``.

    q [tokens, heads, rotated + latent]; the others are as of ``decode_latents``. Only the chunks' rows are written.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    _check(q, layer, tables, out)
    if len(plan.positions) > len(q):
        raise ValueError(f"the plan has queries up to row {len(plan.positions)}, q has {len(q)}")
    check_device(q, plan.positions)
    launch(
        latent_prefill_attention_kernel, (plan.programs,),
        q, layer.keys, out, tables, plan.positions, plan.units, plan.unit_count,
        *q.stride()[:2], *layer.strides[:2], *out.stride()[:2], tables.stride(0), scale,
        **_options(q, layer, plan.groups, plan.config),
    )  # fmt: skip


def _check(q: torch.Tensor, layer: KVLayer, tables: torch.Tensor, out: torch.Tensor) -> None:
    if not 1 <= layer.latent <= MAX_LATENT or layer.kv_heads != 1:
        raise ValueError(f"the layer keeps no latents of up to {MAX_LATENT} elements")
    heads, size = q.shape[1:]
    if size != layer.head_dim or q.stride(2) != 1 or out.shape != (len(q), heads, layer.latent) or out.stride(2) != 1:
        raise ValueError(
            f"attention to latents takes q [queries, heads, {layer.head_dim}] and out [queries, heads, {layer.latent}] "
            f"in which the elements of a head lie next to each other, not {list(q.shape)} and {list(out.shape)}"
        )
    if tables.dim() != 2 or tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise TypeError(f"block tables are int32 [rows, blocks], not {tables.dtype} {list(tables.shape)}")
    if q.dtype not in COMPUTE or {layer.dtype, out.dtype} != {q.dtype}:
        raise TypeError(f"q, latents and out are of one type, not {q.dtype}, {layer.dtype} and {out.dtype}")
    check_device(q, layer.keys, tables, out)


def _options(q: torch.Tensor, layer: KVLayer, groups: int, config: TileConfig) -> dict[str, object]:
    """Return the constants and options that both kernels are compiled with."""
    rotated = layer.head_dim - layer.latent
    return {
        "KV_HEADS": groups,
        "GROUP": q.shape[1] // groups,
        "BLOCK_SIZE": layer.block_size,
        "LATENT": layer.latent,
        "DIM": max(16, power_of_two(layer.latent)),
        "ROTATED": rotated,
        "ROTATED_DIM": max(16, power_of_two(rotated)),
        "M": config.rows,
        "TILE": config.tile,
        "COMPUTE": COMPUTE[torch.float32 if interpreted() else q.dtype],
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }

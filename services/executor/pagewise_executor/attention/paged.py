"""Paged attention in plain PyTorch, plugged into transformers' models through their attention interface.

A model's attention layers call ``paged_attention``: it writes the step's K and V into the pool through the slot
mapping, then attends over block tables. Runs on any device; the Triton kernels take its place on CUDA.
"""

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from pagewise_executor.attention.context import ChunkContext, PagedLayer
from pagewise_executor.attention.decode import attend, decode_gathered, decode_in_place

NAME = "pagewise"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the paged context, as transformers calls it.

    query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]. Returns [1, tokens, heads,
    head_dim of value].
    """
    layer: PagedLayer = module.paged_layer  # type: ignore[assignment]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    return attention(layer, q, k, v, scale, sliding_window, softcap)[None], None


def attention(
    layer: PagedLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Write k and v [tokens, kv_heads, head_dim] of the step, attend with q [tokens, heads, head_dim].

    Returns [tokens, heads, head_dim of v].
    """
    step = layer.holder.step
    assert step is not None, "the step's context is set before the forward pass"
    layer.keys.flatten(0, 1).index_copy_(0, step.slots, k.to(layer.keys.dtype))
    layer.values.flatten(0, 1).index_copy_(0, step.slots, v.to(layer.values.dtype))
    in_place = q.device.type == "cpu" and q.dtype == layer.keys.dtype == torch.float32
    decode = decode_in_place if in_place else decode_gathered
    if len(step.groups) == 1 and not step.chunks:
        return decode(q, layer, step.groups[0], scale, window, softcap)
    output = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    for group in step.groups:
        attended = decode(q.index_select(0, group.index), layer, group, scale, window, softcap)
        output.index_copy_(0, group.index, attended)
    for chunk in step.chunks:
        own = slice(chunk.offset, chunk.offset + chunk.size)
        output[own] = _prefill(q[own], k[own], v[own], layer, chunk, scale, window, softcap)
    return output


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: PagedLayer,
    chunk: ChunkContext,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One chunk against its context: positions 0 to start + size, causal."""
    kv_heads, heads = k.shape[1], q.shape[1]
    stop = chunk.start + chunk.size
    if chunk.start:
        k = layer.keys.index_select(0, chunk.blocks).flatten(0, 1)[:stop].to(q.dtype)
        v = layer.values.index_select(0, chunk.blocks).flatten(0, 1)[:stop].to(q.dtype)
    queries, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    if heads != kv_heads:
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    if chunk.start == 0 and not softcap and (not window or window >= stop):
        attended = F.scaled_dot_product_attention(queries, k, v, is_causal=True, scale=scale)
    else:
        positions = torch.arange(stop, device=q.device)
        own = positions[chunk.start :, None]
        mask = positions <= own
        if window:
            mask &= positions > own - window
        attended = attend(queries, k, v, mask, scale, softcap)
    return attended[0].transpose(0, 1)


def _no_mask(*_: object, **__: object) -> None:
    """Causality comes from positions and block tables: transformers need not build a mask."""


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, _no_mask)

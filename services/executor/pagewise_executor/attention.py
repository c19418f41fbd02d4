"""Paged attention in plain PyTorch, plugged into transformers' models through their attention interface.

A model's attention layers call ``paged_attention``: it writes the step's K and V into the pool through the slot
mapping, then attends over block tables. Runs on any device; the Triton kernels take its place on CUDA.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from pagewise_executor.rows import Int64s

NAME = "pagewise"

_WASTE = 1.25
"""Decodes are grouped by context length so that no group gathers more than this times the blocks it needs."""


@dataclass(slots=True)
class DecodeGroup:
    """Decodes of similar context length: rows ``start`` to ``stop`` of the batch after sorting by ``order``.

    ``blocks`` [n, blocks] int64: their block tables, padded. ``lengths`` [n]: context tokens, the new one included.
    """

    index: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor
    masks: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class ChunkContext:
    """A prefill chunk: ``size`` queries from batch row ``offset``, at positions ``start`` on; ``blocks`` [blocks]."""

    offset: int
    start: int
    size: int
    blocks: torch.Tensor


@dataclass(slots=True)
class StepContext:
    """What attention has to know of a step: where its K and V go, and what each query may see.

    ``slots`` [tokens] int64. The first ``num_decodes`` tokens of the batch are decodes, then come the chunks.
    """

    slots: torch.Tensor
    num_decodes: int
    groups: list[DecodeGroup]
    chunks: list[ChunkContext]


@dataclass(slots=True)
class PagedLayer:
    """A layer's share of the pool, hung onto its attention module. ``step`` is set before each forward pass.

    ``keys``, ``values``: [num_blocks, block_size, kv_heads, head_dim].
    """

    keys: torch.Tensor
    values: torch.Tensor
    holder: "StepHolder"


@dataclass(slots=True)
class StepHolder:
    """The step that is being computed, shared by all layers of one model."""

    step: StepContext | None = None


def group_decodes(blocks_needed: Int64s) -> list[Int64s]:
    """Partition decodes [n] by blocks needed into few groups, so that padding gathers little in vain."""
    order = np.argsort(-blocks_needed, kind="stable")
    groups, start = [], 0
    while start < len(order):
        sizes = blocks_needed[order[start:]]
        padded = sizes[0] * np.arange(1, len(sizes) + 1)
        fine = np.flatnonzero(padded <= _WASTE * np.cumsum(sizes))
        stop = start + int(fine[-1]) + 1
        groups.append(np.sort(order[start:stop]))
        start = stop
    return groups


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
    """Attention of one layer over the paged context.

    query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]. Returns [1, tokens, heads,
    head_dim of value].
    """
    layer: PagedLayer = module.paged_layer  # type: ignore[assignment]
    step = layer.holder.step
    assert step is not None, "the step's context is set before the forward pass"
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    layer.keys.flatten(0, 1).index_copy_(0, step.slots, k.to(layer.keys.dtype))
    layer.values.flatten(0, 1).index_copy_(0, step.slots, v.to(layer.values.dtype))
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    output = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    for group in step.groups:
        _decode(output, q, layer, group, scale, sliding_window, softcap)
    for chunk in step.chunks:
        _prefill(output, q, layer, chunk, scale, sliding_window, softcap)
    return output[None], None


def _decode(
    output: torch.Tensor,
    q: torch.Tensor,
    layer: PagedLayer,
    group: DecodeGroup,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """All decodes of a group in one call. The query heads that share a KV head become rows of one small product."""
    rows, block_size = len(group.lengths), layer.keys.shape[1]
    kv_heads, heads = layer.keys.shape[2], q.shape[1]
    blocks = group.blocks
    k = layer.keys.index_select(0, blocks.flatten()).view(rows, -1, kv_heads, q.shape[-1]).transpose(1, 2)
    v = layer.values.index_select(0, blocks.flatten()).view(rows, -1, kv_heads, output.shape[-1]).transpose(1, 2)
    mask = group.masks.get(window or 0)
    if mask is None:
        positions = torch.arange(blocks.shape[1] * block_size, device=q.device)
        mask = positions < group.lengths[:, None]
        if window:
            mask &= positions >= group.lengths[:, None] - window
        mask = group.masks[window or 0] = mask[:, None, None, :]
    packed = q.index_select(0, group.index).view(rows, kv_heads, heads // kv_heads, -1)
    attended = _attend(packed, k, v, mask, scale, softcap)
    output.index_copy_(0, group.index, attended.reshape(rows, heads, -1))


def _prefill(
    output: torch.Tensor,
    q: torch.Tensor,
    layer: PagedLayer,
    chunk: ChunkContext,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """One chunk against its context: positions 0 to start + size, causal."""
    kv_heads, heads = layer.keys.shape[2], q.shape[1]
    stop = chunk.start + chunk.size
    k = layer.keys.index_select(0, chunk.blocks).flatten(0, 1)[:stop].transpose(0, 1)[None]
    v = layer.values.index_select(0, chunk.blocks).flatten(0, 1)[:stop].transpose(0, 1)[None]
    queries = q[chunk.offset : chunk.offset + chunk.size].transpose(0, 1)[None]
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
        attended = _attend(queries, k, v, mask, scale, softcap)
    output[chunk.offset : chunk.offset + chunk.size] = attended[0].transpose(0, 1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v


def _no_mask(*_: object, **__: object) -> None:
    """Causality comes from positions and block tables: transformers need not build a mask."""


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, _no_mask)

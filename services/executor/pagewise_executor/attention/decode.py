"""Decode attention: one query per sequence, all sequences of a group in one call."""

import warnings

import torch
import torch.nn.functional as F

from pagewise_executor.attention.backend import PagedLayer
from pagewise_executor.attention.context import DecodeGroup

with warnings.catch_warnings():
    # torch warns once per process that sparse matrices are in beta. This call provokes the warning where it is ignored.
    warnings.simplefilter("ignore")
    torch.zeros(1, 1).to_sparse_csr()
# This is the default, but torch 2.11 warns where it has not been asked for.
torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]


def decode_in_place(
    q: torch.Tensor, layer: PagedLayer, group: DecodeGroup, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Attend to K and V where they lie in the pool. ``q`` and the result: [n, heads, head_dim].

    The scores are a product that is sampled at the slots of the context (a sparse matrix whose pattern is the block
    tables), and the weighted sum of the values is an embedding bag. On the CPU neither of them copies K or V, and these
    copies would be the largest cost.
    """
    rows, heads, dim = q.shape
    kv_heads, block_size = layer.keys.shape[2], layer.keys.shape[1]
    seen = group.window(window, block_size)
    span = seen.slots.shape[1]
    pattern = group.patterns.get((window or 0, heads, kv_heads))
    if pattern is None:
        head_of = torch.arange(heads, device=q.device) // (heads // kv_heads)
        columns = seen.slots[:, None, :] * kv_heads + head_of[None, :, None]
        pattern = torch.sparse_csr_tensor(
            torch.arange(rows * heads + 1, device=q.device) * span,
            columns.flatten(),
            torch.zeros(columns.numel(), dtype=q.dtype, device=q.device),
            size=(rows * heads, layer.keys.shape[0] * block_size * kv_heads),
            check_invariants=False,
        )
        group.patterns[window or 0, heads, kv_heads] = pattern
    keys, values = layer.keys.view(-1, dim), layer.values.view(-1, layer.values.shape[-1])
    # The result goes into the pattern itself: a new one would copy the indices in every layer.
    torch.sparse.sampled_addmm(pattern, q.reshape(-1, dim), keys.t(), beta=0.0, alpha=scale, out=pattern)
    scores = pattern.values().view(rows, heads, span)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if seen.padding is not None:
        scores = scores.masked_fill(seen.padding[:, None], float("-inf"))
    weights = scores.softmax(dim=-1).view(-1, span)
    bags = pattern.col_indices().view(-1, span)
    return F.embedding_bag(bags, values, mode="sum", per_sample_weights=weights).view(rows, heads, -1)


def decode_gathered(
    q: torch.Tensor, layer: PagedLayer, group: DecodeGroup, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Attend like ``decode_in_place``, but to gathered copies of K and V: this works for all types and devices."""
    rows, heads, dim = q.shape
    kv_heads, block_size = layer.keys.shape[2], layer.keys.shape[1]
    blocks = group.blocks
    k = layer.keys.index_select(0, blocks.flatten()).view(rows, -1, kv_heads, dim).transpose(1, 2)
    v = layer.values.index_select(0, blocks.flatten()).view(rows, -1, kv_heads, layer.values.shape[-1]).transpose(1, 2)
    mask = group.masks.get(window or 0)
    if mask is None:
        positions = torch.arange(blocks.shape[1] * block_size, device=q.device)
        mask = positions < group.lengths[:, None]
        if window:
            mask &= positions >= group.lengths[:, None] - window
        mask = group.masks[window or 0] = mask[:, None, None, :]
    # The query heads that share a KV head become the rows of one small matrix product.
    packed = q.reshape(rows, kv_heads, heads // kv_heads, dim)
    return attend(packed, k, v, mask, scale, softcap).reshape(rows, heads, -1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attend with q [.., queries, head_dim] to k and v [.., context, head_dim] where ``mask`` is true."""
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v

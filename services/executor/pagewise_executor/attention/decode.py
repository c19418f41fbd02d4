"""Decode attention in PyTorch: one query per sequence, all sequences of a group in one call."""

import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from pagewise_executor.attention.backend import PagedLayer
from pagewise_executor.step_work import Int64s

with warnings.catch_warnings():
    # torch warns once per process that sparse matrices are in beta. This call provokes the warning where it is ignored.
    warnings.simplefilter("ignore")
    torch.zeros(1, 1).to_sparse_csr()
# This is the default, but torch 2.11 warns where it has not been asked for.
torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]


_WASTE = 1.25
"""Decodes are grouped by context length. No group reads more than this many times the blocks that it needs."""


@dataclass(slots=True)
class Window:
    """The slots that each decode of a group attends to, in a layer with or without a sliding window.

    ``slots`` [n, span] int64: pool slots, oldest first. Shorter contexts are padded with their newest slot; ``padding``
    [n, span] bool marks these entries, and is None if all contexts are equally long.
    """

    slots: torch.Tensor
    padding: torch.Tensor | None


class Limits(NamedTuple):
    """The tokens that a layer sees: of a sliding window, of an attention chunk, or all (None)."""

    window: int | None
    attention_chunk: int | None


@dataclass(slots=True)
class DecodeGroup:
    """Decodes of similar context length, at ``index`` [n] of the flat batch, which are computed together.

    ``blocks`` [n, blocks] int64: their block tables, padded. ``lengths`` [n]: context tokens, the new one included;
    ``longest``: the largest length. ``windows`` and ``patterns`` cache what layers of one kind derive from the tables,
    so that only the first layer of a kind computes it.
    """

    index: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor
    longest: int
    windows: dict[Limits, Window] = field(default_factory=dict)
    patterns: dict[tuple[Limits, int, int], torch.Tensor] = field(default_factory=dict)

    def first_seen(self, limits: Limits) -> torch.Tensor:
        """Return the first position [n, 1] that each decode sees in a layer with these limits."""
        last = self.lengths[:, None] - 1
        if chunk := limits.attention_chunk:
            return last // chunk * chunk
        return (last + 1 - (limits.window or self.longest)).clamp_(min=0)

    def window(self, limits: Limits, block_size: int) -> Window:
        """Return the slots that are seen by a layer with these limits."""
        found = self.windows.get(limits)
        if found is None:
            span = min(self.longest, limits.window or self.longest, limits.attention_chunk or self.longest)
            last, first = self.lengths[:, None] - 1, self.first_seen(limits)
            unclipped = first + torch.arange(span, device=self.blocks.device)
            positions = torch.minimum(unclipped, last)
            slots = self.blocks.gather(1, positions // block_size) * block_size + positions % block_size
            padding = unclipped > last
            found = self.windows[limits] = Window(slots, padding if bool(padding.any()) else None)
        return found


@dataclass(slots=True)
class ChunkContext:
    """A prefill chunk: ``size`` queries at index ``offset`` of the flat batch, at positions from ``start`` on.

    ``blocks`` [blocks]: the block table of its sequence, as far as the chunk's last token.
    """

    offset: int
    start: int
    size: int
    blocks: torch.Tensor


def group_decodes(blocks_needed: Int64s) -> list[Int64s]:
    """Partition decodes by the number of blocks they need [n] into few groups that are padded by little."""
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


def decode_in_place(
    q: torch.Tensor, layer: PagedLayer, group: DecodeGroup, scale: float, window: int | None, softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend to K and V where they lie in the pool. ``q`` and the result: [n, heads, head_dim]; ``sinks`` [heads].

    The scores are a product that is sampled at the slots of the context (a sparse matrix whose pattern is the block
    tables), and the weighted sum of the values is an embedding bag. On the CPU neither of them copies K or V, and these
    copies would be the largest cost.
    """
    rows, heads, dim = q.shape
    kv_heads, block_size = layer.keys.shape[2], layer.keys.shape[1]
    limits = Limits(window, layer.attention_chunk)
    seen = group.window(limits, block_size)
    span = seen.slots.shape[1]
    pattern = group.patterns.get((limits, heads, kv_heads))
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
        group.patterns[limits, heads, kv_heads] = pattern
    keys = layer.keys.view(-1, dim)
    # Sums over whole keys of latents, of which the end is cut: an embedding bag may copy a table of views.
    values = keys if layer.latent else layer.values.view(-1, layer.values.shape[-1])
    # The pattern itself takes the result: a new one would copy the indices in every layer.
    torch.sparse.sampled_addmm(pattern, q.reshape(-1, dim), keys.t(), beta=0.0, alpha=scale, out=pattern)
    scores = pattern.values().view(rows, heads, span)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if seen.padding is not None:
        scores = scores.masked_fill(seen.padding[:, None], float("-inf"))
    weights = weights_of(scores, None if sinks is None else sinks[:, None]).reshape(-1, span)
    bags = pattern.col_indices().view(-1, span)
    sums = F.embedding_bag(bags, values, mode="sum", per_sample_weights=weights).view(rows, heads, -1)
    return sums[..., -layer.latent :]  # all of them in other layers, whose ``latent`` is 0


def decode_gathered(
    q: torch.Tensor, layer: PagedLayer, group: DecodeGroup, scale: float, window: int | None, softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend like ``decode_in_place``, but to gathered copies of K and V: this works for all types and devices.

    Slots that are not seen are not read: a page that another group had may hold bits that are no numbers.
    """
    rows, heads, dim = q.shape
    kv_heads, block_size = layer.keys.shape[2], layer.keys.shape[1]
    seen = group.window(Limits(window, layer.attention_chunk), block_size)
    slots = seen.slots.flatten()
    k = layer.keys.flatten(0, 1).index_select(0, slots).view(rows, -1, kv_heads, dim).transpose(1, 2)
    if layer.latent:
        v = k[..., -layer.latent :]
    else:
        v = layer.values.flatten(0, 1).index_select(0, slots).view(rows, -1, kv_heads, dim).transpose(1, 2)
    mask = None if seen.padding is None else ~seen.padding[:, None, None, :]
    # The query heads that share a KV head become the rows of one small matrix product.
    packed = q.reshape(rows, kv_heads, heads // kv_heads, dim)
    of_heads = None if sinks is None else sinks.view(kv_heads, -1, 1)
    return attend(packed, k, v, mask, scale, softcap, of_heads).reshape(rows, heads, -1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend with q [.., queries, head_dim] to k and v [.., context, head_dim] where ``mask`` is true; None: it is.

    ``sinks`` [.., 1 or queries, 1]: a logit for each query.
    """
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return weights_of(scores, sinks).to(v.dtype) @ v


def weights_of(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax of scores [.., context] in float32, of which sinks [.., 1] take their share."""
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    joined = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    return joined.softmax(dim=-1, dtype=torch.float32)[..., :-1]

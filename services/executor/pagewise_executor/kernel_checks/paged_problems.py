"""Problems of attention for checks: sequences in a pool, as a model's layers keep them, and PyTorch's results."""

from typing import NamedTuple

import torch
from pagewise_kernels.kv_int4 import unpack
from pagewise_kernels.kv_layer import GROUP, INT4, RECORD
from pagewise_kernels.launch import interpreted
from pagewise_kernels.shapes import power_of_two

from pagewise_executor.attention.backend import AttentionShape, PagedLayer
from pagewise_executor.attention.torch_attention import attend_chunk
from pagewise_executor.kernel_checks.use import KernelUse
from pagewise_executor.kv.kv_pool import KVPool

CONTEXTS = (3, 20, 70) if interpreted() else (3, 37, 300)
"""Context lengths in tokens: within a block, over a tile, and over several tiles, whose parts are merged."""


class Paged(NamedTuple):
    """Three sequences in a pool of random K and V, in blocks in random order. ``written``: the content of the pool in
    float32. ``blocks`` [3, blocks]: of each sequence. ``tables`` int32: the same, or the last ones as a ``ring``."""

    layer: PagedLayer
    written: tuple[torch.Tensor, torch.Tensor]
    blocks: torch.Tensor
    tables: torch.Tensor
    ring: bool

    def expected(self, q: torch.Tensor, row: int, start: int, shape: AttentionShape) -> torch.Tensor:
        """Return PyTorch's attention of q [queries, heads, head_dim] from position ``start`` on."""
        k, v = (t[self.blocks[row]].flatten(0, 1)[: start + len(q)] for t in self.written)
        return attend_chunk(
            q.float(), k, v, start, shape.scale, shape.window, shape.softcap, sinks_of(q, shape), shape.attention_chunk
        )


def sinks_of(q: torch.Tensor, shape: AttentionShape) -> torch.Tensor | None:
    """Return sinks [heads] of about the size of scores, if layers of this kind have any."""
    return torch.linspace(-1, 2, shape.heads, device=q.device) if shape.sinks else None


def empty_layer(use: KernelUse, shape: AttentionShape, num_blocks: int) -> PagedLayer:
    """Return a layer of this kind in a pool of so many blocks."""
    pool = KVPool([shape.kv_shape], num_blocks, use.block_size, use.kv_dtype, use.device)
    return PagedLayer(pool.keys[0], pool.values[0], pool.scales[0], attention_chunk=shape.attention_chunk)


def stored_in(layer: PagedLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a layer in float32, as its blocks hold them."""
    if layer.dtype == INT4:
        return unpack(layer.keys), unpack(layer.values)
    if layer.scales is None:
        return layer.keys.float(), layer.values.float()
    keys, values = layer.scales
    return layer.keys.float() * keys[..., None], layer.values.float() * values[..., None]


def paged_problem(use: KernelUse, shape: AttentionShape) -> Paged:
    """Return contexts of ``CONTEXTS`` tokens for layers of this kind."""
    width = -(-max(CONTEXTS) // use.block_size)
    order = torch.randperm(len(CONTEXTS) * width, generator=torch.Generator().manual_seed(1))
    layer = empty_layer(use, shape, len(order))
    for seed, part in enumerate((layer.keys, layer.values)):
        if use.kv_dtype == INT4:
            records = part.view(torch.uint8).view(*part.shape[:-1], -1, RECORD)
            records[..., : GROUP // 2] = use.draw(*records.shape[:-1], GROUP // 2, seed=seed).mul(64).int().byte()
            records[..., GROUP // 2 :] = use.draw(*records.shape[:-1], 2, seed=seed).bfloat16().view(torch.uint8)
        else:
            part.copy_(use.draw(*part.shape, seed=seed).to(part.dtype))
    if layer.scales is not None:
        for seed, part in enumerate(layer.scales):
            part.copy_(use.draw(*part.shape, seed=seed).float().abs() + 0.5)
    blocks = order.view(len(CONTEXTS), width).to(use.device)
    ring = use.rings and (shape.window is not None or shape.attention_chunk is not None)
    entries = max(1, power_of_two(width) // 2) if ring else width
    tables = torch.zeros(len(blocks), entries, dtype=torch.int32, device=use.device)
    for row, context in enumerate(CONTEXTS):
        last = -(-context // use.block_size)
        own = torch.arange(max(0, last - entries), last, device=use.device)
        tables[row, own % entries] = blocks[row, own].int()
    return Paged(layer, stored_in(layer), blocks, tables, ring)

"""Paged attention in plain PyTorch. It runs on any device; on the CPU it is the default."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from pagewise_executor.attention.backend import AttentionBackend, AttentionShape, PagedLayer
from pagewise_executor.attention.decode import (
    ChunkContext,
    DecodeGroup,
    attend,
    decode_gathered,
    decode_in_place,
    group_decodes,
)
from pagewise_executor.step_work import StepWork
from pagewise_executor.uploads import Uploads


@dataclass(slots=True)
class TorchStep:
    """The attention of one step: its slot mapping ``slots`` [tokens] int64, and the contexts of its queries.

    The decodes of ``groups`` come first in the flat batch, then the prefill chunks.
    """

    slots: torch.Tensor
    groups: list[DecodeGroup]
    chunks: list[ChunkContext]

    def attend(
        self, layer: PagedLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
        window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend, see ``StepAttention.attend``, with the decodes in groups and the chunks one by one."""
        if layer.writes_kv:
            layer.write(self.slots, k, v)
        in_place = q.device.type == "cpu" and q.dtype == layer.dtype == torch.float32 and layer.keys.is_contiguous()
        decode = decode_in_place if in_place else decode_gathered
        if len(self.groups) == 1 and not self.chunks:
            return decode(q, layer, self.groups[0], scale, window, softcap, sinks)
        output = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        for group in self.groups:
            attended = decode(q.index_select(0, group.index), layer, group, scale, window, softcap, sinks)
            output.index_copy_(0, group.index, attended)
        for chunk in self.chunks:
            own = slice(chunk.offset, chunk.offset + chunk.size)
            keys, values = (k[own], v[own]) if not chunk.start else _gathered(layer, chunk, q.dtype)
            output[own] = attend_chunk(
                q[own], keys, values, chunk.start, scale, window, softcap, sinks, layer.attention_chunk
            )
        return output


class TorchBackend(AttentionBackend):
    """Prepares the attention of one model's steps on ``device``."""

    layout_in_pages = "tokens"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._upload = Uploads(device)

    def prepare(self, work: StepWork) -> TorchStep:
        """Prepare a step: upload the block tables of its decodes and chunks."""
        rows, positions = self._batch.flat_batch(work)
        return TorchStep(
            self._upload(self._batch.slot_mapping(rows, positions)),
            self._decode_groups(work),
            self._chunk_contexts(work),
        )

    def _decode_groups(self, work: StepWork) -> list[DecodeGroup]:
        if not len(work.decoding):
            return []
        batch = self._batch
        lengths = batch.num_computed[work.decoding] + 1
        needed = -(-lengths // batch.block_size)
        return [
            DecodeGroup(
                index=self._upload(members),
                blocks=self._upload(
                    batch.block_tables[work.decoding[members], : needed[members].max()].astype(np.int64)
                ),
                lengths=self._upload(lengths[members]),
                longest=int(lengths[members].max()),
            )
            for members in group_decodes(needed)
        ]

    def _chunk_contexts(self, work: StepWork) -> list[ChunkContext]:
        contexts = []
        for offset, chunk in work.chunk_offsets():
            blocks = -(-(chunk.start + chunk.size) // self._batch.block_size)
            table = self._upload(self._batch.block_tables[chunk.row, :blocks].astype(np.int64))
            contexts.append(ChunkContext(offset, chunk.start, chunk.size, table))
        return contexts


def _gathered(layer: PagedLayer, chunk: ChunkContext, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of K and V of a chunk's context [start + size, kv_heads, head_dim]."""
    stop = chunk.start + chunk.size
    keys = layer.keys.index_select(0, chunk.blocks).flatten(0, 1)[:stop].to(dtype)
    if layer.latent:
        return keys, keys[..., -layer.latent :]
    return keys, layer.values.index_select(0, chunk.blocks).flatten(0, 1)[:stop].to(dtype)


def attend_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    attention_chunk: int | None = None,
) -> torch.Tensor:
    """Attend with a prefill chunk, q [size, heads, head_dim], to its context from position 0 on, causally.

    ``k``, ``v`` [start + size, kv_heads, head_dim]: of the positions before the chunk, and its own. ``sinks``
    [heads]: see ``StepAttention``. ``attention_chunk``: see ``AttentionShape``. Returns [size, heads, head_dim].
    """
    if attention_chunk:  # no query sees a token before this one, which is position 0 from here on
        first = start // attention_chunk * attention_chunk
        k, v, start = k[first:], v[first:], start - first
    size, heads, dim = q.shape
    stop, kv_heads = start + size, k.shape[1]
    if k.shape[2] != v.shape[2]:
        # Latents: all query heads share one KV head, so (query, head) are the rows of one product.
        seen = torch.arange(stop, device=q.device) <= torch.arange(start, stop, device=q.device)[:, None]
        rows, mask = q.reshape(1, size * heads, dim), seen.repeat_interleave(heads, dim=0)
        return attend(rows, k.transpose(0, 1), v.transpose(0, 1), mask, scale, softcap).view(size, heads, -1)
    # The KV heads become the batch, so that on the CPU the query heads that share one need no copies of it. Whether
    # all of a GPU's kernels take strides of zero is not known.
    queries = q.reshape(size, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    k, v = (t.transpose(0, 1)[:, None].expand(-1, heads // kv_heads, -1, -1) for t in (k, v))
    if q.device.type != "cpu":
        k, v = k.contiguous(), v.contiguous()
    if start == 0 and not softcap and sinks is None and min(window or stop, attention_chunk or stop) >= stop:
        attended = F.scaled_dot_product_attention(queries, k, v, is_causal=True, scale=scale)
    else:
        positions = torch.arange(stop, device=q.device)
        own = positions[start:, None]
        mask = positions <= own
        if window:
            mask &= positions > own - window
        if attention_chunk:
            mask &= positions >= own // attention_chunk * attention_chunk
        of_heads = None if sinks is None else sinks.view(kv_heads, -1, 1, 1)
        attended = attend(queries, k, v, mask, scale, softcap, of_heads)
    return attended.permute(2, 0, 1, 3).reshape(size, heads, -1)


class LayerOfPieces(NamedTuple):
    """Attention of a layer in place of its ``PagedLayer``, without a pool: each ``piece`` of tokens is a sequence."""

    piece: int
    shape: AttentionShape
    scale_queries: Callable[[torch.Tensor], torch.Tensor] | None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None,
        softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend; ``StepAttention`` explains the arguments."""
        if self.scale_queries is not None:
            q = self.scale_queries(q)
        size = self.piece
        pieces = zip(torch.split(q, size), torch.split(k, size), torch.split(v, size), strict=True)
        chunk = self.shape.attention_chunk
        return torch.cat([attend_chunk(*each, 0, scale, window, softcap, sinks, chunk) for each in pieces])

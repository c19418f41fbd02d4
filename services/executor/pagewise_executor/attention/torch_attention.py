"""Paged attention in plain PyTorch: on any device, and what the CPU runs."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pagewise_executor.attention.backend import PagedLayer
from pagewise_executor.attention.context import ChunkContext, DecodeGroup, group_decodes
from pagewise_executor.attention.decode import attend, decode_gathered, decode_in_place
from pagewise_executor.rows import RowTable, StepWork
from pagewise_executor.uploads import Uploads


@dataclass(slots=True)
class TorchStep:
    """Where a step's K and V go, ``slots`` [tokens] int64, and what each of its queries may see.

    The decodes of ``groups`` come first in the batch, then the chunks.
    """

    slots: torch.Tensor
    groups: list[DecodeGroup]
    chunks: list[ChunkContext]

    def attend(
        self,
        layer: PagedLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See ``StepAttention.attend``."""
        layer.keys.flatten(0, 1).index_copy_(0, self.slots, k.to(layer.keys.dtype))
        layer.values.flatten(0, 1).index_copy_(0, self.slots, v.to(layer.values.dtype))
        in_place = q.device.type == "cpu" and q.dtype == layer.keys.dtype == torch.float32
        decode = decode_in_place if in_place else decode_gathered
        if len(self.groups) == 1 and not self.chunks:
            return decode(q, layer, self.groups[0], scale, window, softcap)
        output = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        for group in self.groups:
            attended = decode(q.index_select(0, group.index), layer, group, scale, window, softcap)
            output.index_copy_(0, group.index, attended)
        for chunk in self.chunks:
            own = slice(chunk.offset, chunk.offset + chunk.size)
            output[own] = _prefill(q[own], k[own], v[own], layer, chunk, scale, window, softcap)
        return output


class TorchBackend:
    """Makes the steps of one model on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._upload = Uploads(device)

    def reset(self, table: RowTable) -> None:
        """All rows are empty; ``table`` is what holds them from now on."""
        self._table = table

    def update_tables(self, work: StepWork) -> None:
        """There is nothing to take over: each step looks at the row table itself."""

    def prepare(self, work: StepWork) -> TorchStep:
        """Look at a step that the table has applied and not advanced yet."""
        rows, positions = self._table.batch(work)
        return TorchStep(
            self._upload(self._table.slots(rows, positions)), self._decode_groups(work), self._chunk_contexts(work)
        )

    def _decode_groups(self, work: StepWork) -> list[DecodeGroup]:
        if not len(work.decoding):
            return []
        table = self._table
        lengths = table.num_computed[work.decoding] + 1
        needed = -(-lengths // table.block_size)
        return [
            DecodeGroup(
                index=self._upload(members),
                blocks=self._upload(table.tables[work.decoding[members], : needed[members].max()].astype(np.int64)),
                lengths=self._upload(lengths[members]),
                longest=int(lengths[members].max()),
            )
            for members in group_decodes(needed)
        ]

    def _chunk_contexts(self, work: StepWork) -> list[ChunkContext]:
        contexts, offset = [], len(work.decoding)
        for chunk in work.chunks:
            blocks = -(-(chunk.start + chunk.size) // self._table.block_size)
            table = self._upload(self._table.tables[chunk.row, :blocks].astype(np.int64))
            contexts.append(ChunkContext(offset, chunk.start, chunk.size, table))
            offset += chunk.size
        return contexts


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

"""Attention over page tables (``--kv-mapping mmu``): each row's context is a view of consecutive virtual addresses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from pagewise_executor.attention.backend import AttentionBackend, BatchTables, PagedLayer
from pagewise_executor.attention.decode import attend
from pagewise_executor.attention.torch_attention import attend_chunk
from pagewise_executor.kv.kv_pool import KVPool, Layout
from pagewise_executor.kv.page_tables import Context, PageTables, physical_memory
from pagewise_executor.step_work import StepWork
from pagewise_executor.uploads import Uploads


@dataclass(slots=True)
class Queries:
    """``size`` queries of a row at index ``offset`` of the flat batch, at positions from ``start`` on."""

    offset: int
    start: int
    size: int
    context: Context


@dataclass(slots=True)
class MappedStep:
    """The attention of one step: its slot mapping ``slots`` [tokens] int64, and its queries, row by row."""

    slots: torch.Tensor
    queries: list[Queries]

    def attend(
        self, layer: PagedLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
        window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend, see ``StepAttention.attend``. K and V are written to the pool, and read where they are mapped."""
        if layer.writes_kv:
            layer.write(self.slots, k, v)
        output = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        for one in self.queries:
            stop = one.start + one.size
            first = max(0, one.start + 1 - window) if window else 0
            if chunk := layer.attention_chunk:
                first = one.start // chunk * chunk
            keys, values = one.context.keys[layer.number][first:stop], one.context.values[layer.number][first:stop]
            own = slice(one.offset, one.offset + one.size)
            if one.size == 1:
                output[own] = _attend_one(q[own], keys, values, scale, softcap, sinks)
            else:
                output[own] = attend_chunk(
                    q[own], keys, values, one.start - first, scale, window, softcap, sinks, chunk
                )
        return output


class MappedBackend(AttentionBackend):
    """Prepares the attention of one model's steps over page tables, which map the physical memory of its pool."""

    layouts: ClassVar[Mapping[str, Layout]] = {"layers": "layers", "blocks": "tokens"}
    """Page tables need tokens at equal distances."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._memory, self._upload = physical_memory(device), Uploads(device)
        self._pages: PageTables | None = None

    @classmethod
    def check(cls, device: torch.device) -> None:
        """Check that the device has memory that can be mapped."""
        physical_memory(device)

    def allocate(self, size: int) -> torch.Tensor:
        """Allocate the physical memory of the pool."""
        return self._memory.allocate(size)

    def free(self) -> None:
        """Free the physical memory of the pool."""
        self._memory.free()

    def reset(self, batch: BatchTables, pool: KVPool) -> None:
        """Make new page tables for the rows of ``batch``."""
        super().reset(batch, pool)
        if self._pages is not None:
            self._pages.close()
        self._pages = PageTables(self._memory, pool, *batch.block_tables.shape)

    def update_block_tables(self, work: StepWork) -> None:
        """Map the blocks that a step adds to the block tables."""
        assert self._pages is not None
        for row, start, stop in work.changed_tables:
            self._pages.map(row, start, self._batch.block_tables[row, start:stop])

    def prepare(self, work: StepWork) -> MappedStep:
        """Prepare a step from the contexts of its rows."""
        batch, pages = self._batch, self._pages
        assert pages is not None
        rows, positions = batch.flat_batch(work)
        decodes = zip(work.decoding.tolist(), batch.num_computed[work.decoding].tolist(), strict=True)
        queries = [Queries(offset, start, 1, pages.context(row)) for offset, (row, start) in enumerate(decodes)]
        queries += (
            Queries(offset, chunk.start, chunk.size, pages.context(chunk.row)) for offset, chunk in work.chunk_offsets()
        )
        return MappedStep(self._upload(batch.slot_mapping(rows, positions)), queries)


def _attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend with one query [1, heads, head_dim] to all of k and v [context, kv_heads, head_dim]."""
    # The query heads that share a KV head become the rows of one small matrix product.
    packed = q.reshape(1, k.shape[1], -1, q.shape[-1])
    of_heads = None if sinks is None else sinks.view(k.shape[1], -1, 1)
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if softcap or of_heads is not None:
        seen = torch.ones(k.shape[2], dtype=torch.bool, device=q.device)
        return attend(packed, k, v, seen, scale, softcap, of_heads).reshape(1, q.shape[1], -1)
    return F.scaled_dot_product_attention(packed, k, v, scale=scale).reshape(1, q.shape[1], -1)

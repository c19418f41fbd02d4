"""Paged attention by the CPU operations, which read block tables and K and V where they lie."""

import numpy as np
import torch
from pagewise_kernels.cpu.attention import CpuStep, Rotation

from pagewise_executor.attention.backend import AttentionBackend, PagedLayer
from pagewise_executor.attention.shared_prefixes import shared_prefixes
from pagewise_executor.step_work import StepWork


class CpuStepAttention:
    """The attention of one step."""

    def __init__(self, step: CpuStep) -> None:
        self.step = step

    def attend(
        self, layer: PagedLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
        window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend, see ``StepAttention.attend``. With ``rotation``, queries and keys have norm and rotation before, and
        ``q`` is changed in place."""
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        return self.step.attend(
            q, k, v, layer, scale=scale, window=window, softcap=softcap, rotation=rotation, sinks=sinks,
            attention_chunk=layer.attention_chunk, write=layer.writes_kv,
        )  # fmt: skip


class CpuBackend(AttentionBackend):
    """Prepares the attention of one model's steps on the CPU."""

    kv_dtypes = ("int8", "int4")

    def prepare(self, work: StepWork) -> CpuStepAttention:
        """Prepare a step from the block tables on the host."""
        batch = self._batch
        rows, positions = batch.flat_batch(work)
        decodes = len(work.decoding)
        chunks = [(offset, chunk.row, chunk.start, chunk.size) for offset, chunk in work.chunk_offsets()]
        lengths = positions[:decodes] + 1
        prefixes = members = None
        if batch.shares_prefixes:
            prefixes, members = shared_prefixes(batch.block_tables, rows[:decodes], lengths, batch.block_size)
        return CpuStepAttention(
            CpuStep(
                batch.slot_mapping(rows, positions),
                batch.block_tables,
                rows[:decodes],
                lengths,
                np.array(chunks, np.int64).reshape(-1, 4),
                block_size=batch.block_size,
                prefixes=prefixes,
                members=members,
            )
        )

"""Attention of a model with several groups of layers: one backend for each slot, as for a model with one group.

The Triton backend does this by itself: plans of one kind of layers serve all slots.
"""

import dataclasses
from collections.abc import Sequence

import torch

from pagewise_executor.attention.backend import AttentionBackend, BatchTables, ForwardContext, StepAttention
from pagewise_executor.grouped_batch import GroupedBatch
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.kv.page_pool import PagePool
from pagewise_executor.step_work import StepWork


class GroupedBackend(AttentionBackend):
    """Prepares the attention of each slot by its own backend out of ``backends``.

    The layers of a slot have its context out of ``contexts``, and find the step of its backend there.
    """

    def __init__(self, device: torch.device, backends: Sequence[AttentionBackend]) -> None:
        super().__init__(device)
        self._backends = backends
        self.contexts = [ForwardContext() for _ in backends]

    def reset(self, batch: BatchTables, pool: KVPool) -> None:
        """Use the empty ``batch``, a ``GroupedBatch``, whose tables name pages of ``pool``, a ``PagePool``."""
        assert isinstance(batch, GroupedBatch)
        assert isinstance(pool, PagePool)
        self._groups = batch
        for backend, view, slot in zip(self._backends, batch.slots, pool.slots, strict=True):
            backend.reset(view, slot)

    def update_block_tables(self, work: StepWork) -> None:
        """Apply the changes of a step to the tables of each slot."""
        batch = self._groups
        changes = [dataclasses.replace(work, changed_tables=changed) for changed in batch.changed]
        for backend, view in zip(self._backends, batch.slots, strict=True):
            backend.update_block_tables(changes[view.group])

    def prepare(self, work: StepWork) -> StepAttention:
        """Prepare the step of each slot; returns the attention of the first slot."""
        steps = [backend.prepare(work) for backend in self._backends]
        for context, step in zip(self.contexts, steps, strict=True):
            context.step = step
        return steps[0]

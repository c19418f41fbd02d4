"""The interface between the model runner and what computes the model."""

from typing import Protocol

import torch

from pagewise_executor.input_batch import InputBatch, Int64s, StepWork
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.kv.segment_mover import SegmentMover


class ModelEngine(Protocol):
    """Computes the logits of steps. It reads and writes the KV pool, whose blocks the input batch's tables name."""

    def attach(self, pool: KVPool, mover: SegmentMover) -> None:
        """Use the K and V of ``pool`` from now on.

        ``mover``: has made the moves of a step before it is computed. If computing a chunk disturbs what lies behind
        it, the engine has to make them again.
        """
        ...

    def detach(self) -> None:
        """Use the pool no longer, so that its memory can be freed."""
        ...

    def reset(self, batch: InputBatch) -> None:
        """Use the empty ``batch`` from now on."""
        ...

    def update_block_tables(self, work: StepWork) -> None:
        """Take over what a step changes in the block tables. This is called before anything else of the step runs."""
        ...

    def compute(self, work: StepWork, ids: torch.Tensor, positions: Int64s, kept: Int64s) -> torch.Tensor:
        """Compute a step that the batch has applied and not advanced yet.

        ``ids``, ``positions`` [tokens]: the flat batch, decodes first, then prefill chunks. ``kept`` [n]: the indices
        of the flat batch whose logits are wanted. Returns logits [n, vocab], which the next call may overwrite.
        """
        ...

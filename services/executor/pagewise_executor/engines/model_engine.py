"""The interface between the model runner and what computes the model."""

from collections.abc import Sequence
from typing import Protocol

import torch

from pagewise_executor.input_batch import InputBatch, Int64s, StepWork
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.kv.segment_mover import SegmentMover
from pagewise_executor.uploads import Array


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

    def compute(
        self, work: StepWork, kept: Int64s, also: Sequence[Array] = ()
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Compute a step that the batch has applied and not advanced yet.

        ``kept`` [n]: the indices of the flat batch (decodes first, then prefill chunks) whose logits are wanted.
        ``also``: arrays that come to the device with those of the step, by the same copy.

        Returns logits [n, vocab], which the next call may overwrite, and ``also``, on the device.
        """
        ...


def token_ids(last: torch.Tensor, work: StepWork, chunk_tokens: torch.Tensor) -> torch.Tensor:
    """Return the ids int64 [tokens] of a step's flat batch.

    ``last`` [decodes]: the tokens that the rows of decodes have sampled; ``chunk_tokens``: those of all chunks.
    """
    return torch.cat([last, chunk_tokens]) if work.chunks else last

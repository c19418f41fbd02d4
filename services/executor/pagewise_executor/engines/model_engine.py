"""The interface between the model runner and what computes the model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from pagewise_executor.adapters.adapters import Adapters
from pagewise_executor.attention.backend import AttentionBackend, ForwardContext, PagedLayer
from pagewise_executor.input_batch import InputBatch, Int64s, StepWork
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.kv.segment_mover import SegmentMover
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.rope_lengths import rope_positions
from pagewise_executor.uploads import Array, Uploads

if TYPE_CHECKING:
    from pagewise_executor.cuda_graphs.mixed_graphs import MixedGraphs


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


class TorchEngine:
    """Runs ``loaded`` with ``attention`` between its layers, and the adapters of rows. See ``ModelEngine``.

    ``last_tokens`` int64 [num_rows + 1]: the token that each row sampled last. ``graphs``: what runs some of the steps
    with chunks.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        attention: AttentionBackend,
        last_tokens: torch.Tensor,
        adapters: Adapters | None = None,
    ) -> None:
        self._adapters, self._last_tokens = adapters, last_tokens
        self.graphs: MixedGraphs | None = None
        self.model, self._layers, self._attention = loaded.model, loaded.attention, attention
        self.forward_context = ForwardContext()
        self._upload, self._rope_lengths = Uploads(loaded.device), loaded.rope.lengths

    def attach(self, pool: KVPool, mover: SegmentMover) -> None:
        """See ``ModelEngine``."""
        self._pool = pool
        tensors = zip(self._layers, pool.keys, pool.values, pool.scales, strict=True)
        for number, (module, keys, values, scales) in enumerate(tensors):
            module.paged_layer = PagedLayer(keys, values, self.forward_context, scales, number)  # type: ignore[assignment]

    def detach(self) -> None:
        """See ``ModelEngine``."""
        del self._pool
        for module in self._layers:
            del module.paged_layer

    def reset(self, batch: InputBatch) -> None:
        """See ``ModelEngine``."""
        self._batch = batch
        self._attention.reset(batch, self._pool)

    def update_block_tables(self, work: StepWork) -> None:
        """See ``ModelEngine``."""
        self._attention.update_block_tables(work)

    def compute(
        self, work: StepWork, kept: Int64s, also: Sequence[Array] = ()
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See ``ModelEngine``."""
        rows, flat = self._batch.flat_batch(work)
        lengths = self._rope_lengths
        positions = flat if lengths is None else rope_positions(lengths, self._batch, rows, flat)
        if self.graphs is not None and self.graphs.takes(work) and positions is flat:
            return self.graphs.run(self._batch, work, kept, also)
        self.forward_context.step = self._attention.prepare(work)
        if self._adapters is not None:
            self._adapters.slots.begin(self._batch.adapters[rows])
        decoding, tokens, positions_there, wanted, *there = self._upload.together(
            work.decoding, self._batch.chunk_tokens(work), positions, kept, *also
        )
        ids = token_ids(self._last_tokens[decoding], work, tokens)
        return self.forward(ids, positions_there, wanted), tuple(there)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor | int = 0) -> torch.Tensor:
        """Run the model on a flat batch of ids and positions [tokens], with the attention of ``forward_context``.

        Returns the logits [n, vocab] at the indices ``kept`` [n], or at all of them if it is 0.
        """
        output = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept)
        logits: torch.Tensor = output.logits[0]
        return logits

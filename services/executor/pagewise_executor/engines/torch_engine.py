"""The engine that runs a model of transformers with torch. Its attention is PyTorch's or the Triton kernels'."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pagewise_executor.attention.backend import AttentionBackend, ForwardContext, PagedLayer
from pagewise_executor.engines.model_engine import token_ids
from pagewise_executor.input_batch import InputBatch, Int64s, StepWork
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.kv.segment_mover import SegmentMover
from pagewise_executor.lora.adapters import Adapters
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.rope_lengths import rope_positions
from pagewise_executor.uploads import Array, Uploads

if TYPE_CHECKING:
    from pagewise_executor.cuda_graphs.mixed_graphs import MixedGraphs


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
        positions = rope_positions(self._rope_lengths, self._batch, rows, flat)
        if self.graphs is not None and self.graphs.takes(work) and positions is flat:
            return self.graphs.run(self._batch, work, kept, also)
        self.forward_context.step = self._attention.prepare(work)
        if self._adapters is not None:
            self._adapters.begin(self._batch.adapters[rows])
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

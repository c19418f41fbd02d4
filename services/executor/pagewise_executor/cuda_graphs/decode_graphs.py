"""Steps of decodes alone by CUDA graphs: one graph for each of a ladder of batch sizes, which samples as well.

The split of the contexts is planned on the device in every step, and the sampled tokens feed the next step without
going through the host. Without CUDA the same steps run directly.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from itertools import product

import numpy as np
import torch
from pagewise_kernels.sampling import sample
from pagewise_shared.progress import logged_progress

from pagewise_executor.adapters.triton_slots import TritonSlots
from pagewise_executor.attention.backend import ForwardContext
from pagewise_executor.attention.triton_attention import TritonBackend
from pagewise_executor.collectives import Ranks
from pagewise_executor.cuda_graphs.graphed_steps import GraphedSteps, sizes_up_to
from pagewise_executor.recurrent_plans import RecurrentPlans
from pagewise_executor.sampling.token_sampler import TritonTokenSampler
from pagewise_executor.step_work import Int64s
from pagewise_executor.uploads import Uploads

log = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Token ids and positions [n] to logits [n, vocab]."""

_LARGEST = 512
"""Larger batches run without a graph, as in vLLM: for these the device takes longer than the host."""
LADDER = [1, 2, 4, *range(8, 257, 8), *range(272, _LARGEST + 1, 16)]
"""Sizes that never pad by much."""


class DecodeGraphs(GraphedSteps):
    """Runs decode steps of up to ``num_rows`` sequences from static buffers.

    ``last_tokens`` int64 [num_rows + 1]: the token that was sampled last for each row; the last entry belongs to the
    queries that pad a batch. ``adapters``: the adapters of the rows, if there are any. ``plans``: of recurrent layers.
    """

    name = "decode steps"

    def __init__(
        self, forward: Forward, forward_context: ForwardContext, backend: TritonBackend,
        token_sampler: TritonTokenSampler, last_tokens: torch.Tensor,
        adapters: TritonSlots | None = None, plans: RecurrentPlans | None = None,
    ) -> None:  # fmt: skip
        device, num_rows = last_tokens.device, len(last_tokens) - 1
        super().__init__(sizes_up_to(min(num_rows, _LARGEST), LADDER), adapters)
        self._forward, self._forward_context = forward, forward_context
        self._backend, self._token_sampler = backend, token_sampler
        self._last_tokens = last_tokens
        self._padding, self._plans = num_rows, plans
        self._upload = Uploads(device)
        self._inputs = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
        self._rows, self._lengths = self._inputs
        self._ids, self._positions = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
        self._slots = backend.new_slots(num_rows)
        # All graphs write their results here: results of their own would each keep their memory.
        self._logits: torch.Tensor | None = None
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.clear(num_rows)

    def clear(self, size: int) -> None:
        """Fill the inputs of a step with padding."""
        self._rows[:size] = self._padding
        self._lengths[:size] = 0
        if self._plans is not None:
            self._plans.clear()

    def capture(self, pool: object, ranks: Ranks) -> object:
        """Allocate the results, and capture the graphs: see ``GraphedSteps``."""
        self._logits = torch.empty_like(self.compute(self.sizes[-1])[0])
        return super().capture(pool, ranks)

    def record(self, size: int, *, uses: bool) -> None:
        """Compute a step, and copy its results to the memory that all graphs share."""
        assert self._logits is not None
        logits, tokens = self.compute(size)
        self._logits[:size].copy_(logits)
        self._tokens[:size].copy_(tokens)

    def drop(self) -> None:
        """Drop all graphs and their results."""
        super().drop()
        self._logits = None

    def warm_up(self) -> None:
        """Compile the kernels of steps that run without graphs: one variant for each power of two of the batch size."""
        self.clear(self._padding)
        sizes = [size for size in self.sizes if size & (size - 1) == 0 or size == self.sizes[-1]]
        steps = list(product(sizes, self.variants()))
        progress = logged_progress(log, "compiling the kernels of decodes", len(steps), "sizes")
        for size, uses in steps:
            self.use_adapters(size, uses=uses)
            self.compute(size)
            progress.update()
        self.allocate()

    def allocate(self) -> None:
        """Run the largest step once. It allocates the attention plans and their scratch, which all steps use."""
        self.clear(self._padding)
        self.use_adapters(self._padding, uses=False)
        self.compute(self._padding)

    def run(self, rows: Int64s, lengths: Int64s, adapters: Int64s) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one decode step for ``rows`` [n], whose contexts have ``lengths`` [n] tokens including the new one.

        ``adapters`` [n]: the slots of their adapters, -1 for none.

        Returns the logits [n, vocab] and the tokens int64 [n] that were sampled from them, without logits processors.
        Both are valid until the next run.
        """
        count = len(rows)
        size = self.sizes[bisect_left(self.sizes, count)] if count <= self.sizes[-1] else count
        padded = np.full((2, size), self._padding, np.int32)
        padded[1] = 0
        padded[0, :count], padded[1, :count] = rows, lengths
        self._backend.share_prefixes(rows, lengths)
        tables = self._backend.tables
        inputs, *changes = self._upload.together(padded, *tables.take())
        tables.change(changes)
        self._inputs[:, :size].copy_(inputs)
        self._token_sampler.parameters()  # uploads the parameters of new sequences, outside of the graph
        if self._plans is not None:
            self._plans.begin_static(size, longer=False)
        uses = self.adapters is not None and self.adapters.begin_static(adapters, size)
        if (graph := self.graphs.get((size, uses))) is not None and self._logits is not None:
            graph.replay()
            return self._logits[:count], self._tokens[:count]
        logits, tokens = self.compute(size)
        return logits[:count], tokens[:count]

    def compute(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step from the static buffers; return logits [size, vocab] and tokens [size]."""
        rows, lengths, slots = self._rows[:size], self._lengths[:size], self._slots[:, :size]
        ids, positions = self._ids[:size], self._positions[:size]
        self._backend.fill_inputs(rows, lengths, self._last_tokens, ids, positions, slots)
        self._forward_context.step = self._backend.decode_step(slots, lengths, rows)
        if self._plans is not None:
            self._plans.use_static(size, longer=False)
        logits = self._forward(ids, positions)
        tokens = sample(logits, self._token_sampler.parameters(), rows, positions + 1)
        self._last_tokens.index_copy_(0, rows.long(), tokens)
        return logits, tokens

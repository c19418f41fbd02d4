"""Decode steps by CUDA graphs: one graph for each of a ladder of batch sizes.

Launching the kernels of a step takes longer than the device needs for a small step; a graph is launched at once. A
batch is padded up to the next size. The split of the contexts is planned on the device in every step, and the sampled
tokens feed the next step without going through the host. Without CUDA the same steps run directly.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from pagewise_kernels.decode_inputs import decode_inputs
from pagewise_kernels.sampling import sample

from pagewise_executor.attention.backend import ForwardContext
from pagewise_executor.attention.triton_attention import TritonBackend
from pagewise_executor.collectives import ALONE, Ranks
from pagewise_executor.graph_capture import captured, why_failed
from pagewise_executor.input_batch import Int64s
from pagewise_executor.lora.triton_slots import TritonSlots
from pagewise_executor.sampling.token_sampler import TritonTokenSampler
from pagewise_executor.sync_debug import waiting_is_an_error
from pagewise_executor.uploads import Uploads

log = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Token ids and positions [n] to logits [n, vocab]."""


class DecodeGraphs:
    """Runs decode steps of up to ``num_rows`` sequences from static buffers.

    ``last_tokens`` int64 [num_rows + 1]: the token that was sampled last for each row; the last entry belongs to the
    queries that pad a batch. ``adapters``: those that rows may have. ``ranks``: that capture the same graphs, or none.
    """

    def __init__(
        self,
        forward: Forward,
        forward_context: ForwardContext,
        backend: TritonBackend,
        token_sampler: TritonTokenSampler,
        last_tokens: torch.Tensor,
        block_size: int,
        adapters: TritonSlots | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._adapters, self._ranks = adapters, ranks
        self._forward, self._forward_context, self._backend, self._token_sampler = (
            forward,
            forward_context,
            backend,
            token_sampler,
        )
        self._last_tokens = last_tokens
        self._block_size = block_size
        device, num_rows = last_tokens.device, len(last_tokens) - 1
        self._padding = num_rows
        self._upload = Uploads(device)
        self._sizes = graph_sizes(num_rows)
        largest = self._sizes[-1]
        self._rows = torch.full((largest,), num_rows, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(largest, dtype=torch.int32, device=device)
        self._ids, self._positions, self._slots = torch.zeros(3, largest, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        # All graphs write their results here: results of their own would each keep their memory.
        self._logits: torch.Tensor | None = None
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=device)

    def capture(self) -> bool:
        """Capture the graphs. This takes seconds, and memory for the activations of the largest one.

        Returns whether there are graphs. A model that waits for the device cannot be captured, and a capture may fail:
        then steps run without graphs on all ranks, and the log says why.

        Raises:
            RuntimeError: a step fails while other ranks wait for it.
        """
        began = time.perf_counter()
        self._lengths.zero_()
        reason = self._agreed(self._why_not())
        if reason is None:
            reason = self._capture_all()
        if reason is not None:
            log.warning("decode steps run without CUDA graphs, slower: %s", reason)
            self.warm_up()
            return False
        log.info("%d CUDA graphs captured in %.1f s", len(self._graphs), time.perf_counter() - began)
        return True

    def _agreed(self, reason: str | None) -> str | None:
        """Return why there cannot be graphs on this rank or on another one, None if there can."""
        possible = self._ranks.least(reason is None)
        return None if possible else reason or "another rank has none"

    def _capture_all(self) -> str | None:
        """Capture the graphs; None. If that fails on any rank, drop all of them and return why."""
        reason = pool = None
        try:
            largest = self._compute(self._sizes[-1])[0]
            self._logits = torch.empty_like(largest)
            del largest
            for size, uses in product(reversed(self._sizes), self._variants()):
                self._use_adapters(size, uses=uses)
                self._compute(size)  # compiles kernels that are not compiled yet
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                reason = self._agreed(self._capture_one(graph, size, self._logits, pool))
                if reason is not None:
                    break
                pool = graph.pool()
                self._graphs[size, uses] = graph
        except RuntimeError as error:
            if not self._ranks.alone:
                raise  # the others wait in the middle of a step for this rank, which they cannot go on without
            reason = why_failed(error)
        if reason is not None:
            self._graphs.clear()
            self._logits = None
        return reason

    def _capture_one(self, graph: torch.cuda.CUDAGraph, size: int, results: torch.Tensor, pool: Any) -> str | None:
        """Capture a step into ``graph``; None. If that fails, return why: nothing of the step has run on the device."""
        try:
            with captured(graph, pool):
                logits, tokens = self._compute(size)
                results[:size].copy_(logits)
                self._tokens[:size].copy_(tokens)
        except RuntimeError as error:
            return why_failed(error)
        return None

    @property
    def num_graphs(self) -> int:
        """See ``Graphs``."""
        return len(self._sizes) * len(self._variants())

    def warm_up(self) -> None:
        """Compile the kernels of steps that run without graphs: one variant for each power of two of the batch size."""
        self._lengths.zero_()
        for size, uses in product(self._sizes, self._variants()):
            if size & (size - 1) == 0 or size == self._sizes[-1]:
                self._use_adapters(size, uses=uses)
                self._compute(size)

    def allocate(self) -> None:
        """Run the largest step once: that allocates what all steps keep, the attention plans with their scratch."""
        self._lengths.zero_()
        self._use_adapters(self._sizes[-1], uses=False)
        self._compute(self._sizes[-1])

    def _variants(self) -> tuple[bool, ...]:
        """Whether steps use adapters: those that do not should not pay for them."""
        return (False,) if self._adapters is None else (True, False)

    def _use_adapters(self, size: int, *, uses: bool) -> None:
        if self._adapters is not None:
            self._adapters.prepare_decode(size, uses=uses)

    def _why_not(self) -> str | None:
        """Return what in a step waits for the device; None if nothing does.

        It is found out before a capture, because it is no failure: some mixtures of experts, for instance, copy the
        sizes of their groups to the host.
        """
        size = self._sizes[0]
        self._compute(size)  # the first call may wait: it compiles and allocates
        torch.cuda.synchronize()
        try:
            with waiting_is_an_error():
                self._compute(size)
        except RuntimeError as error:
            return f"a step waits for the device ({_first_line(error)})"
        return None

    def run(self, rows: Int64s, lengths: Int64s, adapters: Int64s) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one decode step for ``rows`` [n], whose contexts have ``lengths`` [n] tokens including the new one.

        ``adapters`` [n]: the slots of their adapters, -1 for none.

        Returns the logits [n, vocab] and the tokens int64 [n] that were sampled from them, without logits processors.
        Both are valid until the next run.
        """
        count = len(rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        padded = np.full((2, size), self._padding, np.int32)
        padded[1] = 0
        padded[0, :count], padded[1, :count] = rows, lengths
        self._backend.share_prefixes(rows, lengths)
        ints = self._upload(padded)
        self._rows[:size].copy_(ints[0])
        self._lengths[:size].copy_(ints[1])
        self._token_sampler.parameters()  # uploads those of new sequences, outside of the graph
        uses = self._adapters is not None and self._adapters.begin_decode(adapters, size)
        if (graph := self._graphs.get((size, uses))) is not None and self._logits is not None:
            graph.replay()
            return self._logits[:count], self._tokens[:count]
        logits, tokens = self._compute(size)
        return logits[:count], tokens[:count]

    def _compute(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, lengths, slots = self._rows[:size], self._lengths[:size], self._slots[:size]
        ids, positions = self._ids[:size], self._positions[:size]
        decode_inputs(
            rows, lengths, self._backend.tables, self._last_tokens, block_size=self._block_size, ids=ids,
            positions=positions, slots=slots,
        )  # fmt: skip
        self._forward_context.step = self._backend.decode_step(slots, lengths, rows)
        logits = self._forward(ids, positions)
        tokens = sample(logits, self._token_sampler.parameters(), rows, positions + 1)
        self._last_tokens.index_copy_(0, rows.long(), tokens)
        return logits, tokens


def graph_sizes(most: int) -> list[int]:
    """Return the batch sizes that get a graph: a ladder that never pads by much, up to ``most``."""
    ladder = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, most + 32, 32)]
    return [*(size for size in ladder if size < most), most]


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]

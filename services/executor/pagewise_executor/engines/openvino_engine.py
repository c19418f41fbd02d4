"""The engine that runs a model compiled by OpenVINO, over the blocks of our KV pool."""

from collections.abc import Sequence

import numpy as np
import openvino as ov
import torch

from pagewise_executor.engines.model_engine import token_ids
from pagewise_executor.input_batch import InputBatch, Int64s, StepWork
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.kv.segment_mover import SegmentMover
from pagewise_executor.rope_lengths import RopeLengths, rope_positions
from pagewise_executor.uploads import Array


class OpenVINOEngine:
    """Runs what ``models.openvino_model.compile_model`` has made: with one thread if that is what torch has for a step,
    as far as it was compiled for one. See ``ModelEngine``.

    Its paged attention reads and writes K and V where they lie in the pool, which keeps the heads before the tokens.
    """

    def __init__(
        self, compiled: dict[int, ov.CompiledModel], last_tokens: torch.Tensor, rope_lengths: RopeLengths | None = None
    ) -> None:
        self._last_tokens, self._rope_lengths = last_tokens, rope_lengths
        self._requests = {threads: each.create_infer_request() for threads, each in compiled.items()}
        self._usual = self._requests[max(compiled)]

    def attach(self, pool: KVPool, mover: SegmentMover) -> None:
        """See ``ModelEngine``."""
        self._mover = mover
        for layer, (keys, values) in enumerate(zip(pool.keys, pool.values, strict=True)):
            for name, tensor in ((f"keys.{layer}", keys), (f"values.{layer}", values)):
                heads_first = tensor.transpose(1, 2)
                assert heads_first.is_contiguous(), "OpenVINO needs the heads before the tokens"
                for request in self._requests.values():
                    request.set_tensor(name, ov.Tensor(heads_first.numpy(), shared_memory=True))

    def detach(self) -> None:
        """Do nothing: the pool of the CPU is never made a second time."""

    def reset(self, batch: InputBatch) -> None:
        """See ``ModelEngine``."""
        self._batch = batch

    def update_block_tables(self, work: StepWork) -> None:
        """Do nothing: each step reads the block tables of the input batch."""

    def compute(
        self, work: StepWork, kept: Int64s, also: Sequence[Array] = ()
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See ``ModelEngine``."""
        last = self._last_tokens[torch.from_numpy(work.decoding)]
        ids = token_ids(last, work, torch.from_numpy(self._batch.chunk_tokens(work)))
        positions = rope_positions(self._rope_lengths, self._batch, *self._batch.flat_batch(work))
        return self._compute(work, ids, positions, kept), tuple(torch.from_numpy(array) for array in also)

    def _compute(self, work: StepWork, ids: torch.Tensor, positions: Int64s, kept: Int64s) -> torch.Tensor:
        """Compute logits. Each decode and each chunk is one subsequence of the flat batch."""
        rows = np.concatenate([work.decoding, np.array([chunk.row for chunk in work.chunks], np.int64)])
        sizes = np.array([1] * len(work.decoding) + [chunk.size for chunk in work.chunks])
        chunk_starts = np.array([chunk.start for chunk in work.chunks], np.int64)
        past = np.concatenate([self._batch.num_computed[work.decoding], chunk_starts])
        turns = _turns(rows)
        if not work.moves:
            return self._infer(rows, past, sizes, ids, positions, kept)
        # A subsequence does not see K and V of another one of the same row that are computed by the same call, and what
        # lies behind a subsequence in its last block is lost: what was moved there is moved again.
        turn_of = np.repeat(turns, sizes)
        logits: torch.Tensor | None = None
        for turn in range(turns.max() + 1):
            if turn:
                self._mover.move(work.moves, self._batch)
            parts, own = turns == turn, np.flatnonzero(turn_of == turn)
            wanted = np.flatnonzero(turn_of[kept] == turn)
            index = np.searchsorted(own, kept[wanted])
            found = self._infer(rows[parts], past[parts], sizes[parts], ids[own], positions[own], index)
            if logits is None:
                logits = found.new_empty(len(kept), found.shape[-1])
            logits[wanted] = found
        self._mover.move(work.moves, self._batch)
        assert logits is not None
        return logits

    def _infer(
        self, rows: Int64s, past: Int64s, sizes: Int64s, ids: torch.Tensor, positions: Int64s, kept: Int64s
    ) -> torch.Tensor:
        """Compute subsequences: of each its row, how many tokens come before it, and its size."""
        batch = self._batch
        blocks = -(-(past + sizes) // batch.block_size)
        block_begins = _begins(blocks)
        index = np.arange(block_begins[-1]) - np.repeat(block_begins[:-1], blocks)
        inputs = {
            "input_ids": ids.numpy(),
            "position_ids": positions,
            "past_lens": past.astype(np.int32),
            "subsequence_begins": _begins(sizes),
            "block_indices": batch.block_tables[np.repeat(rows, blocks), index],
            "block_indices_begins": block_begins,
            "max_context_len": np.array((past + sizes).max(), np.int32),
            # Without a row the last operations would have nothing to work on.
            "kept": kept if len(kept) else np.zeros(1, np.int64),
        }
        request = self._requests.get(torch.get_num_threads(), self._usual)
        for name, array in inputs.items():
            request.set_tensor(name, ov.Tensor(array))
        request.infer(share_outputs=True)  # without copying the logits
        return torch.from_numpy(request.get_output_tensor(0).data)[: len(kept)]


def _turns(rows: Int64s) -> Int64s:
    """Return how many of the subsequences before each one have the same row [n]."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first = np.searchsorted(ordered, ordered)
    turns = np.empty(len(rows), np.int64)
    turns[order] = np.arange(len(rows)) - first
    return turns


def _begins(sizes: Int64s) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return where each of these stretches begins, and where the last one ends: int32 [len(sizes) + 1]."""
    begins = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=begins[1:])
    return begins

"""The forward pass of steps: the model over a flat batch, with the attention and the sampling of its kernels."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagewise_executor.adapters.adapters import Adapters
from pagewise_executor.attention.backend import AttentionBackend, ForwardContext, PagedLayer
from pagewise_executor.attention.grouped import GroupedBackend
from pagewise_executor.attention.registry import backend_of, kv_dtype_for
from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.grouped_batch import GroupedBatch
from pagewise_executor.input_batch import InputBatch
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.kv.layer_groups import PageLayout
from pagewise_executor.kv.page_pool import PagePool
from pagewise_executor.models.cpu_recurrence import find_recurrences
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.models.long_rope import rope_positions
from pagewise_executor.models.recurrent import PagedRecurrence, RecurrentContext, StateBatch, page_states
from pagewise_executor.sampling.logprobs import ComputeLogprobs, compute_logprobs
from pagewise_executor.sampling.penalties import Penalties, TorchPenalties, TritonPenalties
from pagewise_executor.sampling.token_sampler import TokenSampler, TorchTokenSampler, TritonTokenSampler
from pagewise_executor.step_work import Chunk, Int64s, StepWork
from pagewise_executor.uploads import Array, Uploads

if TYPE_CHECKING:
    from pagewise_executor.attention.prefill_libraries import PrefillLibrary
    from pagewise_executor.cuda_graphs.mixed_graphs import MixedGraphs, StepGraphs
    from pagewise_executor.models.triton_recurrence import TritonRecurrence
    from pagewise_executor.recurrent_plans import RecurrentPlans


log = logging.getLogger(__name__)


class ForwardPass:
    """Runs a model over the KV pool, with the adapters of rows.

    ``last_tokens`` int64 [num_rows + 1]: the token that each row sampled last. ``graphs``: run some of the steps with
    chunks. ``plans``: of recurrent layers by the Triton kernels. ``gathers_states``: other recurrent layers gather and
    scatter their states. ``attention``: reads and writes the KV pool through the block tables of the input batch.
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
        self.model, self._layers, self.attention = loaded.model, loaded.attention, attention
        self._attention_chunks = [layer.attention_chunk for layer in loaded.layers]
        # Of each layer, the layer of the pool that it reads.
        self._places = [loaded.kv_layers.index(source) for source in loaded.sources] or range(len(loaded.layers))
        self.forward_context = ForwardContext()
        self._upload, self._rope_lengths = Uploads(loaded.device), loaded.rope.lengths
        self.recurrent_context = RecurrentContext()
        self.plans: RecurrentPlans | None = None
        self._recurrent, self.gathers_states = self._replace_recurrent(loaded)

    def _replace_recurrent(self, loaded: LoadedModel) -> tuple[list["PagedRecurrence | TritonRecurrence"], bool]:
        """Return the replacements of the forward passes of recurrent modules, in order, and whether some of them gather
        and scatter states."""
        flat: Mapping[str, TritonRecurrence] = {}
        if loaded.kernels == "triton" and loaded.recurrent:
            from pagewise_executor.models.triton_recurrence import find_kernels

            flat = find_kernels(loaded.model, loaded.recurrent, self.recurrent_context, loaded.device)
            for name, one in flat.items():
                loaded.model.get_submodule(name).forward = one
        operations = find_recurrences(loaded.model, loaded.recurrent) if loaded.kernels == "cpu" else {}
        others = [layer for layer in loaded.recurrent if layer.name not in flat]
        paged = iter(page_states(loaded.model, others, self.recurrent_context, operations))
        return [flat.get(layer.name) or next(paged) for layer in loaded.recurrent], bool(others)

    def attach(self, pool: KVPool) -> None:
        """Use the K and V of ``pool`` from now on."""
        self._pool = pool
        written: set[int] = set()
        slots = pool.slot_of if isinstance(pool, PagePool) else [0] * len(pool.layers)
        contexts = [self.forward_context] * len(pool.layers)
        if isinstance(self.attention, GroupedBackend):
            contexts = [self.attention.contexts[slot] for slot in slots]
        for module, place, chunk in zip(self._layers, self._places, self._attention_chunks, strict=True):
            layer = pool.layers[place]
            paged = PagedLayer(layer.keys, layer.values, layer.scales, contexts[place], place, chunk)
            paged.writes_kv, paged.slot = place not in written, slots[place]
            paged.scale_queries = getattr(module, "scale_queries", None)
            written.add(place)
            module.paged_layer = paged  # type: ignore[assignment]
        start = 0
        if self.plans is not None:
            self.plans.attach(pool.regions[0][0])
        for recurrence in self._recurrent:
            start = recurrence.attach(pool.regions[0][0], start)

    def detach(self) -> None:
        """Drop the references to the pool, and free its memory if the backend has allocated it."""
        del self._pool
        for module in self._layers:
            del module.paged_layer
        for recurrence in self._recurrent:
            recurrence.detach()
        self.attention.free()

    def reset(self, batch: InputBatch) -> None:
        """Use the empty ``batch`` from now on."""
        self._batch = batch
        self.attention.reset(batch, self._pool)
        if self.plans is not None:
            assert isinstance(batch, GroupedBatch)
            self.plans.reset(batch)

    def compute(
        self, work: StepWork, kept: Int64s, also: Sequence[Array] = ()
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Compute a step that the batch has applied and not advanced yet.

        ``kept`` [n]: the indices of the flat batch (decodes first, then prefill chunks) whose logits are wanted; in a
        step without chunks all of them, in order. ``also``: further arrays that the same copy uploads.

        Returns logits [n, vocab], which the next call may overwrite, and ``also``, on the device.
        """
        rows, flat = self._batch.flat_batch(work)
        lengths = self._rope_lengths
        positions = flat if lengths is None else rope_positions(lengths, self._batch, rows, flat)
        if self.graphs is not None and self.graphs.takes(work) and positions is flat:
            return self.graphs.run(self._batch, work, kept, also)
        self.forward_context.step = self.attention.prepare(work)
        if self._recurrent:
            self._plan_recurrent()
            first, size = len(work.decoding), sum(chunk.size for chunk in work.drafted)
            self.recurrent_context.drafted = slice(first, first + size)
        if self._adapters is not None:
            self._adapters.slots.begin(self._batch.adapters[rows])
        decoding, tokens, positions_there, wanted, *there = self._upload.together(
            work.decoding, self._batch.chunk_tokens(work), positions, kept, *also
        )
        last = self._last_tokens[decoding]
        if not work.chunks:  # each token is a decode, whose logits are wanted
            return self.forward(last, positions_there), tuple(there)
        return self.forward(torch.cat([last, tokens]), positions_there, wanted), tuple(there)

    def _plan_recurrent(self) -> None:
        """Give the plan and the batches of the step to recurrent layers."""
        if self.plans is not None:
            self.plans.begin()
        if self.gathers_states:
            self.recurrent_context.batches = self._state_batches()

    def _state_batches(self) -> list[StateBatch]:
        """Return the batches of the step for recurrent layers, on the device."""
        assert isinstance(self._batch, GroupedBatch)
        found = []
        for tokens, read, written in self._batch.state_batches:
            there, *pages = self._upload.together(tokens, *(one for one in (read, written) if one is not None))
            found.append(StateBatch(there, None if read is None else pages[0], None if written is None else pages[-1]))
        return found

    def settle(self) -> None:
        """Update the states of rows by the tokens that they keep of a step with drafts, which the batch has counted."""
        if self._recurrent:
            self._plan_recurrent()
        for recurrence in self._recurrent:
            recurrence.settle(self.recurrent_context.batches)

    def attend_behind(self, chunks: list[Chunk]) -> None:
        """Prepare attention of layers that compute ``chunks`` behind the step, whose tables hold."""
        nothing = np.zeros(0, np.int64)
        work = StepWork(nothing, False, chunks, [], [], [], [], (), [], [])
        self.forward_context.step = self.attention.prepare(work)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor | int = 0) -> torch.Tensor:
        """Run the model on a flat batch of ids and positions [tokens], with the attention of ``forward_context``.

        Returns the logits [n, vocab] at the indices ``kept`` [n], or at all of them if it is 0.
        """
        output = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept)
        logits: torch.Tensor = output.logits[0]
        return logits


class StepCompute(NamedTuple):
    """The forward pass and the sampling of an executor. ``graphs``: run steps of decodes alone, and some of the steps
    with chunks; None: the forward pass runs all of them."""

    forward_pass: ForwardPass
    token_sampler: TokenSampler
    penalties: Penalties
    compute_logprobs: ComputeLogprobs
    graphs: "StepGraphs | None" = None


def choose_compute(
    config: SizedConfig,
    loaded: LoadedModel,
    last_tokens: torch.Tensor,
    adapters: Adapters | None,
    pages: PageLayout | None = None,
) -> StepCompute:
    """Return the forward pass and the sampling by ``loaded.kernels``. Triton kernels are checked before they are used.

    ``last_tokens`` int64 [num_rows + 1]: the token that each row sampled last. ``adapters``: of the executor.
    ``pages``: of a model with several groups of layers.

    Raises:
        ModelError: a Triton kernel does not work on this device.
    """
    device, backend = loaded.device, backend_of(config, loaded.kernels)
    if loaded.kernels != "triton":
        attention = backend(device)
        if pages is not None:
            slots = sum(group.pages_per_block for group in pages.groups)
            attention = GroupedBackend(device, [backend(device) for _ in range(slots)])
        forward_pass = ForwardPass(loaded, attention, last_tokens, adapters)
        penalties = TorchPenalties(loaded.vocab_size, device)
        return StepCompute(forward_pass, TorchTokenSampler(device), penalties, compute_logprobs)
    from pagewise_executor.attention.prefill_choice import choose_prefill_library
    from pagewise_executor.kernel_checks.run import check_kernels

    kv_dtype = kv_dtype_for(config, loaded.dtype, backend, device)
    check_kernels(config, loaded, kv_dtype, pages)
    if pages is not None:
        log.info("attention of prompts: triton, because libraries are not called for groups of layers")
        return triton_compute(config, loaded, last_tokens, adapters, pages=pages)
    library, is_unfit = choose_prefill_library(config, device, loaded.layers, kv_dtype)
    loaded.fallback |= is_unfit
    return triton_compute(config, loaded, last_tokens, adapters, library)


def triton_compute(
    config: SizedConfig,
    loaded: LoadedModel,
    last_tokens: torch.Tensor,
    adapters: Adapters | None,
    library: "PrefillLibrary | None" = None,
    pages: PageLayout | None = None,
) -> StepCompute:
    """Return the forward pass and the sampling by the Triton kernels. ``library``: computes attention of prompts.
    ``pages``: see ``choose_compute``."""
    from pagewise_kernels.logprobs import token_logprobs

    from pagewise_executor.adapters.triton_slots import TritonSlots
    from pagewise_executor.attention.device_tables import table_shapes
    from pagewise_executor.attention.triton_attention import TritonBackend
    from pagewise_executor.cuda_graphs.decode_graphs import DecodeGraphs
    from pagewise_executor.cuda_graphs.mixed_graphs import LARGEST, MixedGraphs, ModelBody, StepGraphs

    device, rows = loaded.device, config.max_num_seqs
    longest, size = loaded.max_model_len, config.block_size
    backend = TritonBackend(
        device, rows, longest, size, deterministic=config.deterministic, library=library,
        shapes=table_shapes(pages, longest, size, config.max_num_batched_tokens),
    )  # fmt: skip
    forward_pass = ForwardPass(loaded, backend, last_tokens, adapters)
    token_sampler = TritonTokenSampler(rows, device)
    slots = adapters.slots if adapters is not None else None
    assert slots is None or isinstance(slots, TritonSlots)
    forward, context = forward_pass.forward, forward_pass.forward_context
    penalties = TritonPenalties(rows, loaded.vocab_size, device)
    if loaded.recurrent:
        from pagewise_executor.recurrent_plans import RecurrentPlans

        state_bytes = sum(layer.num_bytes for layer in loaded.recurrent)
        most = min(config.max_num_batched_tokens, LARGEST)
        forward_pass.plans = RecurrentPlans(forward_pass.recurrent_context, state_bytes, rows, most, device)
    if forward_pass.gathers_states:
        log.warning("steps run without CUDA graphs, slower: PyTorch computes recurrent layers")
        return StepCompute(forward_pass, token_sampler, penalties, token_logprobs)
    if forward_pass.plans is not None:
        log.info("steps with drafts run without CUDA graphs: recurrent layers keep their inputs")
    decodes = DecodeGraphs(forward, context, backend, token_sampler, last_tokens, slots, forward_pass.plans)
    forward_pass.graphs = mixed = MixedGraphs(
        ModelBody(loaded.model), forward, context, backend, last_tokens, config.max_num_batched_tokens, slots,
        forward_pass.plans,
    )  # fmt: skip
    if loaded.draft is not None:
        loaded.draft.reserve(mixed.sizes[-1])
    return StepCompute(forward_pass, token_sampler, penalties, token_logprobs, StepGraphs(decodes, mixed))

"""Runs step plans on a real model: block copies, one forward pass over a flat batch of tokens, sampling."""

import dataclasses
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from pagewise_kernels.kv_layer import INT4
from pagewise_shared.block_hash import HASH_BYTES
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.config.adapter_options import adapter_capacity
from pagewise_shared.protocol import (
    DEVICE,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    CancelCopies,
    CompileGrammar,
    DropStored,
    GrammarCompiled,
    Hello,
    Inventory,
    LoadAdapter,
    LookUp,
    SetStoredBudgets,
    StepPlan,
    TierInfo,
    Welcome,
)

from pagewise_executor.adapters.adapters import make_adapters
from pagewise_executor.attention.registry import backend_of, check_kv_shapes, kv_dtype_for, layout_of
from pagewise_executor.collectives import ALONE, Ranks
from pagewise_executor.device_defaults import Gpu, SizedConfig, with_step_limits
from pagewise_executor.devices import device_name, set_cpu_threads
from pagewise_executor.forward_pass import choose_compute
from pagewise_executor.graph_capture import graphs_bytes
from pagewise_executor.group_choice import choose_pages, groups_of
from pagewise_executor.grouped_batch import GroupedBatch, batch_for
from pagewise_executor.issued_step import IssuedStep, record_event
from pagewise_executor.kv.issuing import Issuing
from pagewise_executor.kv.kv_pool import KVPool, bytes_per_block, pool_size
from pagewise_executor.kv.page_pool import PagePool
from pagewise_executor.kv.segment_mover import SegmentMover
from pagewise_executor.models.draft_models import add_draft_model
from pagewise_executor.models.loader import LoadedModel, load_model
from pagewise_executor.page_labels import LABEL_BYTES, KeptBlocks, PageLabels
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.profile import CPU_SIZES, GPU_SIZES, measure_costs, measure_tier, profile_run
from pagewise_executor.proposer import Proposer
from pagewise_executor.runner import BesideSteps, Counted, Report
from pagewise_executor.sampling.constraint_tables import ConstraintTables
from pagewise_executor.sampling.logprobs import LogprobsTensors, prompt_logprobs
from pagewise_executor.sampling.sampler import Sampler
from pagewise_executor.sampling.thinking import ThinkingRows
from pagewise_executor.step_threads import StepThreads
from pagewise_executor.step_work import Int32s, StepWork, accept, kept_tokens
from pagewise_executor.structured.structured_rows import StructuredRows, load_grammars
from pagewise_executor.tiers.block_copier import BlockCopier
from pagewise_executor.tiers.device import BlockHashes, DeviceTier
from pagewise_executor.tiers.make_tiers import make_tiers, staging_bytes
from pagewise_executor.tiers.peers import MakePeers, Peers
from pagewise_executor.tiers.small_copies import small_copies
from pagewise_executor.uploads import Array, Uploads, to_host
from pagewise_executor.warm_up import warm_up, warm_up_copies

if TYPE_CHECKING:
    from pagewise_executor.cuda_graphs.mixed_graphs import StepGraphs


log = logging.getLogger(__name__)


_NO_SEGMENTS = "its windowed layers do not keep all tokens (with --no-layer-groups they do)"
_NO_SEGMENTS_OF_STATES = "its recurrent layers keep states, which depend on all tokens before a segment"
_NO_SEGMENTS_IN_FOUR_BITS = "its KV in four bits would lose more when it is moved (--kv-dtype)"

_Computed = tuple[torch.Tensor, LogprobsTensors | None, list[tuple[int, LogprobsTensors]], torch.Tensor | None]


class ModelRunner:
    """One model, its KV pool, and the input batch that uses it.

    ``exchange``: makes the connections by which executors exchange blocks. ``host_folder``: the folder of host memory
    that outlives the process. ``ranks``: the ranks of this executor, each of which has a runner that gets the same
    calls with the same plans. All hold the same blocks, each with its own part of the KV; rank 0 samples for all.

    Raises ModelError from its constructor if the model cannot be served.
    """

    info: Hello
    _report: Report

    def __init__(
        self,
        config: ExecutorConfig,
        *,
        exchange: MakePeers | None = None,
        host_folder: Path | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        threads = set_cpu_threads(config.threads)
        self._ranks = ranks
        loaded = load_model(config, ranks)
        add_draft_model(config, loaded)
        self._device = loaded.device
        config = with_step_limits(config, _gpu(self._device), ranks.least)
        backend = backend_of(config, loaded.kernels)
        kv_dtype = kv_dtype_for(config, loaded.dtype, backend, loaded.device)
        check_kv_shapes(kv_dtype, loaded.shapes)
        if kv_dtype == INT4:
            loaded.rotations, loaded.no_segments = [], _NO_SEGMENTS_IN_FOUR_BITS
        self._layout = layout_of(config, backend)
        self._pages = choose_pages(config, loaded, kv_dtype)
        if self._pages is not None:
            self._layout = backend.layout_in_pages
            loaded.rotations, loaded.no_segments = [], _NO_SEGMENTS_OF_STATES if loaded.recurrent else _NO_SEGMENTS
        if config.max_model_len == "auto":  # block tables have room for the pool that would fit beside no steps
            most = self._holds(config, self._num_blocks(config, loaded, kv_dtype))
            loaded = dataclasses.replace(loaded, max_model_len=min(loaded.max_model_len, most))
        self._threads, self._issuing = StepThreads(threads if self._device.type == "cpu" else 1), Issuing()
        self._longest, self._upload = loaded.max_model_len, Uploads(self._device)
        # The token that each row sampled last: written by sampling, read by the next step, without leaving the device.
        # The last entry belongs to the queries that pad a batch.
        self._last_tokens = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=self._device)
        self._grammars, self._no_grammars = None, "rank 0 samples"
        if ranks.first:
            self._grammars, self._no_grammars = load_grammars(config, loaded.vocab_size, loaded.device.type)
        self._adapters = make_adapters(config, loaded)
        chosen = choose_compute(config, loaded, self._last_tokens, self._adapters, self._pages)
        self._forward_pass, self._graphs = chosen.forward_pass, chosen.graphs
        self._token_sampler, self._penalties = chosen.token_sampler, chosen.penalties
        self._compute_logprobs = chosen.compute_logprobs
        draft, forward = loaded.draft, self._forward_pass
        self._proposer = Proposer(draft, forward, self._device, ranks) if draft is not None else None
        self._peers: Peers | None = None
        self._size_pool(config, loaded, kv_dtype)
        block_format = self._add_tiers(config, loaded, kv_dtype, host_folder)
        if self._graphs is not None and self._device.type == "cuda":
            self._capture(self._graphs, config)
        if ranks.first:
            self._rehearse(config, loaded.dtype)
        self.reset(Welcome(0, config.max_num_seqs, config.max_num_batched_tokens, keeps_blocks=True))
        if exchange is not None:
            self._copier.peers = self._peers = peers = exchange(self._copier.tiers, self._pool.bytes_per_block)
            if self._pages is not None:
                peers.server.pages_of = self._pages_for_peer
            self.info = msgspec.structs.replace(
                self.info, block_endpoint=peers.server.endpoint, block_format=block_format
            )

    def _add_tiers(
        self, config: SizedConfig, loaded: LoadedModel, kv_dtype: torch.dtype, host_folder: Path | None
    ) -> str:
        """Make the tiers below the device; return the format of blocks, or pages."""
        paged = "" if self._pages is None else f" {self._pages.page_bytes} {self.info.groups}"
        paged += f" {[layer.states for layer in loaded.recurrent]}" if loaded.recurrent else ""
        states = self._pages is not None and self._pages.states is not None
        small = small_copies(config, self._pool, loaded.shapes, has_states=states)
        paged += f" {small.name}" if small is not None else ""
        block_format = loaded.block_format(kv_dtype, self._layout + paged)
        lower = make_tiers(
            config, self._pool, loaded.fingerprint, block_format, loaded.weight_files, host_folder, self._ranks,
            self._issuing, HASH_BYTES if self._pages is None else LABEL_BYTES, small,
        )  # fmt: skip
        self._copier.tiers |= lower
        # Of the pages of a tier with ids, page 0 is the null page here too.
        unused = 0 if self._pages is None else 1
        described = (
            TierInfo(
                number,
                max(0, tier.num_blocks - unused),
                identity=tier.identity,
                block_bytes=tier.block_bytes,
                dtype=tier.dtype,
            )
            for number, tier in lower.items()
        )
        self.info = msgspec.structs.replace(self.info, tiers=tuple(described))
        return block_format

    def _size_pool(self, config: SizedConfig, loaded: LoadedModel, kv_dtype: torch.dtype) -> None:
        """Make the KV pool in the size that the options ask for, or that the device has room for."""
        unsized = self._device.type == "cuda" and config.num_blocks is None and config.kv_memory is None
        reserved = self._measure_activations(config, loaded, kv_dtype) if unsized else 0
        self._make_pool(config, loaded, kv_dtype, self._num_blocks(config, loaded, kv_dtype, reserved))
        _log_pool(self.info)

    def _num_blocks(self, config: SizedConfig, loaded: LoadedModel, kv_dtype: torch.dtype, reserved: int = 0) -> int:
        """Return the number of blocks of all layers, or of pages, for which every rank has room."""
        each, most = bytes_per_block(loaded.shapes, config.block_size, kv_dtype), loaded.max_model_len
        size = pool_size(config, each, self._device, most, reserved, self._ranks.on_host, self._pages)
        return self._ranks.least(size)

    def _holds(self, config: SizedConfig, num_blocks: int) -> int:
        """Return the most tokens of a sequence that has ``num_blocks`` blocks, or pages, to itself."""
        if self._pages is None:
            return num_blocks * config.block_size
        return self._pages.longest_sequence(num_blocks, config.tokens_in_flight)

    def _make_pool(self, config: SizedConfig, loaded: LoadedModel, kv_dtype: torch.dtype, num_blocks: int) -> None:
        triton = loaded.kernels == "triton"
        if self._pages is None:
            block_bytes = bytes_per_block(loaded.shapes, config.block_size, kv_dtype)
            pool = KVPool(
                loaded.shapes, num_blocks, config.block_size, kv_dtype, self._device, layout=self._layout,
                triton=triton, memory=self._forward_pass.attention.allocate(num_blocks * block_bytes),
            )  # fmt: skip
        else:
            pool = PagePool(
                self._pages, num_blocks, config.block_size, kv_dtype, self._device, layout=self._layout, triton=triton
            )
        self._pool = pool
        self._names: BlockHashes | PageLabels
        self._kept: KeptBlocks | None = None
        if self._pages is None:
            self._names = BlockHashes(num_blocks, config.block_size)
        else:
            self._names = PageLabels(1 + num_blocks, config.block_size)
            self._kept = KeptBlocks([group.pages_per_block for group in groups_of(self._pages)])
        self._copier = BlockCopier(DeviceTier(pool, self._names), groups_of(self._pages))
        self._mover = SegmentMover(pool, loaded.rotations, triton=triton)
        self._forward_pass.attach(pool)
        fits = self._holds(config, num_blocks) if config.max_model_len == "auto" else loaded.max_model_len
        pages_per_block = 1 if self._pages is None else self._pages.groups[0].pages_per_block
        self.info = Hello(
            PROTOCOL_MAJOR,
            PROTOCOL_MINOR,
            executor_id="",
            model_fingerprint=loaded.fingerprint,
            vocab_size=loaded.vocab_size,
            max_model_len=min(fits, loaded.max_model_len),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            num_blocks=num_blocks // pages_per_block,
            bytes_per_block=pool.bytes_per_block * pages_per_block,
            device=device_name(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            kernels=loaded.kernels,
            fallback=not self._ranks.least(not loaded.fallback),  # a slower rank makes all others wait
            no_segments=loaded.no_segments,
            no_grammars=self._no_grammars,
            adapters=adapter_capacity(config),
            max_grammars=self._grammars.most if self._grammars is not None else 0,
            short_rope_len=loaded.rope.lengths.short_len if loaded.rope.lengths is not None else 0,
            groups=groups_of(self._pages),
            num_pages=0 if self._pages is None else num_blocks,
            page_bytes=0 if self._pages is None else pool.bytes_per_block,
            max_proposed=loaded.draft.most if loaded.draft is not None else 0,
            max_proposing=loaded.draft.most_rows if loaded.draft is not None else 0,
            drafts_with_grammars=self._grammars is not None,
        )

    def _measure_activations(self, config: SizedConfig, loaded: LoadedModel, kv_dtype: torch.dtype) -> int:
        """Return the bytes of device memory that the largest step takes beside weights, KV and static buffers."""
        # There cannot be more chunks than rows.
        tokens = min(config.max_num_batched_tokens, config.max_num_seqs * loaded.max_model_len)
        blocks = tokens // config.block_size + 2 * -(-tokens // loaded.max_model_len)
        pages = sum(group.pages_per_block for group in self._pages.groups) if self._pages is not None else 1
        self._make_pool(config, loaded, kv_dtype, blocks * pages)
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.allocate(captures=config.cuda_graphs)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        profile_run(self, tokens)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        if self._graphs is not None and config.cuda_graphs:
            peak += self._graphs.memory(peak, tokens)
        del self._pool, self._copier, self._mover  # the references to this pool, whose memory the next one gets
        self._forward_pass.detach()
        # Decode graphs keep their logits as well; sampling takes copies of these, and masks.
        peak += 5 * config.max_num_seqs * loaded.vocab_size * 4
        peak += staging_bytes(config) + config.cuda_graphs * graphs_bytes(self._graphs, len(loaded.layers))
        log.info("steps take %.2f GiB beside weights and KV", peak / 2**30)
        return int(peak)

    def _capture(self, graphs: "StepGraphs", config: SizedConfig) -> None:
        with torch.inference_mode():
            if not config.cuda_graphs:
                graphs.decodes.warm_up()
            elif not graphs.capture(self._ranks):
                self.info = msgspec.structs.replace(self.info, fallback=True)
        warm_up_copies(self._pool)
        self._mover.warm_up()
        if (slots := graphs.decodes.adapters) is not None:
            slots.warm_up()

    def _rehearse(self, config: SizedConfig, dtype: torch.dtype) -> None:
        """Compile the kernels of serving, and measure the costs of steps and copies.

        The number of steps depends on their times. So rank 0 decides it, and the others follow.
        """
        if self._device.type == "cuda" and self._graphs is not None:
            least = self._graphs.mixed.least_without
            warm_up(self, self._pool, dtype, config.max_num_batched_tokens, least)
        if not config.profile:
            return
        sizes = GPU_SIZES if self._device.type == "cuda" else CPU_SIZES
        self.info = msgspec.structs.replace(self.info, costs=measure_costs(self, config.max_num_batched_tokens, sizes))
        device, beside = self._copier.tiers[DEVICE], sizes is GPU_SIZES
        measured = (
            measure_tier(self, device, self._copier.tiers[tier.number], tier, beside=beside) for tier in self.info.tiers
        )
        self.info = msgspec.structs.replace(self.info, tiers=tuple(measured))

    def _pages_for_peer(self, tier: int, group: int, numbers: Int32s) -> Int32s | None:
        batch = self._batch
        assert isinstance(batch, GroupedBatch)
        return batch.pages_for_peer(tier, group, numbers)

    def report_to(self, report: Report) -> None:
        """Call ``report``, on any thread, with the outcomes of copies and of the messages that ``handle`` takes."""
        self._report = report
        self._copier.report_to(report)
        if self._adapters is not None:
            self._adapters.report_to(report)

    def handle(self, message: BesideSteps) -> None:
        """Begin to handle a message, and report the outcome later; called from any thread."""
        match message:
            case CancelCopies():
                self._copier.cancel(message)
            case LookUp():
                self._copier.look_up(message)
            case DropStored():
                self._copier.drop(message)
            case SetStoredBudgets():
                self._copier.set_budgets(message)
            case LoadAdapter() if self._adapters is not None:
                self._adapters.load(message)
            case CompileGrammar() if self._grammars is not None:
                compiled = GrammarCompiled(message.epoch, message.number)
                self._grammars.prepare(message.grammar).add_done_callback(lambda _: self._report(compiled))

    @property
    def counted(self) -> Counted:
        """The totals of the counters; read from any thread."""
        return Counted(
            self._peers.server.num_refused if self._peers is not None else 0,
            self._copier.num_errors,
            self._grammars.num_waits if self._grammars is not None else 0,
            *dataclasses.astuple(self._copier.copied),
        )

    def inventory(self) -> Inventory | None:
        """Return the hashed blocks that are in the tiers. All sequences are removed from the batch first."""
        for row in list(self._batch.sequences):
            self._batch.remove(row)
            self._sampler.leave(row)
            self._thinking.leave(row)
        return self._copier.inventory(self._kept)

    def agree(self, inventory: Inventory | None) -> None:
        """Offer these blocks instead of all, because all ranks of this executor hold them."""
        assert self._kept is not None
        self._kept.agree(inventory)

    def close(self) -> None:
        """Stop serving blocks to peers, and release the tiers."""
        self._copier.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._adapters is not None:
            self._adapters.close()
        self._ranks.leave()

    def reset(self, welcome: Welcome) -> None:
        """Empty the input batch and make room for ``welcome.max_num_seqs`` sequences."""
        tiers = {tier.number: tier.num_blocks for tier in self.info.tiers}
        self._batch = batch_for(
            self.info, tiers, num_rows=welcome.max_num_seqs, max_model_len=self._longest,
            vocab_size=self.info.vocab_size, short_rope_len=self.info.short_rope_len,
        )  # fmt: skip
        if isinstance(self._names, BlockHashes):
            self._batch.on_remove = self._names.cache_full_blocks
        elif isinstance(self._batch, GroupedBatch):
            self._batch.label_with(self._names)
        self._forward_pass.reset(self._batch)
        if self._adapters is not None:
            self._adapters.reset(welcome.epoch)
        self._copier.reset(welcome.epoch, keep=welcome.keeps_blocks)
        if self._kept is not None and isinstance(self._batch, GroupedBatch):
            if welcome.keeps_blocks:  # not before, because peers that ask for blocks of the old epoch must get none
                self._batch.restore(self._kept)
            self._kept.clear()
        self._thinking = ThinkingRows(self._last_tokens)
        self._sampler = Sampler(
            self._token_sampler, self._penalties, ConstraintTables(self.info.vocab_size, self._device),
            self._compute_logprobs, self._device,
            StructuredRows(self._grammars, self.info.no_grammars, self.info.vocab_size, self._device),
        )  # fmt: skip

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> IssuedStep:
        """Issue a step.

        Raises:
            InvalidPlanError: the plan contradicts the state of the rows. The device's errors are torch's own.
        """
        began = time.perf_counter()
        start = record_event(self._device)
        batch = self._batch
        with self._issuing.step():
            work = self._apply(plan)
            self._accepted(plan)
            self._copier.begin(plan.epoch, plan.step, work.copies)
            # After the copies, which report blocks that leave the device by their names.
            self._names.forget(batch.overwritten(work))
            if work.moves:
                self._mover.move(work.moves, batch)
            tokens, logprobs, prompts, proposed = self._compute(work)
            rows = [batch.sequences[row] for row in work.sampled_rows]
            kept = kept_tokens(work.drafts, len(work.decoding), len(rows)) if work.drafts else None
            batch.advance(work)
            if work.drafts:
                self._forward_pass.settle()
            tokens, proposed = to_host(tokens), None if proposed is None else to_host(proposed)
            done, seconds = record_event(self._device), time.perf_counter() - began
            events = (start, done) if start is not None and done is not None else None
            failures = [one for one in self._sampler.take_failures() if kept is None or kept[one.index]]
            asked = [count for _, count in work.proposals]
            return IssuedStep(
                plan, tokens, rows, logprobs, prompts, seconds, events, failures, kept, proposed, asked
            )  # fmt: skip

    def _apply(self, plan: StepPlan) -> StepWork:
        """Apply the changes of a plan, and return the work of the step. Nothing is copied or computed before this.

        Raises:
            InvalidPlanError: the plan contradicts the state of the rows.
        """
        batch, sampler = self._batch, self._sampler
        work = batch.apply(plan)
        if work.proposals and self._proposer is None:
            raise InvalidPlanError("drafts are to be proposed, and there is no draft model")
        if self._adapters is not None:
            self._adapters.check(batch.adapters[work.joined].tolist())
        self._forward_pass.attention.update_block_tables(work)  # needed in steps that compute nothing, too
        for row in work.left:
            sampler.leave(row)
            self._thinking.leave(row)
        for row in work.joined:
            held = batch.sequences[row]
            sampler.join(row, held.tokens, held.num_prompt_tokens, held.sampling)
            self._thinking.join(row, held)
        if self._ranks.first:  # it alone samples, and knows the rows' sampling states
            for draft in work.drafts:
                sampler.check_draftable(draft.row)
                self._thinking.check_draft(draft)
        return work

    def _accepted(self, plan: StepPlan) -> None:
        """Is called with every plan that has been checked, before it is executed."""

    def _compute(self, work: StepWork) -> _Computed:
        """Compute and sample a step: tokens, their log-probabilities, by row the prompts' log-probabilities, and the
        drafts behind it."""
        forced = self._thinking.forced(work, self._batch) if self._ranks.first else {}
        if self._proposer is not None:
            self._proposer.begin(work, self._batch)
        # The graphs of decodes, which also sample, leave nothing for a draft model.
        if self._graphs is not None and len(work.decoding) and not work.chunks and not work.proposals:
            return *self._decode(self._graphs, work, forced), [], None
        tokens: torch.Tensor = torch.zeros(0, dtype=torch.int64)
        logprobs: LogprobsTensors | None = None
        prompts: list[tuple[int, LogprobsTensors]] = []
        proposed: torch.Tensor | None = None
        if work.num_tokens:
            with self._threads.step(work.num_tokens + sum(1 + count for _, count in work.proposals)):
                logits, at, prompts = self._forward(work)
                if work.sampled_rows:
                    tokens, logprobs = self._sample(work, logits, at, forced)
                if work.proposals:
                    assert self._proposer is not None
                    proposed = self._proposer.propose(work, self._batch, tokens, self._sampler)
        return tokens, logprobs, prompts, proposed

    def _sampled_at(self, work: StepWork) -> tuple[Array, ...]:
        """Return the inputs of sampling: positions, rows int32 for kernels, and rows int64 for PyTorch."""
        rows = np.array(work.sampled_rows, np.int64)
        return self._batch.sampled_positions(work), rows.astype(np.int32), rows

    def _sample(
        self, work: StepWork, logits: torch.Tensor, at: tuple[torch.Tensor, ...], forced: Mapping[int, int]
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Sample tokens for the sampled rows from their logits, and keep them for the next step.

        ``at``: the result of ``_sampled_at``, on the device. ``forced``: as ``Sampler.sample`` takes it.
        """
        rows = work.sampled_rows
        positions, on_device, index = at
        if self._ranks.first:
            drafts = {draft.row: draft.tokens.tolist() for draft in work.drafts}
            tokens, logprobs = self._sampler.sample(logits, rows, positions, on_device, forced, drafts)
        else:
            tokens, logprobs = torch.empty(len(rows), dtype=torch.int64, device=self._device), None
        last = tokens = tokens if self._ranks.alone else self._ranks.share_tokens(tokens)
        if work.drafts:  # this waits for the device: no other step is planned before the result of this one is back
            kept = np.array(accept(work.drafts, tokens.tolist(), len(work.decoding)), np.int64)
            chosen, index = self._upload.together(kept, np.array(rows, np.int64)[kept])
            last = tokens[chosen]
        self._last_tokens[index] = last
        return tokens, logprobs

    def _decode(
        self, graphs: "StepGraphs", work: StepWork, forced: Mapping[int, int]
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Run a step of decodes alone, which a graph computes and samples."""
        logits, tokens = graphs.decodes.run(
            work.decoding, self._batch.num_computed[work.decoding] + 1, self._batch.adapters[work.decoding]
        )
        if not forced and self._sampler.are_simple(work.sampled_rows):
            if not self._ranks.alone:  # the graphs of the other ranks sample from a part of the logits
                tokens = self._ranks.share_tokens(tokens)
                self._last_tokens[self._upload(work.decoding)] = tokens
            return tokens, None
        # Rows with logits processors, log-probabilities or forced tokens are sampled again, from a copy of the logits,
        # which is read after the next run of the graph as well.
        return self._sample(work, logits.clone(), self._upload.together(*self._sampled_at(work)), forced)

    def _forward(
        self, work: StepWork
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], list[tuple[int, LogprobsTensors]]]:
        """Return the logits [sampled rows, vocab], the result of ``_sampled_at`` on the device, and by row the
        log-probabilities of prompts that report them."""
        batch = self._batch
        kept, reported = batch.kept_logits(work)
        sampled = self._sampled_at(work)
        logits, at = self._forward_pass.compute(work, np.array(kept, np.int64), sampled)
        number = len(sampled[0])
        prompts: list[tuple[int, LogprobsTensors]] = []
        if reported and self._ranks.first:
            prompts = prompt_logprobs(logits[number:], reported, batch.sequences, self._upload, self._compute_logprobs)
        return logits[:number], at, prompts


def _log_pool(info: Hello) -> None:
    if info.groups:
        log.info(
            "KV pool: %d pages, %.2f GiB, for %d groups of layers; steps of up to %d tokens and %d sequences of up to "
            "%d tokens", info.num_pages, info.num_pages * info.page_bytes / 2**30, len(info.groups),
            info.max_num_batched_tokens, info.max_num_seqs, info.max_model_len,
        )  # fmt: skip
        return
    log.info(
        "KV pool: %d blocks of %d tokens, %.2f GiB; steps of up to %d tokens and %d sequences of up to %d tokens",
        info.num_blocks, info.block_size, info.num_blocks * info.bytes_per_block / 2**30,
        info.max_num_batched_tokens, info.max_num_seqs, info.max_model_len,
    )  # fmt: skip
    if (holds := info.num_blocks * info.block_size) < info.max_model_len:
        log.warning(
            "the KV pool holds %d tokens, so longer requests are refused, though the model takes %d: --max-model-len "
            "%d announces it to clients, and a larger --kv-memory, --quantization or --kv-dtype fp8 leave more room",
            holds, info.max_model_len, holds,
        )  # fmt: skip


def _gpu(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.total_memory, properties.major)

"""Paged attention by the Triton kernels, which read block tables on the device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pagewise_kernels.attention import (
    Chunk,
    DecodePlan,
    PrefillPlan,
    StaticPrefillPlan,
    decode_attention,
    decode_latents,
    prefill_attention,
    prefill_latents,
)
from pagewise_kernels.attention.config import latent_groups
from pagewise_kernels.decode_inputs import decode_inputs
from pagewise_kernels.kv_write import write_kv

from pagewise_executor.attention.backend import AttentionBackend, AttentionShape, BatchTables, PagedLayer
from pagewise_executor.attention.device_tables import DeviceTables, SlotTables, TableShape, table_shapes
from pagewise_executor.attention.prefill_libraries import Attend, ChunkTables, PrefillLibrary
from pagewise_executor.attention.shared_prefixes import shared_prefixes
from pagewise_executor.input_batch import InputBatch
from pagewise_executor.kv.kv_pool import KVPool, Layout
from pagewise_executor.step_work import Int64s, StepWork
from pagewise_executor.uploads import Uploads

PlanT = TypeVar("PlanT")

_NOTHING_SHARED = (np.zeros((0, 3), np.int64), np.zeros(0, np.int64))


class LayerKind(NamedTuple):
    """The properties of a layer that attention plans depend on, named like the plans' parameters.

    Layers of one kind share their plans.
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    window: int | None
    attention_chunk: int | None = None
    rotated: int = 0

    @classmethod
    def of(cls, heads: int, layer: PagedLayer, window: int | None) -> "LayerKind":
        """Return the kind of a layer with so many query heads."""
        if layer.latent:
            groups = latent_groups(heads, layer.dtype.itemsize, layer.keys.device)
            return cls(heads, groups, layer.latent, layer.dtype, window, rotated=layer.head_dim - layer.latent)
        return cls(heads, layer.kv_heads, layer.head_dim, layer.dtype, window, layer.attention_chunk)


@dataclass(slots=True)
class TritonStep:
    """The attention of one step, with the plans that its layers have made so far.

    ``slots``: for each slot of the pool the slot mapping int64 [tokens] of its layers. ``tables``: for each slot the
    block tables of all rows. ``lengths`` and ``rows`` int32 [decodes]: context lengths and rows of the decodes.
    ``chunks``: behind the decodes. ``chunk_tables``: for a library, which computes chunks of layers for which there is
    no plan. ``is_static``: there is a plan for chunks of each kind of layers, whose units change from step to step
    while ``chunks`` do not.

    Plans name rows and tokens, and no blocks. So layers of one kind share them, in whichever slots they lie.
    """

    backend: "TritonBackend"
    slots: Sequence[torch.Tensor]
    tables: Sequence[SlotTables]
    lengths: torch.Tensor
    rows: torch.Tensor
    chunks: list[Chunk]
    chunk_tables: ChunkTables | None = None
    decode_plans: dict[LayerKind, DecodePlan] = field(default_factory=dict)
    prefill_plans: dict[LayerKind, PrefillPlan | StaticPrefillPlan] = field(default_factory=dict)
    library_plans: dict[AttentionShape, Attend] = field(default_factory=dict)
    is_static: bool = False

    def attend(
        self, layer: PagedLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
        window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write K and V into the pool, and attend: see ``StepAttention``."""
        if layer.writes_kv:
            write_kv(k, v, layer, self.slots[layer.slot])
        return self.attend_written(layer, q, scale, window, softcap, sinks)

    def attend_written(
        self, layer: PagedLayer, q: torch.Tensor, scale: float, window: int | None = None, softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend with q [tokens, heads, head_dim] when K and V of the step are in the pool already.

        Raises:
            RuntimeError: a static step has no plan for this kind of layer.
        """
        kind = LayerKind.of(q.shape[1], layer, window)
        self.backend.kinds.setdefault(kind, bool(layer.latent))
        if self.is_static and kind not in self.prefill_plans:
            raise RuntimeError(f"there was no layer like this when static plans were made: {kind}")
        if layer.latent:
            return self._attend_latents(layer, q, kind, scale)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        decodes, (tables, ring) = len(self.lengths), self.tables[layer.slot]
        if decodes:
            plan = _once(self.decode_plans, kind, self._plan_decodes)
            own, into = q[:decodes], out[:decodes]
            decode_attention(
                own, layer, tables, plan, out=into, scale=scale, softcap=softcap, sinks=sinks, ring=ring
            )  # fmt: skip
        library = None
        if self.chunks and kind not in self.prefill_plans:
            shape = AttentionShape(
                kind.heads, kind.kv_heads, kind.head_dim, q.dtype, scale, window, softcap, sinks is not None,
                kind.attention_chunk, shared=layer.shared,
            )  # fmt: skip
            library = self.backend.library_for(kind, shape)
        if library is not None:
            if (attend := self.library_plans.get(shape)) is None:
                assert self.chunk_tables is not None
                attend = self.library_plans[shape] = library.plan(shape, self.chunk_tables)
            out[decodes:] = attend(q[decodes:], layer.keys, layer.values)
        elif self.chunks:
            chunks = _once(self.prefill_plans, kind, self._plan_prefills)
            prefill_attention(q, layer, tables, chunks, out=out, scale=scale, softcap=softcap, sinks=sinks, ring=ring)
        return out

    def _attend_latents(self, layer: PagedLayer, q: torch.Tensor, kind: LayerKind, scale: float) -> torch.Tensor:
        out, decodes = q.new_empty(*q.shape[:2], layer.latent), len(self.lengths)
        tables, _ = self.tables[layer.slot]  # latents have no windows
        if decodes:
            plan = _once(self.decode_plans, kind, self._plan_decodes)
            decode_latents(q[:decodes], layer, tables, plan, out=out[:decodes], scale=scale)
        if self.chunks:
            chunks = _once(self.prefill_plans, kind, self._plan_prefills)
            prefill_latents(q, layer, tables, chunks, out=out, scale=scale)
        return out

    def _plan_decodes(self, kind: LayerKind) -> DecodePlan:
        plan = self.backend.decode_plan(kind)
        plan.plan(self.lengths, self.rows)
        return plan

    def _plan_prefills(self, kind: LayerKind) -> PrefillPlan | StaticPrefillPlan:
        return self.backend.plan_prefills(kind, self.chunks, self.backend.upload)


class TritonBackend(AttentionBackend):
    """Prepares the attention of one model's steps on ``device``, for up to ``num_rows`` rows.

    ``deterministic``: the results do not depend on the batch or on how a prompt is cut into chunks. ``library``:
    computes the prefill chunks of layers that it supports, except in CUDA graphs; None: the kernels do. ``shapes``: of
    the block tables ``tables`` of each group of layers; None: the model has one group. ``kinds``: the kinds of layers
    that have computed so far, in order, and whether the Triton kernel computes their chunks, as far as that is known.
    """

    layouts: ClassVar[Mapping[str, Layout]] = {"layers": "layers", "blocks": "blocks"}
    kv_dtypes = ("fp8", "int8", "int4")

    def __init__(
        self, device: torch.device, num_rows: int, max_model_len: int, block_size: int, *, deterministic: bool = False,
        library: PrefillLibrary | None = None, shapes: Sequence[TableShape] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(device)
        self.deterministic, self.library = deterministic, library
        self._num_rows, self._block_size, self._max_model_len = num_rows, block_size, max_model_len
        self.kinds: dict[LayerKind, bool] = {}
        shapes = shapes or table_shapes(None, max_model_len, block_size, most_tokens=0)
        self.tables = DeviceTables(shapes, num_rows, block_size, device)
        self.upload = Uploads(device)
        self._plans: dict[LayerKind, DecodePlan] = {}
        # The prefixes of the decodes of ``_shared_rows``, none longer than ``_shared_blocks`` blocks.
        self._shared = _NOTHING_SHARED
        self._shared_rows, self._shared_blocks = np.zeros(0, np.int64), 0

    def reset(self, batch: BatchTables, pool: KVPool) -> None:
        """Use an empty batch, of which the device's block tables are a copy."""
        assert isinstance(batch, InputBatch)
        super().reset(batch, pool)
        self.tables.reset(batch)
        self._shared, self._shared_blocks = _NOTHING_SHARED, 0

    def decode_plan(self, kind: LayerKind) -> DecodePlan:
        """Return the decode plan for layers of one kind. Every step reuses it, with its buffers."""
        return _once(self._plans, kind, self._new_plan)

    def prepare(self, work: StepWork) -> TritonStep:
        """Prepare a step, with one upload of all its arrays."""
        batch = self._batch
        rows, positions = batch.flat_batch(work)
        decodes, chunks = len(work.decoding), chunks_of(work)
        lengths = positions[:decodes] + 1
        self.share_prefixes(rows[:decodes], lengths)
        own = [kind for kind, planned in self.kinds.items() if chunks and planned]
        plans = {kind: self.plan_prefills(kind, chunks, torch.from_numpy) for kind in own}
        changes = self.tables.take()
        slots, of_decodes, *there = self.upload.together(
            self.tables.slot_mapping(rows, positions),
            np.stack([lengths, rows[:decodes]]).astype(np.int32),
            *(plan.packed for plan in plans.values()),
            *changes,
        )
        self.tables.change(there[len(plans) :])
        for plan, on_device in zip(plans.values(), there, strict=False):
            plan.bind(on_device)
        own_slots = slots[:, : len(rows)].unbind()
        step = TritonStep(
            self, own_slots, self.tables.slots, of_decodes[0], of_decodes[1], chunks, prefill_plans={**plans}
        )
        step.chunk_tables = ChunkTables(chunks, batch.block_tables, batch.block_size, self.upload)
        return step

    def library_for(self, kind: LayerKind, shape: AttentionShape) -> PrefillLibrary | None:
        """Return the library if it computes the chunks of layers of this shape; else the kind is planned ahead from
        the next step on."""
        if self.library is not None and self.library.computes(shape):
            return self.library
        self.kinds[kind] = True
        return None

    def plan_prefills(
        self, kind: LayerKind, chunks: list[Chunk], upload: Callable[[npt.NDArray[np.int32]], torch.Tensor]
    ) -> PrefillPlan:
        """Return the plan of chunks for layers of one kind, which ``upload`` brings to the device."""
        return PrefillPlan(
            chunks, **kind._asdict(), device=self._device, deterministic=self.deterministic, upload=upload
        )

    def share_prefixes(self, rows: Int64s, lengths: Int64s) -> None:
        """Let the decodes of the next step, ``rows`` [n] with contexts of ``lengths`` [n], read shared blocks once.

        This has to be called before each step with decodes, a replay of a CUDA graph too: the plans read their prefixes
        from static buffers. Only layers without a sliding window share, and none in deterministic mode.

        To look for prefixes takes 0.2 ms for 256 decodes that share one, and 12 µs if they share nothing. So the
        prefixes are kept while the same rows decode and the blocks that they share are the same.
        """
        if self._shared_blocks and np.array_equal(rows, self._shared_rows):
            return
        if not self._batch.shares_prefixes or (self._plans and not any(one.can_share for one in self._plans.values())):
            return
        self._shared = shared_prefixes(self._batch.block_tables, rows, lengths, self._batch.block_size)
        prefixes, _ = self._shared
        self._shared_rows = rows.copy()
        self._shared_blocks = int(prefixes[:, 2].max()) // self._batch.block_size if len(prefixes) else 0
        for plan in self._plans.values():
            plan.share(*self._shared, self.upload)

    def new_slots(self, num_tokens: int) -> torch.Tensor:
        """Return the slot mappings of a step of so many tokens, to be filled: int64 [slots, tokens]."""
        columns = num_tokens + num_tokens % 2  # so that all rows are aligned as kernels expect
        slots = torch.zeros(len(self.tables.slots), columns, dtype=torch.int64, device=self._device)
        return slots[:, :num_tokens]

    def fill_inputs(
        self, rows: torch.Tensor, lengths: torch.Tensor, last_tokens: torch.Tensor, ids: torch.Tensor,
        positions: torch.Tensor, slots: torch.Tensor, known: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Fill ids and positions [n] and slots [slots, n] on the device, as ``decode_inputs`` does, for all groups."""
        first = 0
        for group in self.tables.groups:
            last = first + len(group.on_device)
            decode_inputs(
                rows, lengths, group.on_device, last_tokens, block_size=self._block_size, ids=ids, positions=positions,
                slots=slots[first:last], known=known, ring=group.ring,
            )  # fmt: skip
            first = last

    def decode_step(self, slots: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor) -> TritonStep:
        """Return the attention of a step of decodes alone, whose inputs are on the device: ``slots`` [slots, decodes],
        and others of ``TritonStep``."""
        return TritonStep(self, slots.unbind(), self.tables.slots, lengths, rows, [])

    def update_block_tables(self, work: StepWork) -> None:
        """Note the changes of a step, as ``DeviceTables`` does."""
        self.tables.note(self._batch, work)
        if any(start < self._shared_blocks for _, start, _ in work.changed_tables):
            self._shared_blocks = 0

    def _new_plan(self, kind: LayerKind) -> DecodePlan:
        plan = DecodePlan(
            **kind._asdict(),
            max_queries=self._num_rows + 1,
            device=self._device,
            deterministic=self.deterministic,
            max_context=self._max_model_len,
        )
        plan.share(*self._shared, self.upload)
        return plan


def chunks_of(work: StepWork) -> list[Chunk]:
    """Return the chunks of a step as attention takes them, which lie behind its decodes in the flat batch."""
    return [Chunk(offset, chunk.start, chunk.size, chunk.row) for offset, chunk in work.chunk_offsets()]


def _once(made: dict[LayerKind, PlanT], kind: LayerKind, make: Callable[[LayerKind], PlanT]) -> PlanT:
    found = made.get(kind)
    if found is None:
        found = made[kind] = make(kind)
    return found

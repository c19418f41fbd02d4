"""The interface between the model's layers and an attention backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from pagewise_kernels.kv_layer import KVLayer

from pagewise_executor.kv.kv_pool import KVPool, KVShape, Layout
from pagewise_executor.step_work import Int32s, Int64s, StepWork


@dataclass(slots=True, frozen=True)
class AttentionShape:
    """How the attention layers of one kind attend: ``scale`` and ``softcap`` of the scores, ``window`` in tokens.

    They keep K and V of ``kv_heads`` heads of ``head_dim`` numbers for each token, while the window covers it.
    ``dtype``: of the model. ``sinks``: each query head has an attention sink. ``attention_chunk``: contexts are cut
    into chunks of so many tokens, and a query sees the tokens of its own chunk only; None: it sees all of them.
    ``latent``: of layers that keep one latent per token (MLA), the number of elements at the end of a key that are its
    value, and are stored once; 0: K and V are stored beside each other. ``shared``: of layers whose keys and values
    overlap in memory (``StoredOnce``), the number of elements at the end of a key that begin its value; 0: none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    attention_chunk: int | None = None
    latent: int = 0
    shared: int = 0

    @property
    def kv_shape(self) -> KVShape:
        """The shape of these layers in a KV pool."""
        if self.shared:
            return (self.kv_heads, 2 * self.head_dim - self.shared, self.head_dim, self.head_dim)
        return (self.kv_heads, self.head_dim, self.latent) if self.latent else (self.kv_heads, self.head_dim)


class StepAttention(Protocol):
    """The attention of one step. It knows the slot mapping of the step and the context of each of its queries."""

    def attend(
        self, layer: "PagedLayer", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
        window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write k and v [tokens, kv_heads, head_dim] into the pool, unless an earlier layer has, and attend with q
        [tokens, heads, head_dim].

        The flat batch holds the decodes first, then the prefill chunks. In layers of latents, v is the last
        ``layer.latent`` elements of k. ``sinks`` [heads]: a logit of each query head, which takes part in its softmax
        and has no value. Returns [tokens, heads, head_dim of v].
        """


class BatchTables(Protocol):
    """The part of an input batch that attention reads; see ``InputBatch``.

    ``shares_prefixes``: decodes whose tables begin alike share these blocks.
    """

    shares_prefixes: bool
    block_size: int
    block_tables: Int32s
    num_computed: Int64s

    def flat_batch(self, work: StepWork) -> tuple[Int64s, Int64s]:
        """Return the row and the position of each token of a step."""
        ...

    def slot_mapping(self, rows: Int64s, positions: Int64s) -> Int64s:
        """Return the pool slot of each position [n] of its row [n]."""
        ...


class AttentionBackend:
    """Prepares the attention of each step of one model on ``device``. ``registry`` names the backends.

    ``layouts``: the layout of the KV pool for each value of ``--kv-layout`` that the backend supports.
    ``layout_in_pages``: the layout of each page of a model with several groups of layers. ``kv_dtypes``: the values of
    ``--kv-dtype`` that it reads, beside the model's own type.
    """

    layouts: ClassVar[Mapping[str, Layout]] = {"layers": "layers"}
    layout_in_pages: ClassVar[Layout] = "blocks"
    kv_dtypes: ClassVar[Sequence[str]] = ()
    _batch: BatchTables

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @classmethod
    def check(cls, device: torch.device) -> None:
        """Check whether the backend works on a device; this is called before any weight is read.

        Raises:
            ModelError: it does not.
        """

    def allocate(self, size: int) -> torch.Tensor | None:
        """Return the memory of a KV pool, uint8 [size]; None: the pool allocates its memory itself.

        Raises:
            ModelError: there is less memory.
        """
        return None

    def free(self) -> None:
        """Free the memory that ``allocate`` returned. No tensor of it may be used any more."""

    def reset(self, batch: BatchTables, pool: KVPool) -> None:
        """Use the empty ``batch`` from now on, whose block tables name blocks of ``pool``.

        Raises:
            ModelError: the backend cannot apply the block tables of this batch.
        """
        self._batch = batch

    def update_block_tables(self, work: StepWork) -> None:
        """Apply the changes that a step makes to the block tables. This is called before anything else of the step
        runs. A backend that reads the block tables of the batch in each step has nothing to do."""

    def prepare(self, work: StepWork) -> StepAttention:
        """Prepare a step that the batch has applied and not advanced yet."""
        raise NotImplementedError


@dataclass(slots=True)
class ForwardContext:
    """The attention of the step that is being computed; all layers of a model share this object."""

    step: StepAttention | None = None


@dataclass(slots=True, eq=False)
class PagedLayer(KVLayer):
    """One layer of the KV pool, attached to the attention module of a layer of the model; ``number`` counts them.

    ``forward_context.step`` is set before each forward pass. ``attention_chunk``: see ``AttentionShape``.
    ``writes_kv``: False if an earlier layer of the model, whose K and V this one reads, has written them. ``slot``: of
    the pool that has the layer's K and V. ``scale_queries``: changes the queries [tokens, heads, head_dim] of the step
    before they attend; None: nothing does.
    """

    forward_context: ForwardContext = field(default_factory=ForwardContext)
    number: int = 0
    attention_chunk: int | None = None
    writes_kv: bool = True
    slot: int = 0
    scale_queries: Callable[[torch.Tensor], torch.Tensor] | None = None

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [tokens, kv_heads, head_dim] to ``slots`` [tokens] int64 by PyTorch."""
        self.keys.flatten(0, 1).index_copy_(0, slots, k.to(self.dtype))
        if not self.latent:
            self.values.flatten(0, 1).index_copy_(0, slots, v.to(self.dtype))

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with the step that is being computed, which ``StepAttention`` explains."""
        step = self.forward_context.step
        assert step is not None, "the step is set before the forward pass"
        if self.scale_queries is not None:
            q = self.scale_queries(q)
        return step.attend(self, q, k, v, scale, window, softcap, sinks)

"""What a step's attention has to offer to the model's layers, whoever computes it."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from pagewise_executor.rows import RowTable, StepWork


class StepAttention(Protocol):
    """Attention of one step: knows where its K and V go, and what each of its queries may see."""

    def attend(
        self,
        layer: "PagedLayer",
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write k and v [tokens, kv_heads, head_dim] of the step, attend with q [tokens, heads, head_dim].

        Decodes come first in the batch, then the chunks. Returns [tokens, heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Makes what a step's layers attend with."""

    def reset(self, table: RowTable) -> None:
        """All rows are empty; ``table`` is what holds them from now on."""
        ...

    def update_tables(self, work: StepWork) -> None:
        """Take over what a step changes in the block tables; comes before everything else of the step."""
        ...

    def prepare(self, work: StepWork) -> StepAttention:
        """Look at a step that the table has applied and not advanced yet."""
        ...


class KVScales(NamedTuple):
    """Scales of float8 KV, one per token and head: float32 [num_blocks, block_size, kv_heads] each."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class StepHolder:
    """The step that is being computed, shared by all layers of one model."""

    step: StepAttention | None = None


@dataclass(slots=True)
class PagedLayer:
    """A layer's share of the pool, hung onto its attention module. ``holder.step`` is set before each forward pass.

    ``keys``, ``values``: [num_blocks, block_size, kv_heads, head_dim]. ``scales``: of float8 KV.
    """

    keys: torch.Tensor
    values: torch.Tensor
    holder: StepHolder
    scales: KVScales | None = None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See ``StepAttention.attend``."""
        step = self.holder.step
        assert step is not None, "the step is set before the forward pass"
        return step.attend(self, q, k, v, scale, window, softcap)

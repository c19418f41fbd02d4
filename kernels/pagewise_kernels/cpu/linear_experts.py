"""Mixtures of experts on the CPU in float32, with the weights of linear layers in any formats."""

from collections.abc import Sequence

import torch

from pagewise_kernels.cpu.experts import SortedExperts
from pagewise_kernels.cpu.linear_grouped import GroupedWeight
from pagewise_kernels.cpu.linear_int4 import Int4Weight
from pagewise_kernels.cpu.operations import silu_mul

Weight = GroupedWeight | Int4Weight


class LinearExperts(SortedExperts):
    """Experts with SiLU, of which each active one is two products.

    ``gate_up``: of each expert, [2 · inner, hidden], first gate and then up. ``down``: [hidden, inner].

    Raises:
        ValueError: shapes do not fit.
    """

    def __init__(self, gate_up: Sequence[Weight], down: Sequence[Weight]) -> None:
        self.num_experts, self.hidden, self.inner = len(down), down[0].outs, down[0].ins
        shapes = {(one.outs, one.ins, two.outs, two.ins) for one, two in zip(gate_up, down, strict=True)}
        if shapes != {(2 * self.inner, self.hidden, self.hidden, self.inner)}:
            raise ValueError(f"weights of experts of shapes {sorted(shapes)} do not fit together")
        self._gate_up, self._down = gate_up, down

    @property
    def in_four_bits(self) -> int:
        """The number of weights whose codes have four bits."""
        weights = [*self._gate_up, *self._down]
        return sum(one.outs * one.ins for one in weights if isinstance(one, Int4Weight) or one.bits == 4)

    def _compute(
        self,
        rows: torch.Tensor,
        activated: torch.Tensor,
        outs: torch.Tensor,
        active: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        first = starts.tolist()
        for expert, start, stop in zip(active.tolist(), first, first[1:], strict=False):
            gate_up = self._gate_up[expert].linear(rows[start:stop])
            outs[start:stop] = self._down[expert].linear(silu_mul(gate_up))

"""Mixtures of experts with weights in four bits on the CPU in float32."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pagewise_kernels.cpu.experts import SILU, Activation, SortedExperts
from pagewise_kernels.cpu.library import empty, load_library, threads
from pagewise_kernels.cpu.linear_int4 import Int4Weight


class Int4Parts(NamedTuple):
    """The arguments of an ``Int4Weight`` [outs, ins]; the bias is float32 [outs]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of: torch.Tensor
    bias: torch.Tensor | None = None
    unit: float | None = None

    def in_halves(self) -> "Int4Parts":
        """Return the weight with outputs of zeros behind each half of its outputs, so that both begin a panel."""
        half = len(self.codes) // 2
        more = -half % load_library().pagewise_panel()

        def padded(values: torch.Tensor) -> torch.Tensor:
            empty_rows = values.new_zeros(more, *values.shape[1:])
            return torch.cat([values[:half], empty_rows, values[half:], empty_rows])

        zeros, bias = (None if part is None else padded(part) for part in (self.zeros, self.bias))
        return Int4Parts(padded(self.codes), padded(self.scales), zeros, self.group_of, bias, self.unit)


class Int4Experts(SortedExperts):
    """Experts whose weights stay in four bits, and whose inputs are rounded to eight bits by group.

    ``gate_up``: of each expert, [2 · inner, hidden], first gate and then up. ``down``: [hidden, inner].

    Raises:
        ValueError: shapes do not fit, or scales are not finite. TypeError: types do not fit.
    """

    def __init__(self, gate_up: Sequence[Int4Parts], down: Sequence[Int4Parts], activation: Activation = SILU) -> None:
        self._library = load_library()
        self.num_experts, (self.hidden, self.inner) = len(down), down[0].codes.shape
        shapes = {(tuple(one.codes.shape), tuple(two.codes.shape)) for one, two in zip(gate_up, down, strict=True)}
        if shapes != {((2 * self.inner, self.hidden), (self.hidden, self.inner))}:
            raise ValueError(f"weights of experts in four bits of shapes {sorted(shapes)} do not fit together")
        self._weights = [[Int4Weight(*one.in_halves()) for one in gate_up], [Int4Weight(*one) for one in down]]
        layouts = [[weight.layout for weight in weights] for weights in self._weights]
        self._tables = torch.tensor([[[*one.pointers, *one[2:]] for one in half] for half in layouts])
        self._factors = torch.tensor([[one.factor for one in half] for half in layouts])
        self._most_groups = int(self._tables[..., -3].max())
        self._most_slots = int(self._tables[..., -3:-1].prod(dim=-1).max())
        self._activation = activation

    @property
    def in_four_bits(self) -> int:
        """The number of weights in four bits: all."""
        return self.num_weights

    @property
    def num_bytes(self) -> int:
        """The memory of codes, scales and zeros."""
        return sum(weight.num_bytes for half in self._weights for weight in half)

    def _compute(
        self,
        rows: torch.Tensor,
        activated: torch.Tensor,
        outs: torch.Tensor,
        active: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        pairs = len(rows)
        inputs = empty((pairs, self._most_slots), torch.int8)
        scales, sums = (rows.new_empty(pairs, self._most_groups, dtype=kind) for kind in (torch.float32, torch.int32))
        scratch = activated, outs, inputs, scales, sums
        self._library.pagewise_int4_experts(
            self._tables[0].data_ptr(), self._tables[1].data_ptr(), self._factors.data_ptr(), active.data_ptr(),
            starts.data_ptr(), rows.data_ptr(), *(tensor.data_ptr() for tensor in scratch), *self._activation,
            len(active), self.num_experts, self.hidden, self.inner, self._most_slots, self._most_groups, threads(),
        )  # fmt: skip

"""Mixtures of experts with weights in four or eight bits, by groups of inputs, on the CPU in float32."""

from collections.abc import Sequence
from ctypes import addressof
from typing import Any, NamedTuple

import torch

from pagewise_kernels.cpu.experts import SILU, Activation, SortedExperts
from pagewise_kernels.cpu.library import WeightArguments, empty, load_library, threads
from pagewise_kernels.cpu.linear_grouped import GroupedWeight
from pagewise_kernels.cpu.linear_int4 import Int4Weight


class Int4Parts(NamedTuple):
    """The arguments of an ``Int4Weight`` [outs, ins]; the bias is float32 [outs]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of: torch.Tensor
    bias: torch.Tensor | None = None
    unit: float | None = None


class GroupedParts(NamedTuple):
    """The arguments of a ``GroupedWeight`` [outs, ins]."""

    codes: torch.Tensor
    bits: int
    zero: int
    scales: torch.Tensor
    steps: torch.Tensor | None = None
    leasts: torch.Tensor | None = None
    least_steps: torch.Tensor | None = None
    bias: torch.Tensor | None = None


Parts = Int4Parts | GroupedParts


class QuantisedExperts(SortedExperts):
    """Experts whose weights stay in four or eight bits, and whose inputs are rounded to eight bits by group.

    ``gate_up``: of each expert, [2 · inner, hidden], first gate and then up. ``down``: [hidden, inner].

    Raises:
        ValueError: shapes do not fit, or scales are not finite. TypeError: types do not fit.
    """

    exact = False
    """Whether inputs stay in float32 instead."""

    def __init__(self, gate_up: Sequence[Parts], down: Sequence[Parts], activation: Activation = SILU) -> None:
        self._library = load_library()
        self.num_experts, (self.hidden, self.inner) = len(down), down[0].codes.shape
        shapes = {(tuple(one.codes.shape), tuple(two.codes.shape)) for one, two in zip(gate_up, down, strict=True)}
        if shapes != {((2 * self.inner, self.hidden), (self.hidden, self.inner))}:
            raise ValueError(f"weights of experts in groups of inputs, of shapes {sorted(shapes)}, do not fit together")
        if any(one.bias is not None and one.bias.shape != one.codes.shape[:1] for one in gate_up):
            raise ValueError("a bias of gate and up has not a number for each output")
        panel = self._library.pagewise_panel()
        self._weights = [[_packed(_in_halves(one, panel)) for one in gate_up], [_packed(one) for one in down]]
        tables = [[weight.arguments for weight in half] for half in self._weights]
        self._tables = [(WeightArguments * len(table))(*table) for table in tables]
        weights = [weight for half in self._weights for weight in half]
        self._most_groups = max(weight.groups for weight in weights)
        self._most_slots = max(weight.groups * weight.group for weight in weights)
        self._activation = activation

    @property
    def in_four_bits(self) -> int:
        """The number of weights whose codes have four bits."""
        sizes = 2 * self.hidden * self.inner, self.hidden * self.inner
        return sum(
            size
            for size, half in zip(sizes, self._weights, strict=True)
            for weight in half
            if isinstance(weight, Int4Weight) or weight.bits == 4
        )

    def _compute(
        self,
        rows: torch.Tensor,
        activated: torch.Tensor,
        outs: torch.Tensor,
        active: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        pairs = len(rows)
        inputs = empty((pairs, self._most_slots), torch.float32 if self.exact else torch.int8)
        scales, sums = (rows.new_empty(pairs, self._most_groups, dtype=kind) for kind in (torch.float32, torch.int32))
        scratch = activated, outs, inputs, scales, sums
        self._library.pagewise_quantised_experts(
            *map(addressof, self._tables), active.data_ptr(), starts.data_ptr(), rows.data_ptr(),
            *(tensor.data_ptr() for tensor in scratch), *self._activation, self.exact, len(active), self.hidden,
            self.inner, self._most_slots, self._most_groups, threads(),
        )  # fmt: skip


def _packed(parts: Parts) -> Int4Weight | GroupedWeight:
    return Int4Weight(*parts) if isinstance(parts, Int4Parts) else GroupedWeight(*parts)


def _in_halves(parts: Parts, panel: int) -> Parts:
    """Return a weight with outputs of zeros behind each half of its outputs, so that both begin a panel."""
    half = len(parts.codes) // 2
    if not (more := -half % panel):
        return parts

    def padded(values: torch.Tensor) -> torch.Tensor:
        empty_rows = values.new_zeros(more, *values.shape[1:])
        return torch.cat([values[:half], empty_rows, values[half:], empty_rows])

    by_output = ("codes", "scales", "zeros", "steps", "leasts", "least_steps", "bias")
    changed: dict[str, Any] = {
        name: padded(part) for name, part in parts._asdict().items() if name in by_output and part is not None
    }
    return parts._replace(**changed)

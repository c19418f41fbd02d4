"""Linear layers on the CPU with weights in four bits, for float32 batches of any size."""

import math
from typing import NamedTuple

import torch

from pagewise_kernels.cpu.library import WeightArguments, empty, load_library, threads
from pagewise_kernels.cpu.operations import check_input, in_panels
from pagewise_kernels.input_slots import slots_of


class Layout(NamedTuple):
    """The addresses of order, codes, scales, zeros and bias, 0: there is none; the factor of the scales; the number and
    the size of groups; and whether codes are in e2m1."""

    pointers: list[int]
    factor: float
    groups: int
    group: int
    e2m1: bool


class Int4Weight:
    """The weight [outs, ins] and the bias [outs] of a linear layer in four bits, in the layout that the product reads.

    A weight is (code - zero) · scale. ``codes`` uint8 [outs, ins]: from 0 to 15. ``scales`` float32 [outs, groups].
    ``zeros`` uint8 [outs, groups]; None: all are 8. ``group_of`` int64 [ins]: the group of each input. Groups may have
    any number of inputs, which need not be neighbours.

    ``packed`` int32 [panels, slots / 8, panel]: the codes of eight slots in a word. A slot has an input, or is empty: a
    scale is for ``group`` slots, and inputs of one group take the slots of as many scales as they need. ``order`` int32
    [slots]: the input of each slot, -1: none; None: the inputs have their own order. ``scales`` float16 and ``zeros``
    uint8 [panels, slots / group, panel]. Scales are kept divided by a power of two for the layer, so that those in
    float16 or bfloat16 keep their values.

    ``unit``: codes are numbers in e2m1 (see ``pagewise_kernels.mxfp4``) instead, without zeros, and a weight is such a
    number · scale. 16 slots share a scale, and scales are kept divided by the unit.

    Raises:
        ValueError: shapes do not fit, or scales are not finite. TypeError: types do not fit.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        group_of: torch.Tensor,
        bias: torch.Tensor | None = None,
        unit: float | None = None,
    ) -> None:
        self._library = load_library()
        _check(codes, scales, zeros, group_of)
        self.outs, self.ins = codes.shape
        self._e2m1 = unit is not None
        slots, self.group = slots_of(group_of, (16,)) if self._e2m1 else slots_of(group_of)
        self._num_slots, self._groups = len(slots), len(slots) // self.group
        self.order = None if torch.equal(slots[: self.ins], torch.arange(self.ins)) else slots.int()
        self.packed = in_panels(_words(codes, slots))
        largest = float(scales.abs().max())
        unit = unit or 2.0 ** (math.frexp(largest)[1] - 15)
        self._factor = unit / 2 if self._e2m1 else unit  # the doubles of numbers in e2m1 are whole
        taken = group_of[slots.view(-1, self.group)[:, 0]]
        self.scales = in_panels((scales / unit).half()[:, taken])
        self.zeros = None if zeros is None else in_panels(zeros[:, taken])
        self.bias = None if bias is None else bias.detach().float().contiguous()
        parts = (self.order, self.packed, self.scales, self.zeros, self.bias)
        self._pointers = [None if part is None else part.data_ptr() for part in parts]

    @property
    def layout(self) -> Layout:
        """This weight as an argument of the operations in this module."""
        return Layout([pointer or 0 for pointer in self._pointers], self._factor, self._groups, self.group, self._e2m1)

    @property
    def num_bytes(self) -> int:
        """The memory of codes, scales and zeros."""
        return sum(part.nbytes for part in (self.packed, self.scales, self.zeros) if part is not None)

    @property
    def arguments(self) -> WeightArguments:
        """This weight as an argument of ``pagewise_kernels.cpu.layer``."""
        return WeightArguments(
            2, self.ins, self.outs, tuple(self._pointers), (self._groups, self.group, self._e2m1), self._factor
        )

    def linear(self, x: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
        """Map x [rows, ins] to [rows, outs].

        ``exact``: inputs stay in float32; otherwise they are rounded to eight bits, with a scale for each group.

        Raises:
            ValueError: x does not fit. TypeError: it is not float32 on the CPU.
        """
        rows = check_input(x, self.ins)
        out = empty((rows, self.outs), x.dtype)
        inputs = empty((rows, self._num_slots), torch.float32 if exact else torch.int8)
        scales, sums = x.new_empty(rows, self._groups), x.new_empty(rows, self._groups, dtype=torch.int32)
        self._library.pagewise_linear_int4(
            x.data_ptr(), x.stride(0), *self._pointers, self._factor, out.data_ptr(), inputs.data_ptr(),
            scales.data_ptr(), sums.data_ptr(), self._e2m1, exact, rows, self.ins, self._groups, self.group, self.outs,
            threads(),
        )  # fmt: skip
        return out


def _check(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_of: torch.Tensor) -> None:
    types = [codes.dtype, scales.dtype, torch.uint8 if zeros is None else zeros.dtype]
    if types != [torch.uint8, torch.float32, torch.uint8] or not codes.is_cpu:
        raise TypeError(f"weights in four bits have codes uint8, scales float32, zeros uint8 on the CPU, not {types}")
    shapes = [list(part.shape) for part in (codes, scales, scales if zeros is None else zeros, group_of)]
    outs, ins = codes.shape
    if shapes[1:] != [[outs, scales.shape[-1]], [outs, scales.shape[-1]], [ins]]:
        raise ValueError(f"codes, scales, zeros and groups of inputs of shapes {shapes} do not fit together")
    if not 0 <= int(group_of.min()) <= int(group_of.max()) < scales.shape[1]:
        raise ValueError(f"an input is of group {int(group_of.min())} or {int(group_of.max())} of {scales.shape[1]}")
    if not bool(scales.isfinite().all()):
        raise ValueError("a scale of weights in four bits is not finite")


def _words(codes: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the codes of slots, int32 [outs, slots / 8]: byte i has slot i in its lower half, slot i + 4 above."""
    placed = codes[:, slots.clamp(0)].masked_fill_(slots < 0, 0).view(len(codes), -1, 2, 4)
    return (placed[:, :, 0] | placed[:, :, 1] << 4).view(torch.int32)[..., 0]

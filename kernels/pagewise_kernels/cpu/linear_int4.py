"""Linear layers on the CPU with weights in four bits, for float32 batches of any size."""

import math

import torch

from pagewise_kernels.cpu.library import WeightArguments
from pagewise_kernels.cpu.linear_grouped import WeightInGroups
from pagewise_kernels.cpu.operations import in_panels
from pagewise_kernels.input_slots import slots_of


class Int4Weight(WeightInGroups):
    """The weight [outs, ins] and the bias [outs] of a linear layer in four bits, in the layout that the product reads.

    A weight is (code - zero) · scale. ``codes`` uint8 [outs, ins]: from 0 to 15. ``scales`` float32 [outs, groups].
    ``zeros`` uint8 [outs, groups]; None: all are 8. ``group_of`` int64 [ins]: the group of each input. Groups may have
    any number of inputs, which need not be neighbours.

    ``packed`` int32 [panels, slots / 8, panel]: the codes of eight slots in a word. A slot has an input, or is empty: a
    scale is for ``group`` slots, and inputs of one group take the slots of as many scales as they need. ``order`` int32
    [slots]: the input of each slot, -1: none; None: the inputs have their own order. Scales are kept in float16, and
    divided by a power of two for the layer, so that those in float16 or bfloat16 keep their values.

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
        _check(codes, scales, zeros, group_of)
        e2m1 = unit is not None
        slots, group = slots_of(group_of, (16,)) if e2m1 else slots_of(group_of)
        in_order = torch.equal(slots[: codes.shape[1]], torch.arange(codes.shape[1]))
        unit = unit or 2.0 ** (math.frexp(float(scales.abs().max()))[1] - 15)
        taken = group_of[slots.view(-1, group)[:, 0]]
        self.order, self.packed = None if in_order else slots.int(), in_panels(_words(codes, slots))
        parts = (
            self.order,
            self.packed,
            in_panels((scales / unit).half()[:, taken]),
            None if zeros is None else in_panels(zeros[:, taken]),
            None if bias is None else bias.detach().float().contiguous(),
        )
        numbers = (len(slots) // group, group, int(e2m1))
        factor = unit / 2 if e2m1 else unit  # the doubles of numbers in e2m1 are whole
        super().__init__(WeightArguments.INT4, codes.shape, parts, numbers, factor)


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

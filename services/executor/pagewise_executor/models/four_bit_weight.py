"""Weights of linear layers in four bits, before they are packed: cut, joined, and quantised."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

SYMMETRIC_ZERO = 8
"""The zero of weights that come without zeros."""
GROUP = 64
"""The inputs of an output that share a scale and a zero in weights that are quantised while loading."""
_SHRINKS = (1.0, 0.95, 0.9)
_AT_ONCE = 1 << 18
"""About how many weights are rounded at once, so that this stays in caches."""


@dataclass(slots=True, frozen=True)
class FourBitWeight:
    """The weight of a linear layer in four bits: (codes - zeros) · scales.

    ``codes``: uint8 [outs, ins], from 0 to 15. ``scales``: float32 [outs, groups]. ``zeros``: uint8 [outs, groups];
    None: all are 8. ``group_of``: int64 [ins], the group of each input.

    ``unit``: codes are numbers in e2m1 instead, without zeros, and a weight is such a number · scale. Scales are the
    products of this unit and numbers in float8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of: torch.Tensor
    unit: float | None = None

    def dequantised(self) -> torch.Tensor:
        """Return the weights as float32 [outs, ins]."""
        if self.unit is not None:
            return self.doubled() * (self.scales / 2)[:, self.group_of]
        zeros = SYMMETRIC_ZERO if self.zeros is None else self.zeros[:, self.group_of]
        return (self.codes.float() - zeros) * self.scales[:, self.group_of]

    def doubled(self) -> torch.Tensor:
        """Return the doubles of the numbers in e2m1, which are whole, as int8 [outs, ins]."""
        sizes = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8, device=self.codes.device)
        return torch.cat([sizes, -sizes])[self.codes.int()]

    def rows(self, start: int, stop: int) -> "FourBitWeight":
        """Return the weights of some outputs, as the shard of a layer whose outputs are divided."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return FourBitWeight(self.codes[start:stop], self.scales[start:stop], zeros, self.group_of, self.unit)

    def columns(self, start: int, stop: int) -> "FourBitWeight":
        """Return the weights of some inputs, as the shard of a layer whose inputs are divided."""
        return dataclasses.replace(self, codes=self.codes[:, start:stop], group_of=self.group_of[start:stop])


def join_outputs(weights: Sequence[FourBitWeight]) -> FourBitWeight | None:
    """Return one weight with the outputs of all ``weights``; None if their inputs are in different groups, or
    they have different units."""
    first = weights[0]
    if not all(torch.equal(one.group_of, first.group_of) and one.unit == first.unit for one in weights):
        return None
    codes, scales = torch.cat([one.codes for one in weights]), torch.cat([one.scales for one in weights])
    zeros = [torch.full_like(one.scales, SYMMETRIC_ZERO).byte() if one.zeros is None else one.zeros for one in weights]
    symmetric = all(one.zeros is None for one in weights)
    return FourBitWeight(codes, scales, None if symmetric else torch.cat(zeros), first.group_of, first.unit)


class Rounding(Protocol):
    """Brings weights of a model into four bits."""

    def __call__(self, module: nn.Module, weight: torch.Tensor, *of_expert: int) -> tuple[FourBitWeight, float]:
        """Quantise the weight float32 [outs, ins] of a module; return what ``quantise`` returns.

        ``of_expert``: 0 for gate and up, 1 for down, and the number of the expert.
        """
        ...


def round_alone(module: nn.Module, weight: torch.Tensor, *of_expert: int) -> tuple[FourBitWeight, float]:
    """Quantise a weight by itself."""
    return quantise(weight)


def empty_weight(outs: int, ins: int, device: torch.device | None = None) -> FourBitWeight:
    """Return a weight with zeros, of any contents."""
    groups = -(-ins // GROUP)
    codes, zeros = (torch.empty(outs, size, dtype=torch.uint8, device=device) for size in (ins, groups))
    scales, group_of = torch.empty(outs, groups, device=device), torch.arange(ins, device=device) // GROUP
    return FourBitWeight(codes, scales, zeros, group_of)


def quantise(weight: torch.Tensor) -> tuple[FourBitWeight, float]:
    """Quantise weights in floats [outs, ins]; also return the sum of the squares of their rounding errors.

    A group's zero and scale let codes reach from its least weight to its largest one, and to zero. They may reach a
    little less far, where that makes the squared error smaller.
    """
    outs, ins = weight.shape
    made = empty_weight(outs, ins, weight.device)
    assert made.zeros is not None
    error, rows = 0.0, max(1, _AT_ONCE // max(1, ins))
    for start in range(0, outs, rows):
        part = slice(start, min(start + rows, outs))
        padded = torch.nn.functional.pad(weight[part].float(), (0, -ins % GROUP)).reshape(-1, GROUP)
        codes, scales, zeros, errors = quantise_groups(padded)
        made.codes[part] = codes.view(len(made.codes[part]), -1)[:, :ins]
        made.scales[part], made.zeros[part] = scales.view_as(made.scales[part]), zeros.view_as(made.zeros[part])
        error += float(errors.sum())
    return made, error


def quantise_groups(
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales, zeros and squared errors of groups [groups, group] of weights."""
    least = weight.amin(dim=1, keepdim=True).clamp_(max=0)
    largest = weight.amax(dim=1, keepdim=True).clamp_(min=0)
    best: list[torch.Tensor] = []
    for shrink in _SHRINKS:
        scales = (largest - least) * (shrink / 15)
        scales = torch.where(scales > 0, scales, 1.0)
        zeros = (least * -shrink / scales).round_()
        codes = (weight / scales).round_().add_(zeros).clamp_(0, 15)
        errors = ((codes - zeros).mul_(scales) - weight).square_().sum(dim=1, keepdim=True)
        found = [codes, scales, zeros, errors]
        better = None if not best else errors < best[3]
        best = found if better is None else [torch.where(better, *pair) for pair in zip(found, best, strict=True)]
    codes, scales, zeros, errors = best
    return codes.byte(), scales, zeros.byte(), errors

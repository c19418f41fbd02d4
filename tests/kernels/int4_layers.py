"""Random weights in four bits, and what they are in float64."""

import torch

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
"""The arguments of a weight."""


def drawn(outs: int, ins: int, group: int, *, zeros: bool, scattered: bool) -> Parts:
    """A random weight; ``scattered``: the inputs of a group are no neighbours."""
    group_of = torch.arange(ins) // group
    shape = outs, int(group_of[-1]) + 1
    scales = (torch.rand(shape) / 50 + 1e-3).half().float()
    given = torch.randint(17, shape, dtype=torch.uint8) if zeros else None
    order = torch.randperm(ins) if scattered else torch.arange(ins)
    return torch.randint(16, (outs, ins), dtype=torch.uint8), scales, given, group_of[order]


def dequantised(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, of: torch.Tensor
) -> torch.Tensor:
    zero = torch.full_like(scales, 8) if zeros is None else zeros
    return (codes.double() - zero.double()[:, of]) * scales.double()[:, of]

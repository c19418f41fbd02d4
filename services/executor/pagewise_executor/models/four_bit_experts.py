"""The experts of mixtures in four bits on the CPU, of a checkpoint or quantised while loading."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from pagewise_executor.models import four_bit_weight
from pagewise_executor.models.cpu_mixtures import find_experts
from pagewise_executor.models.four_bit_linear import CpuFourBitExperts, FourBitLinear
from pagewise_executor.models.four_bit_weight import FourBitWeight, Rounding, round_alone
from pagewise_executor.models.quantised_families import Experts

if TYPE_CHECKING:
    from pagewise_kernels.cpu.int4_experts import Int4Parts

log = logging.getLogger(__name__)


@torch.no_grad()
def quantise_experts(model: nn.Module, within: str, rounding: Rounding = round_alone) -> None:
    """Replace experts in float32 within a part of a model, which the operations in C compute, by experts in four bits.

    Others stay as they are.
    """
    from pagewise_kernels.cpu.int4_experts import Int4Experts

    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        found = find_experts(module)
        if found is None:
            continue
        weights, activation = found
        halves: list[list[Int4Parts]] = [[], []]
        biases: list[torch.Tensor | None] = [*weights[2:]] or [None, None]
        squares = error = 0.0
        for half, (weight, bias) in enumerate(zip(weights[:2], biases, strict=True)):
            for expert, one in enumerate(weight):
                made, added = rounding(module, one, half, expert)
                squares, error = squares + float(torch.linalg.vector_norm(one)) ** 2, error + added
                halves[half].append(_parts(made, None if bias is None else bias[expert]))
        packed = Int4Experts(halves[0], halves[1], activation)
        model.set_submodule(name, CpuFourBitExperts(packed, (squares, error)))


def pack_four_bit_experts(model: nn.Module, within: str) -> None:
    """Replace experts within a part of a model, whose linear layers are in four bits, by experts of one operation.

    Experts whose activation is not SiLU, or whose gate and up have their inputs in different groups, are left as linear
    layers, which are computed one after the other.
    """
    from pagewise_kernels.cpu.int4_experts import Int4Experts

    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        if isinstance(module, Experts) and len(module) and module.has_silu:
            made = [_of_expert(linears) for linears in module.linears()]
            found = [one for one in made if one is not None]
            if found and len(found) == len(made):
                packed = Int4Experts([gate_up for gate_up, _ in found], [down for _, down in found])
                model.set_submodule(name, CpuFourBitExperts(packed))
            elif found:
                log.warning("the experts %s are computed one after the other: not all can be joined", name)


def _of_expert(linears: Sequence[nn.Module]) -> "tuple[Int4Parts, Int4Parts] | None":
    """Return gate and up, and down, of an expert; None: they are not all in four bits, or cannot be joined."""
    four = [one for one in linears if isinstance(one, FourBitLinear)]
    weights = [one.quantised for one in four if isinstance(one.quantised, FourBitWeight)]
    if len(weights) < len(linears):
        return None
    gate_up = four_bit_weight.join_outputs(weights[:2])
    if gate_up is None:
        return None
    biases = [torch.zeros(len(one.weight)) if one.bias is None else one.bias for one in four]
    if all(one.bias is None for one in four):
        return _parts(gate_up, None), _parts(weights[2], None)
    return _parts(gate_up, torch.cat(biases[:2])), _parts(weights[2], biases[2])


def _parts(weight: FourBitWeight, bias: torch.Tensor | None) -> "Int4Parts":
    from pagewise_kernels.cpu.int4_experts import Int4Parts

    return Int4Parts(weight.codes, weight.scales, weight.zeros, weight.group_of, bias, weight.unit)

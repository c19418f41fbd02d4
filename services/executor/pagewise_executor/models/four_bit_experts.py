"""The experts of mixtures in four bits on the CPU, of a checkpoint or a GGUF file, or quantised while loading."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from pagewise_executor.models.cpu_mixtures import find_experts
from pagewise_executor.models.four_bit_linear import CpuFourBitExperts, FourBitLinear
from pagewise_executor.models.four_bit_weight import FourBitWeight, Rounding, round_alone
from pagewise_executor.models.gguf_weight import GgufWeight
from pagewise_executor.models.quantised_families import Experts
from pagewise_executor.models.quantised_linear import join_linears

if TYPE_CHECKING:
    from pagewise_kernels.cpu.quantised_experts import Parts, QuantisedExperts

log = logging.getLogger(__name__)


@torch.no_grad()
def quantise_experts(model: nn.Module, within: str, rounding: Rounding = round_alone) -> None:
    """Replace experts in float32 within a part of a model, which the operations in C compute, by experts in four bits.

    Others stay as they are.
    """
    from pagewise_kernels.cpu.quantised_experts import QuantisedExperts

    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        found = find_experts(module)
        if found is None:
            continue
        weights, activation = found
        halves: list[list[Parts]] = [[], []]
        biases: list[torch.Tensor | None] = [*weights[2:]] or [None, None]
        squares = error = 0.0
        for half, (weight, bias) in enumerate(zip(weights[:2], biases, strict=True)):
            for expert, one in enumerate(weight):
                made, added = rounding(module, one, half, expert)
                squares, error = squares + float(torch.linalg.vector_norm(one)) ** 2, error + added
                halves[half].append(_parts(made, None if bias is None else bias[expert]))
        packed = QuantisedExperts(halves[0], halves[1], activation)
        model.set_submodule(name, CpuFourBitExperts(packed, (squares, error)))


def pack_four_bit_experts(model: nn.Module, within: str) -> None:
    """Replace experts within a part of a model, whose linear layers are in four bits or of a GGUF file, by experts of
    one module.

    Experts whose activation is not SiLU, or whose gate and up cannot be joined, because their inputs are in different
    groups or they are in different formats, are left as linear layers, which are computed one after the other.
    """
    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        if isinstance(module, Experts) and len(module) and module.has_silu:
            linears = module.linears()
            if (packed := _packed(linears)) is not None:
                model.set_submodule(name, CpuFourBitExperts(packed))
            elif any(isinstance(linear, FourBitLinear) for expert in linears for linear in expert):
                log.warning("the experts %s are computed one after the other: not all can be joined", name)


def _packed(linears: Sequence[Sequence[nn.Module]]) -> "QuantisedExperts | None":
    """Return the experts with these linear layers, gate, up and down of each; None: not all are in four bits or of a
    GGUF file, or gate and up cannot be joined."""
    from pagewise_kernels.cpu.quantised_experts import QuantisedExperts

    pairs = [(join_linears(expert[:2]), expert[2]) for expert in linears]
    halves = [[one for one in half if isinstance(one, FourBitLinear)] for half in zip(*pairs, strict=True)]
    if min(map(len, halves)) < len(pairs):
        return None
    gate_up, down = ([_parts(one.quantised, one.bias) for one in half] for half in halves)
    return QuantisedExperts(gate_up, down)


def _parts(weight: FourBitWeight | GgufWeight, bias: torch.Tensor | None) -> "Parts":
    from pagewise_kernels.cpu.quantised_experts import GroupedParts, Int4Parts

    if isinstance(weight, FourBitWeight):
        return Int4Parts(weight.codes, weight.scales, weight.zeros, weight.group_of, bias, weight.unit)
    w = weight
    return GroupedParts(w.codes, w.bits, w.zero, w.scales, w.steps, w.leasts, w.least_steps, bias)

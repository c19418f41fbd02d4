"""Modules with weights in four bits: as they are read, by a Triton kernel, and the experts of a mixture on the CPU.

``packed_linear`` has the linear layer by the CPU operations.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from pagewise_executor.models.four_bit_weight import FourBitWeight
from pagewise_executor.models.gguf_weight import GgufWeight

if TYPE_CHECKING:
    from pagewise_kernels.cpu.quantised_experts import QuantisedExperts


class FourBitLinear(nn.Module):
    """A linear layer in four bits, or of a GGUF file, that has been read, and does not compute.

    ``make_fast`` replaces it.

    ``weight`` [out, in] has the shape and the type of the rest of the model, but no data.
    """

    def __init__(self, quantised: FourBitWeight | GgufWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.quantised = quantised
        self.bias = None if bias is None else nn.Buffer(bias.detach())
        self.weight = torch.empty(quantised.codes.shape, device="meta")


class TritonInt4Linear(nn.Module):
    """A linear layer in four bits by a Triton kernel, for inputs of type ``dtype``, to which scales are rounded.

    ``weight``: as of ``FourBitLinear``.

    Raises:
        ValueError: a scale is not finite in that type.
    """

    def __init__(self, weight: FourBitWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        from pagewise_kernels.int4_linear import pack

        super().__init__()
        self.packed = pack(weight.codes, weight.scales, weight.zeros, weight.group_of, dtype)
        self.bias = None if bias is None else nn.Buffer(bias.detach())
        self.weight = torch.empty(weight.codes.shape, dtype=dtype, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., in] to [.., out]."""
        from pagewise_kernels.int4_linear import int4_linear

        return int4_linear(x.reshape(-1, x.shape[-1]), self.packed, self.bias).view(*x.shape[:-1], len(self.weight))


class CpuFourBitExperts(nn.Module):
    """The experts of a mixture in four bits, or of a GGUF file, by the CPU operations, which round inputs to eight bits
    by group.

    ``weight``: a tensor of as many numbers as the experts have, without data. ``rounding``: as of ``Int8Linear``.
    """

    def __init__(self, packed: "QuantisedExperts", rounding: tuple[float, float] = (0.0, 0.0)) -> None:
        super().__init__()
        self.packed, self.rounding = packed, rounding
        self.weight = torch.empty(packed.num_weights, device="meta")

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums [tokens, hidden] of the outputs of the ``chosen`` experts [tokens, k] for x."""
        return self.packed.sums(x, chosen, weights)

"""Weights in MXFP4 (OCP Microscaling): codes of four bits, and a power of two for each 32 inputs of an output."""

from typing import NamedTuple

import torch

BLOCK = 32
"""Inputs that share a power of two."""
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes without a sign: e2m1, two bits of exponent and one of mantissa. The highest bit of a code is a sign."""


class Mxfp4Weights(NamedTuple):
    """The weights of the linear layers of all experts, as gpt-oss stores them.

    ``blocks`` uint8 [experts, outs, ins / 32, 16]: two codes in a byte, the first in its lower bits. ``scales`` uint8
    [experts, outs, ins / 32]: exponents of two, plus 127. ``bias`` floats [experts, outs].
    """

    blocks: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """The number of experts, and of outputs and inputs of each."""
        experts, outs, blocks = self.scales.shape
        return experts, outs, blocks * BLOCK

    def check(self, experts: int, outs: int, ins: int) -> None:
        """Check the shapes and types of contiguous weights.

        Raises:
            ValueError: shapes or strides do not fit. TypeError: types do not.
        """
        shapes = ((experts, outs, ins // BLOCK, BLOCK // 2), (experts, outs, ins // BLOCK), (experts, outs))
        if ins % BLOCK or any(tensor.shape != shape for tensor, shape in zip(self, shapes, strict=True)):
            raise ValueError(
                f"experts in MXFP4 with {ins} inputs and {outs} outputs have codes, scales and a bias {shapes}, not "
                f"{[list(tensor.shape) for tensor in self]}"
            )
        if not all(tensor.is_contiguous() for tensor in self):
            raise ValueError("experts in MXFP4 are contiguous")
        if (self.blocks.dtype, self.scales.dtype) != (torch.uint8, torch.uint8) or not self.bias.is_floating_point():
            raise TypeError(
                "experts in MXFP4 have codes and scales uint8, and a bias of floats, not "
                f"{[tensor.dtype for tensor in self]}"
            )

    def dequantised(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [outs, ins] of an expert in a type of floats."""
        blocks = self.blocks[expert]
        return dequantised(torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2), self.scales[expert], dtype)


def dequantised(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [outs, ins] with ``codes`` [outs, ins / 32, 32] and ``scales`` [outs, ins / 32], integers."""
    numbers = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)], device=codes.device)
    return torch.ldexp(numbers[codes.int()], scales.int()[..., None] - 127).flatten(-2).to(dtype)

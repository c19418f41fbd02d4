"""Linear layers in 16 bits with a kernel of their own for the few rows of a decode step."""

from dataclasses import dataclass

import torch
from torch import nn

FEW_ROWS = 64
"""So many rows the kernel for few rows computes where ``choose_few_rows`` does not measure it: up to there it should be
faster whatever the shape is."""


@dataclass(slots=True, frozen=True)
class RoundedRows:
    """Inputs of a linear layer that the operation before has rounded: ``values`` float8_e4m3fn [rows, in], ``scales``
    float32 [rows], ``dtype``: that of the model."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values)


Rows = torch.Tensor | RoundedRows
"""Inputs of a linear layer."""


class SkinnyLinear(nn.Linear):
    """A linear layer in which the kernel for few rows computes up to ``few_rows`` of them, and the library more."""

    few_rows = 0

    @classmethod
    def of(cls, source: nn.Linear) -> "SkinnyLinear":
        """Return a layer with the weights of ``source``."""
        made = cls(source.in_features, source.out_features, bias=source.bias is not None, device="meta")
        made.weight, made.bias = source.weight, source.bias
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., in] to [.., out]."""
        if x.numel() > self.few_rows * self.in_features:
            return super().forward(x)
        from pagewise_kernels.skinny_linear import skinny_linear

        return skinny_linear(x.flatten(0, -2), self.weight, self.bias).view(*x.shape[:-1], self.out_features)

    def gated(self, x: Rows) -> torch.Tensor:
        """Map up to ``few_rows`` rows [rows, in] to silu(gate) · up, where the first half of the outputs are gates."""
        from pagewise_kernels.skinny_linear import skinny_linear

        assert isinstance(x, torch.Tensor)
        return skinny_linear(x, self.weight, self.bias, gated=True)

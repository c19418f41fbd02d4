"""Linear layers with kernels of our own: for the few rows of a decode step, and row by row."""

from dataclasses import dataclass

import torch
from torch import nn

FEW_ROWS = 64
"""The most rows of the kernel for few rows where ``choose_few_rows`` does not measure it: up to this number it should
be faster for every shape."""


@dataclass(slots=True, frozen=True)
class RoundedRows:
    """Inputs of a linear layer that the operation before has rounded: ``values`` float8_e4m3fn [rows, in], ``scales``
    float32 [rows], ``dtype``: the type of the model."""

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


class RowwiseLinear(nn.Module):
    """A linear layer in which each row of the result depends on the same row of the input alone."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., in] to [.., out]."""
        from pagewise_kernels.matmul import linear

        return linear(x.flatten(0, -2), self.weight, self.bias).view(*x.shape[:-1], len(self.weight))


def make_rowwise(model: nn.Module) -> None:
    """Replace the linear layers of a model whose decoder is fused, so that results do not depend on the batch.

    The libraries of linear layers sum in another order for another number of rows. The other operations do not.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RowwiseLinear(child))

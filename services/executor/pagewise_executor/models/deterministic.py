"""Makes the results of a model independent of the batch, by kernels that compute each row by itself.

Fused decoders, attention and sampling are independent of the batch already. What remains are the linear layers, whose
libraries sum in another order for another number of rows.
"""

import torch
from pagewise_kernels.matmul import linear
from torch import nn


class RowwiseLinear(nn.Module):
    """A linear layer in which each row of the result depends on the same row of the input only."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., in] to [.., out]."""
        return linear(x.flatten(0, -2), self.weight, self.bias).view(*x.shape[:-1], len(self.weight))


def make_rowwise(model: nn.Module) -> None:
    """Replace the linear layers of a model whose decoder is fused."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RowwiseLinear(child))

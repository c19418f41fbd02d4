"""Makes the results of a model independent of the batch, by kernels that compute each row by itself.

Fused layers, attention and sampling are independent of the batch already. What remains are the linear layers, whose
libraries sum in another order for another number of rows, and the norms outside of the layers.
"""

import torch
from pagewise_kernels.matmul import linear
from pagewise_kernels.rms_norm import rms_norm
from torch import nn


class RowwiseLinear(nn.Module):
    """A linear layer in which each row of the result depends on the same row of the input only."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., in] to [.., out]."""
        return linear(x.flatten(0, -2), self.weight, self.bias).view(*x.shape[:-1], len(self.weight))


class RowwiseNorm(nn.Module):
    """An RMSNorm in which each row of the result depends on the same row of the input only."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        assert isinstance(source.weight, torch.Tensor)
        self.weight = nn.Parameter(source.weight.detach(), requires_grad=False)
        self.eps = float(source.variance_epsilon)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of the last dimension of x."""
        return rms_norm(x.flatten(0, -2), self.weight, self.eps).view(x.shape)


def make_rowwise(model: nn.Module) -> None:
    """Replace the linear layers and RMSNorms of a model whose decoder layers are fused."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RowwiseLinear(child))
            elif type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                setattr(parent, name, RowwiseNorm(child))

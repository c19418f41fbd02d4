"""Makes a model's results independent of the batch: what is left of it after fusing, by kernels that see one row each.

The fused layers, attention and sampling are so already. What remains are linear layers, whose libraries choose another
order of sums for another number of rows, and norms outside of the layers.
"""

import torch
from pagewise_kernels.matmul import linear
from pagewise_kernels.rms_norm import rms_norm
from torch import nn


class RowwiseLinear(nn.Module):
    """A linear layer of which each row depends on that row of its input alone."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., in] to [.., out]."""
        return linear(x.flatten(0, -2), self.weight, self.bias).view(*x.shape[:-1], len(self.weight))


class RowwiseNorm(nn.Module):
    """An RMSNorm of which each row depends on that row of its input alone."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        assert isinstance(source.weight, torch.Tensor)
        self.weight = nn.Parameter(source.weight.detach(), requires_grad=False)
        self.eps = float(source.variance_epsilon)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of the last dimension of x."""
        return rms_norm(x.flatten(0, -2), self.weight, self.eps).view(x.shape)


def make_rowwise(model: nn.Module) -> None:
    """Replace linear layers and RMSNorms of a model whose layers are fused."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RowwiseLinear(child))
            elif type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                setattr(parent, name, RowwiseNorm(child))

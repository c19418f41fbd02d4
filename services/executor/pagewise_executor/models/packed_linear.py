"""Linear layers whose weights are packed in the layout that oneDNN reads.

PyTorch passes a plain weight to MKL or reorders it on every call; for the few rows of a decode step, either costs more
than the product. With weights that are reordered once, a small batch is several times faster (the numbers are in
``docs/performance.md``).
"""

import torch
from torch import nn

_ROWS = 32  # the batch size that the layout is made for; others work as well
_TYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """A linear layer for inference on the CPU. ``weight`` [out, in] gives its type and shape, but has no data."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self.bias = None if bias is None else bias.detach()
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., in] to [.., out]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of a model on the CPU by packed ones, if oneDNN is available; return how many."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = _packed(child)
            if packed is not None:
                setattr(parent, name, packed)
                count += 1
    return count


def _packed(module: nn.Module) -> PackedLinear | None:
    if type(module) is nn.Linear and module.weight.dtype in _TYPES:
        return PackedLinear(module.weight, module.bias)
    if _is_conv1d(module):
        weight, bias = module.weight, module.bias
        assert isinstance(weight, torch.Tensor)
        assert isinstance(bias, torch.Tensor)
        return PackedLinear(weight.t(), bias) if weight.dtype in _TYPES else None
    return None


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, a linear layer with transposed weights; told without importing it."""
    return type(module).__module__.startswith("transformers.") and type(module).__name__ == "Conv1D"

"""The small operations of a fused decoder layer, in PyTorch and in Triton."""

from typing import Protocol

import torch
import torch.nn.functional as F


class Operations(Protocol):
    """What a fused layer computes between its matrix products. Rows are tokens."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm of the last dimension of x [tokens, size] or [tokens, heads, size]; weight without tokens."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The norm of x + residual [tokens, size], which is left in ``residual``."""
        ...

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, head_dim], turned by cos and sin [tokens, head_dim], whose halves are equal."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) · up for gate_up [tokens, 2 · size]."""
        ...


class TorchOperations:
    """In PyTorch, on any device."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Operations``."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Operations``."""
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See ``Operations``."""
        half = x.shape[-1] // 2
        cos, sin = cos[:, None], sin[:, None, :half]
        turned = x * cos
        turned[..., :half].addcmul_(x[..., half:], sin, value=-1)
        turned[..., half:].addcmul_(x[..., :half], sin)
        return turned

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Operations``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class TritonOperations:
    """By the Triton kernels; ``rope`` works in place."""

    def __init__(self) -> None:
        from pagewise_kernels import rms_norm, rope, silu_mul

        self._rms_norm, self._rope, self.silu_mul = rms_norm.rms_norm, rope.rope, silu_mul.silu_mul

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Operations``."""
        return self._rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Operations``."""
        return self._rms_norm(x, weight, eps, residual=residual)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See ``Operations``."""
        half = x.shape[-1] // 2
        return self._rope(x, cos[:, :half], sin[:, :half])

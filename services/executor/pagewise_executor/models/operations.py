"""The small operations of a fused decoder layer, in PyTorch and in Triton."""

from typing import Protocol

import torch
import torch.nn.functional as F


class Operations(Protocol):
    """What a fused layer computes between its matrix products."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the RMSNorm of the last dimension of x [tokens, size] or [tokens, heads, size].

        ``weight``: [size] or [heads, size].
        """
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add x to ``residual`` [tokens, size] in place, and return the RMSNorm of the sum."""
        ...

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [tokens, heads, head_dim] by cos and sin [tokens, head_dim], whose two halves are equal."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) · up [tokens, size] of gate_up [tokens, 2 · size]."""
        ...


class TorchOperations:
    """These operations in PyTorch, on any device."""

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
        rotated = x * cos
        rotated[..., :half].addcmul_(x[..., half:], sin, value=-1)
        rotated[..., half:].addcmul_(x[..., :half], sin)
        return rotated

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Operations``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class TritonOperations:
    """These operations by the Triton kernels; ``rope`` works in place."""

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

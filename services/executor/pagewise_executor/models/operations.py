"""The small operations of a fused decoder layer, in PyTorch, in Triton, and in C for the CPU."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from pagewise_executor.attention.backend import PagedLayer


class HeadNorm(NamedTuple):
    """An RMSNorm of each query and key: ``weight`` [heads + kv_heads, head_dim]."""

    weight: torch.Tensor
    eps: float


class AttentionShape(NamedTuple):
    """The heads of an attention layer, the scale of its scores and its sliding window."""

    heads: int
    kv_heads: int
    scale: float
    window: int | None


class Rotation(NamedTuple):
    """RoPE of a step. ``cos``, ``sin`` [tokens, head_dim]: of each token, the two halves are equal.

    With ``positions`` int64 [tokens] they are those of all positions, [max_model_len, head_dim / 2].
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None = None


Angles = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Positions [n] to cos and sin [n, head_dim], whose two halves are equal."""


class Operations(Protocol):
    """What a fused decoder computes between its matrix products."""

    def rotations(self, angles: Angles, max_model_len: int, device: torch.device) -> Callable[[torch.Tensor], Rotation]:
        """Return what makes the rotation of a step of its positions int64 [tokens], which are below max_model_len."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the RMSNorm of x [tokens, size]."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add x to ``residual`` [tokens, size] in place, and return the RMSNorm of the sum."""
        ...

    def attend(
        self,
        layer: PagedLayer,
        qkv: torch.Tensor,
        shape: AttentionShape,
        rotation: Rotation,
        head_norm: HeadNorm | None,
    ) -> torch.Tensor:
        """Normalise the heads, rotate queries and keys, write K and V, and attend over the block tables.

        ``qkv`` [tokens, heads + 2 · kv_heads, head_dim] may be changed in place; ``rotation`` is one of ``rotations``.
        Returns [tokens, heads, head_dim].
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) · up [tokens, size] of gate_up [tokens, 2 · size]."""
        ...


class _RotationsByStep:
    """``rotations`` that compute cosines and sines in every step."""

    def rotations(self, angles: Angles, max_model_len: int, device: torch.device) -> Callable[[torch.Tensor], Rotation]:
        """See ``Operations``."""
        return lambda positions: Rotation(*angles(positions))


class _AttendInSteps(_RotationsByStep):
    """``attend`` by the norm and the rotation of other operations, one after the other."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Operations``; also for x [tokens, heads, size] with a weight [heads, size]."""
        raise NotImplementedError

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [tokens, heads, head_dim] by cos and sin [tokens, head_dim]."""
        raise NotImplementedError

    def attend(
        self,
        layer: PagedLayer,
        qkv: torch.Tensor,
        shape: AttentionShape,
        rotation: Rotation,
        head_norm: HeadNorm | None,
    ) -> torch.Tensor:
        """See ``Operations``."""
        num_rotated = shape.heads + shape.kv_heads
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if head_norm is not None:
            qk = self.rms_norm(qk, head_norm.weight, head_norm.eps)
        qk = self.rope(qk, rotation.cos, rotation.sin)
        return layer.attend(qk[:, : shape.heads], qk[:, shape.heads :], v, shape.scale, shape.window)


class TorchOperations(_AttendInSteps):
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


class TritonOperations(_AttendInSteps):
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


class CpuOperations(_RotationsByStep):
    """These operations in C, each in one pass over the data."""

    def __init__(self) -> None:
        from pagewise_kernels.cpu import operations

        self.rms_norm, self.silu_mul = operations.rms_norm, operations.silu_mul

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Operations``."""
        return self.rms_norm(x, weight, eps, residual)

    def attend(
        self,
        layer: PagedLayer,
        qkv: torch.Tensor,
        shape: AttentionShape,
        rotation: Rotation,
        head_norm: HeadNorm | None,
    ) -> torch.Tensor:
        """See ``Operations``."""
        from pagewise_kernels.cpu import attention

        from pagewise_executor.attention.cpu_attention import CpuStepAttention

        step = layer.forward_context.step
        assert isinstance(step, CpuStepAttention)
        rotated = shape.heads + shape.kv_heads
        q, k, v = qkv[:, : shape.heads], qkv[:, shape.heads : rotated], qkv[:, rotated:]
        weight, eps = head_norm if head_norm is not None else (None, 0.0)
        turned = attention.Rotation(rotation.cos, rotation.sin, weight, eps)
        return step.attend_rotated(layer, q, k, v, shape.scale, shape.window, rotation=turned)

"""The small operations of a fused decoder layer, in PyTorch, in Triton, and in C for the CPU."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from pagewise_executor.attention.backend import AttentionShape, PagedLayer
from pagewise_executor.models.cpu_mixtures import CpuMixture
from pagewise_executor.models.quantised_linear import ScaledMMLinear
from pagewise_executor.models.skinny_linear import RoundedRows, Rows, SkinnyLinear

if TYPE_CHECKING:
    from pagewise_executor.attention.cpu_attention import CpuStepAttention

_POSITIONS_AT_ONCE = 8192
"""The most positions whose angles are computed at once, in float32."""


class HeadNorm(NamedTuple):
    """An RMSNorm of each query and key: ``weight`` [heads + kv_heads, head_dim]."""

    weight: torch.Tensor
    eps: float


class Rotation(NamedTuple):
    """RoPE of a step. ``cos``, ``sin`` [tokens, head_dim]: of each token; the two halves are equal.

    With ``positions`` int64 [tokens] they are tables of all positions, [max_model_len, head_dim / 2].
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None = None


Angles = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Positions [n] to cos and sin [n, head_dim], whose two halves are equal."""


class Operations:
    """The operations of a fused decoder between its matrix products: in PyTorch, on any device."""

    def rotations(self, angles: Angles, max_model_len: int, device: torch.device) -> Callable[[torch.Tensor], Rotation]:
        """Return a function from the positions int64 [tokens] of a step, below ``max_model_len``, to its rotation."""
        return lambda positions: Rotation(*angles(positions))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the RMSNorm of x [tokens, size], or of x + residual, which ``residual`` holds afterwards.

        In PyTorch also of x [tokens, heads, size] with a weight [heads, size].
        """
        if residual is not None:
            residual += x
            x = residual
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype)

    def norm_for(
        self, reader: nn.Module, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> Rows:
        """Return the result of ``rms_norm`` in the form that the linear layer ``reader`` takes best."""
        return self.rms_norm(x, weight, eps, residual)

    def mix(
        self, mixture: nn.Module, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return the output [tokens, hidden] of a mixture of experts, a module as transformers has it, for the
        ``rms_norm`` of x."""
        mixed: torch.Tensor = mixture(self.rms_norm(x, weight, eps, residual)[None])[0]
        return mixed

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
        num_rotated = shape.heads + shape.kv_heads
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if head_norm is not None:
            qk = self.rms_norm(qk, head_norm.weight, head_norm.eps)
        qk = _rotate(qk, rotation)
        return layer.attend(qk[:, : shape.heads], qk[:, shape.heads :], v, shape.scale, shape.window)

    def gated(self, gate_up: nn.Module, x: Rows) -> torch.Tensor:
        """Return silu(gate) · up [tokens, size] of x [tokens, hidden]; gate_up(x) is gate and up [tokens, 2 · size]."""
        gate, up = gate_up(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class TritonOperations(Operations):
    """The operations by the Triton kernels. Cosines and sines of all positions are in tables on the device."""

    def __init__(self) -> None:
        from pagewise_kernels import rms_norm, rope_write_kv, silu_mul

        self._rms_norm, self._rounded_rms_norm = rms_norm.rms_norm, rms_norm.rounded_rms_norm
        self._silu_mul, self._rope_write_kv = silu_mul.silu_mul, rope_write_kv.rope_write_kv

    def rotations(self, angles: Angles, max_model_len: int, device: torch.device) -> Callable[[torch.Tensor], Rotation]:
        """Compute the tables; return a function from positions to the rotation that reads them."""
        tables: list[list[torch.Tensor]] = [[], []]
        for start in range(0, max_model_len, _POSITIONS_AT_ONCE):
            positions = torch.arange(start, min(max_model_len, start + _POSITIONS_AT_ONCE), device=device)
            for table, values in zip(tables, angles(positions), strict=True):
                table.append(values[:, : values.shape[1] // 2].contiguous())
        cos, sin = map(torch.cat, tables)
        return lambda positions: Rotation(cos, sin, positions)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the RMSNorm of x [tokens, size], or of x + residual, which ``residual`` holds afterwards."""
        return self._rms_norm(x, weight, eps, residual=residual)

    def norm_for(
        self, reader: nn.Module, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> Rows:
        """Return the norm, rounded to FP8 where ``reader`` would round it next."""
        if isinstance(reader, ScaledMMLinear) and reader.static_scale is None:
            values, scales = self._rounded_rms_norm(x, weight, eps, residual=residual)
            return RoundedRows(values, scales, x.dtype)
        return self._rms_norm(x, weight, eps, residual=residual)

    def gated(self, gate_up: nn.Module, x: Rows) -> torch.Tensor:
        """Return silu(gate) · up. Up to ``few_rows`` tokens one kernel computes both and their activation."""
        if isinstance(gate_up, SkinnyLinear | ScaledMMLinear) and len(x) <= gate_up.few_rows:
            return gate_up.gated(x)
        return self._silu_mul(gate_up(x))

    def attend(
        self,
        layer: PagedLayer,
        qkv: torch.Tensor,
        shape: AttentionShape,
        rotation: Rotation,
        head_norm: HeadNorm | None,
    ) -> torch.Tensor:
        """Normalise, rotate and write K and V by one kernel, and attend."""
        from pagewise_executor.attention.triton_attention import TritonStep

        step = layer.forward_context.step
        assert isinstance(step, TritonStep)
        assert rotation.positions is not None
        weight, eps = head_norm if head_norm is not None else (None, 0.0)
        self._rope_write_kv(
            qkv, rotation.positions, rotation.cos, rotation.sin, layer, step.slots[layer.slot], head_norm=weight,
            eps=eps,
        )  # fmt: skip
        return step.attend_written(layer, qkv[:, : shape.heads], shape.scale, shape.window)


class CpuOperations(Operations):
    """The operations in C, each in one pass over the data."""

    def __init__(self) -> None:
        from pagewise_kernels.cpu import attention, operations

        self._rms_norm, self._silu_mul, self._rotation = operations.rms_norm, operations.silu_mul, attention.Rotation

    def rotations(self, angles: Angles, max_model_len: int, device: torch.device) -> Callable[[torch.Tensor], Rotation]:
        """Return a function from positions to their rotation, which it looks up in a table of all positions so far."""
        return _Rotations(angles, max_model_len)

    def gated(self, gate_up: nn.Module, x: Rows) -> torch.Tensor:
        """Return silu(gate) · up."""
        return self._silu_mul(gate_up(x))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the RMSNorm of x [tokens, size], or of x + residual, which ``residual`` holds afterwards."""
        return self._rms_norm(x, weight, eps, residual)

    def mix(
        self, mixture: nn.Module, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return the output of a mixture; norm, router and experts are one operation where it is a ``CpuMixture``."""
        if isinstance(mixture, CpuMixture):
            return mixture.mixture.sums(x, weight, eps, residual)
        return super().mix(mixture, x, residual, weight, eps)

    def attend(
        self,
        layer: PagedLayer,
        qkv: torch.Tensor,
        shape: AttentionShape,
        rotation: Rotation,
        head_norm: HeadNorm | None,
    ) -> torch.Tensor:
        """Attend by the operation that also normalises the heads and rotates."""
        step: CpuStepAttention = layer.forward_context.step  # type: ignore[assignment]
        q, k, v = qkv.split_with_sizes((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        weight, eps = head_norm if head_norm is not None else (None, 0.0)
        turned = self._rotation(rotation.cos, rotation.sin, weight, eps)
        return step.attend(layer, q, k, v, shape.scale, shape.window, rotation=turned)


class _Rotations:
    """The rotations of a model's steps on the CPU, from tables that double when a position is beyond them.

    They are smaller than the K and V of the longest sequence by the number of heads and layers.
    """

    def __init__(self, angles: Angles, max_model_len: int) -> None:
        self._angles, self._most = angles, max_model_len
        self._cos, self._sin = angles(torch.zeros(1, dtype=torch.int64))

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of positions int64 [tokens]."""
        largest = int(positions.max())
        if largest >= len(self._cos):
            size = min(self._most, 1 << largest.bit_length())
            self._cos, self._sin = self._angles(torch.arange(size))
        return Rotation(self._cos[positions], self._sin[positions])


def _rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    half = x.shape[-1] // 2
    cos, sin = rotation.cos[:, None], rotation.sin[:, None, :half]
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin, value=-1)
    rotated[..., half:].addcmul_(x[..., :half], sin)
    return rotated

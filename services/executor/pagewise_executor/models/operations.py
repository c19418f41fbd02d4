"""The small operations of a fused decoder layer, in PyTorch and in Triton."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from pagewise_executor.attention.backend import AttentionShape, PagedLayer
from pagewise_executor.models.quantised_linear import ScaledMMLinear
from pagewise_executor.models.skinny_linear import RoundedRows, Rows, SkinnyLinear

if TYPE_CHECKING:
    from pagewise_executor.models.fused import FusedDecoderLayer

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

    def layers(
        self, layers: Sequence["FusedDecoderLayer"], residual: torch.Tensor, added: torch.Tensor | None,
        rotation: Rotation,
    ) -> torch.Tensor:  # fmt: skip
        """Return the output of the last of these layers, one behind the other; see ``FusedDecoderLayer.forward``."""
        for layer in layers:
            added = layer(residual, added, rotation)
        assert added is not None
        return added

    def attention(
        self, layer: "FusedDecoderLayer", x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> torch.Tensor:
        """Return the output [tokens, hidden] of the attention of a layer for the norm of x, as ``rms_norm`` has it."""
        norm = layer.norm_before_attention
        return layer.attention(self.norm_for(layer.qkv, x, residual, norm.weight, norm.eps), rotation)

    def feed_forward(self, layer: "FusedDecoderLayer", x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the output [tokens, hidden] of the MLP of a layer for the norm of x + residual."""
        norm = layer.norm_before_mlp
        if layer.mlp is not None:
            return self.mix(layer.mlp, x, residual, norm.weight, norm.eps)
        return layer.feed_forward(self.norm_for(layer.gate_up, x, residual, norm.weight, norm.eps))

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


def _rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    half = x.shape[-1] // 2
    cos, sin = rotation.cos[:, None], rotation.sin[:, None, :half]
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin, value=-1)
    rotated[..., half:].addcmul_(x[..., :half], sin)
    return rotated

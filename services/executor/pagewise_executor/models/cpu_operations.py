"""The small operations of a fused decoder layer in C, for the CPU."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from pagewise_executor.attention.backend import AttentionShape, PagedLayer
from pagewise_executor.models.cpu_mixtures import CpuMixture
from pagewise_executor.models.fused import FusedDecoderLayer, NormWeight, WrappedLinear, sum_of_one
from pagewise_executor.models.operations import Angles, HeadNorm, Operations, Rotation
from pagewise_executor.models.packed_linear import CpuLinear
from pagewise_executor.models.skinny_linear import Rows

if TYPE_CHECKING:
    from pagewise_kernels.cpu.layer import HalfLayer, HalfLayers, PackedLinear

    from pagewise_executor.attention.cpu_attention import CpuStepAttention


class CpuOperations(Operations):
    """The operations in C, each in one pass over the data."""

    def __init__(self) -> None:
        from pagewise_kernels.cpu import attention, operations

        self._rms_norm, self._silu_mul, self._rotation = operations.rms_norm, operations.silu_mul, attention.Rotation
        self._runs: dict[tuple[nn.Module, int, bool], list[_Run]] = {}
        # By the first linear layer of each MLP; None: its linear layers are not all packed.
        self._mlps: dict[nn.Module, HalfLayers | None] = {}

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

    def layers(
        self, layers: Sequence[FusedDecoderLayer], residual: torch.Tensor, added: torch.Tensor | None,
        rotation: Rotation,
    ) -> torch.Tensor:  # fmt: skip
        """Return the output of the last of these layers, by one call where all their linear layers are packed."""
        runs = self._runs_of(layers, with_mlps=True)
        if not runs:
            return super().layers(layers, residual, added, rotation)
        for run in runs:
            added = run.compute(residual, added, rotation)
        assert added is not None
        return added

    def attention(
        self, layer: FusedDecoderLayer, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> torch.Tensor:
        """Return the output of the attention of a layer, by one call where its linear layers are packed."""
        runs = self._runs_of([layer], with_mlps=False)
        if not runs:
            return super().attention(layer, x, residual, rotation)
        base, added = (x, None) if residual is None else (residual, x)
        return runs[0].compute(base, added, rotation)

    def _runs_of(self, layers: Sequence[FusedDecoderLayer], with_mlps: bool) -> "list[_Run]":
        """Return the runs of layers, or of their attention alone; none: their operations are called one by one."""
        if _adds(layers[0].qkv):
            return []
        key = layers[0].qkv, len(layers), with_mlps
        paged: PagedLayer = layers[0].self_attn.paged_layer  # type: ignore[assignment]
        if (runs := self._runs.get(key)) and runs[0].layer is not paged:
            self._runs.clear()  # a new pool has new layers, all of them
        if key not in self._runs:
            self._runs[key] = _make_runs(layers, with_mlps)
        return self._runs[key]

    def feed_forward(self, layer: FusedDecoderLayer, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP of a layer, by one call where its linear layers are packed."""
        from pagewise_kernels.cpu.layer import HalfLayers

        if layer.mlp is not None:
            return super().feed_forward(layer, x, residual)
        gate_up = layer.gate_up
        if gate_up not in self._mlps:
            self._mlps[gate_up] = None if (half := _mlp_half(layer)) is None else HalfLayers([half])
        mlp = self._mlps[gate_up]
        if mlp is None or _adds(gate_up):
            return super().feed_forward(layer, x, residual)
        return mlp.compute(residual, x)

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


class _Run(NamedTuple):
    """Layers that attend with the same step and are computed by one call. ``layer``: of the first one's K and V."""

    layer: PagedLayer
    halves: "HalfLayers"

    def compute(self, residual: torch.Tensor, added: torch.Tensor | None, rotation: Rotation) -> torch.Tensor:
        """Return the output of the last half, as ``HalfLayers.compute`` does."""
        from pagewise_kernels.cpu.layer import RotatedStep

        step: CpuStepAttention = self.layer.forward_context.step  # type: ignore[assignment]
        return self.halves.compute(residual, added, RotatedStep(step.step, rotation.cos, rotation.sin))


def _make_runs(layers: Sequence[FusedDecoderLayer], with_mlps: bool) -> list[_Run]:
    """Return these layers, or their attention alone, in as few runs as they have different steps in turn; none: ranks,
    mixtures or other types are between their operations."""
    from pagewise_kernels.cpu.layer import HalfLayers

    parts: list[tuple[PagedLayer, list[HalfLayer | None]]] = []
    for layer in layers:
        paged: PagedLayer = layer.self_attn.paged_layer  # type: ignore[assignment]
        parts.append((paged, [_attention_half(layer, paged), *([_mlp_half(layer)] if with_mlps else [])]))
    runs = []
    for _, run in groupby(parts, lambda part: id(part[0].forward_context)):
        pools, halves = zip(*run, strict=True)
        packed = [half for both in halves for half in both if half is not None]
        if len(packed) < sum(map(len, halves)):
            return []
        runs.append(_Run(pools[0], HalfLayers(packed)))
    return runs


def _attention_half(layer: FusedDecoderLayer, paged: PagedLayer) -> "HalfLayer | None":
    from pagewise_kernels.cpu.layer import AttentionHalf, Norm

    before, head_norm = layer.norm_before_attention, layer.head_norm
    packed = _packed(layer, before, layer.qkv, layer.out)
    if not packed or paged.attention_chunk is not None or paged.scale_queries is not None or not paged.writes_kv:
        return None
    return AttentionHalf(
        Norm(before.weight, before.eps), packed[0], packed[1], layer.shape.heads, paged, layer.shape.scale,
        layer.shape.window, None if head_norm is None else Norm(*head_norm),
    )  # fmt: skip


def _mlp_half(layer: FusedDecoderLayer) -> "HalfLayer | None":
    from pagewise_kernels.cpu.layer import MlpHalf, Norm

    if layer.mlp is not None:
        return None
    before = layer.norm_before_mlp
    packed = _packed(layer, before, layer.gate_up, layer.down)
    return MlpHalf(Norm(before.weight, before.eps), packed[0], packed[1]) if packed else None


def _packed(layer: FusedDecoderLayer, norm: NormWeight, *linears: nn.Module) -> "list[PackedLinear]":
    """Return the weights of linear layers that one operation may compute with all between them; none if it may not."""
    bases = [linear.base if isinstance(linear, WrappedLinear) else linear for linear in linears]
    packed: list[PackedLinear] = [base.packed for base in bases if isinstance(base, CpuLinear)]
    plain = norm.weight.dtype == torch.float32 and layer.reduce is sum_of_one
    return packed if plain and len(packed) == len(linears) else []


def _adds(linear: nn.Module) -> bool:
    return isinstance(linear, WrappedLinear) and linear.adds


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
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions))

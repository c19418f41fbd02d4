"""Decoder layers of Llama's structure on the CPU, any number of them as one call.

A decode step of one token has a hundred operations of some microseconds beside its products, and Python takes as long
between two of them. The results are the same as by single calls.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from pagewise_kernels.cpu.attention import CpuStep, check_head_norm, check_heads, check_rotation, set_layer
from pagewise_kernels.cpu.library import (
    AttentionArguments,
    HalfLayerArguments,
    WeightArguments,
    empty,
    load_library,
    threads,
)
from pagewise_kernels.cpu.operations import check_norm
from pagewise_kernels.kv_layer import INT4, INT8, KVLayer


class PackedLinear(Protocol):
    """The weight of a linear layer: ``PackedWeight``, ``Int8Weight``, ``Int4Weight`` or ``GroupedWeight``."""

    outs: int
    ins: int

    @property
    def arguments(self) -> WeightArguments:
        """This weight as an argument of the operations in this module."""
        ...


class Norm(NamedTuple):
    """An RMSNorm: ``weight`` float32 [size], and ``eps``."""

    weight: torch.Tensor
    eps: float


class RotatedStep(NamedTuple):
    """The attention of a step with RoPE: ``cos``, ``sin`` [tokens, head_dim], whose two halves are equal."""

    step: CpuStep
    cos: torch.Tensor
    sin: torch.Tensor


class HalfLayer:
    """Half of a decoder layer: norm, the linear layer ``first``, another operation, and the linear layer ``second``."""

    layer: KVLayer | None = None
    """The pool, if the operation is attention."""

    def __init__(self, norm: Norm, first: PackedLinear, second: PackedLinear) -> None:
        if norm.weight.dtype != torch.float32 or not norm.weight.is_contiguous():
            raise ValueError(f"the norm is contiguous in float32, not in {norm.weight.dtype}")
        if second.outs != norm.weight.numel():
            raise ValueError(f"{second.outs} outputs are not added to a residual of {norm.weight.numel()}")
        self._kept = norm, first, second  # while the structure points to them
        self.norm = norm.weight
        self.arguments = HalfLayerArguments(norm.weight.data_ptr(), norm.eps, first.arguments, second.arguments)


class AttentionHalf(HalfLayer):
    """Norm, Q, K and V, attention over the block tables, and the output projection.

    ``window``: a query sees so many tokens, itself included; None: all. ``head_norm``: of each query and key, with a
    weight [heads + kv_heads, head_dim].

    Raises:
        ValueError: the shapes of weights and heads do not fit.
    """

    def __init__(
        self, norm: Norm, qkv: PackedLinear, out: PackedLinear, heads: int, layer: KVLayer, scale: float,
        window: int | None, head_norm: Norm | None,
    ) -> None:  # fmt: skip
        dim, all_heads = layer.head_dim, heads + 2 * layer.kv_heads
        if layer.dtype not in (torch.float32, INT8, INT4) or layer.latent:
            raise ValueError(f"the pool has keys and values in float32, int8 or int4, not {layer.dtype} or latents")
        if (qkv.ins, qkv.outs, out.ins) != (norm.weight.numel(), all_heads * dim, heads * dim):
            raise ValueError(
                f"{heads} heads of {dim} with {layer.kv_heads} KV heads do not fit weights of {qkv.outs} outputs and "
                f"{out.ins} inputs"
            )
        super().__init__(norm, qkv, out)
        check_heads(layer, heads)
        self.layer, self._head_norm = layer, head_norm
        self._attention = AttentionArguments()
        set_layer(self._attention, layer, heads, scale, window, None)
        if head_norm is not None:
            check_head_norm(head_norm.weight, heads + layer.kv_heads, dim, torch.float32)
            self._attention.head_norm, self._attention.norm_eps = head_norm.weight.data_ptr(), head_norm.eps
        self.arguments.attention = ctypes.addressof(self._attention)


class MlpHalf(HalfLayer):
    """Norm, gate and up, silu(gate) · up, and the down projection.

    Raises:
        ValueError: the shapes of the weights do not fit.
    """

    def __init__(self, norm: Norm, gate_up: PackedLinear, down: PackedLinear) -> None:
        if (gate_up.ins, gate_up.outs) != (norm.weight.numel(), 2 * down.ins):
            raise ValueError(f"gate and up of {gate_up.outs} outputs do not fit {down.ins} inputs of down")
        super().__init__(norm, gate_up, down)


class HalfLayers:
    """Halves of decoder layers, one behind the other, as one call.

    Raises:
        ValueError: they do not have the same number of hidden values, or there are none.
    """

    def __init__(self, halves: Sequence[HalfLayer]) -> None:
        if len({half.norm.numel() for half in halves}) != 1:
            raise ValueError(f"{len(halves)} halves have not one hidden size: {[half.norm.numel() for half in halves]}")
        self._library, self._halves, self._norm = load_library(), tuple(halves), halves[0].norm
        self._shapes = {(half.layer.block_size, half.layer.head_dim) for half in halves if half.layer is not None}
        self._arguments = (HalfLayerArguments * len(halves))(*(half.arguments for half in halves))

    def compute(
        self, residual: torch.Tensor, added: torch.Tensor | None = None, attention: RotatedStep | None = None
    ) -> torch.Tensor:
        """Return the output of the last half [tokens, hidden], which is not added to ``residual`` [tokens, hidden] yet.

        The first half adds ``added`` [tokens, hidden] to ``residual`` in place, and the others the output of the half
        before. ``attention``: of the halves that attend.

        Raises:
            ValueError: shapes or strides do not fit. TypeError: types do not. MemoryError: there is none.
        """
        rows = len(residual)
        check_norm(residual if added is None else added, self._norm, residual)
        if added is not None and not added.is_contiguous():
            raise ValueError(f"what is added is contiguous, and has not the strides {added.stride()}")
        at = _step_arguments(attention, rows, self._shapes)
        out = empty((rows, self._norm.numel()), torch.float32)
        scratch = empty((self.scratch_bytes(rows),), torch.uint8)
        if self._library.pagewise_half_layers(
            self._arguments, len(self._halves), *at, residual.data_ptr(), None if added is None else added.data_ptr(),
            out.data_ptr(), scratch.data_ptr(), rows, threads(),
        ):  # fmt: skip
            raise MemoryError("no memory for the parts of an attention step")
        return out

    def scratch_bytes(self, rows: int) -> int:
        """Return the memory that is needed beside the result of rows."""
        return int(self._library.pagewise_half_layers_scratch(self._arguments, len(self._halves), rows))


def _step_arguments(
    attention: RotatedStep | None, rows: int, shapes: set[tuple[int, int]]
) -> tuple[object, int | None, int | None]:
    """Return the pointers of a step: its shared arguments, cos and sin. ``shapes``: block size and head size of layers.

    Raises:
        ValueError: the step is of other rows or of other layers.
    """
    if attention is None:
        if shapes:
            raise ValueError(f"attention of {rows} tokens has no step")
        return None, None, None
    step, cos, sin = attention
    for block_size, head_dim in shapes:
        if (step.tokens, step.block_size) != (rows, block_size):
            raise ValueError(
                f"a step of {step.tokens} tokens in blocks of {step.block_size} has not {rows} tokens in {block_size}"
            )
        check_rotation(cos, sin, rows, head_dim, torch.float32)
    return ctypes.byref(step.shared), cos.data_ptr(), sin.data_ptr()

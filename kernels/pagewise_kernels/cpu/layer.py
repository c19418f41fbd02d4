"""The two halves of a decoder layer of Llama's structure on the CPU, each as one call: attention and the gated MLP.

A decode step of one token has a hundred operations of some microseconds beside its products, and Python takes as long
between two of them. The results are the same as by single calls.
"""

import ctypes
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


class _HalfLayer:
    """A norm, the linear layer ``first`` of its result, another operation, and the linear layer ``second``."""

    def __init__(self, norm: Norm, first: PackedLinear, second: PackedLinear) -> None:
        if norm.weight.dtype != torch.float32 or not norm.weight.is_contiguous():
            raise ValueError(f"the norm is contiguous in float32, not in {norm.weight.dtype}")
        self._library = load_library()
        self._kept = norm, first, second  # while the structure points to them
        self._norm, self._outs = norm.weight, second.outs
        self._arguments = HalfLayerArguments(norm.weight.data_ptr(), norm.eps, first.arguments, second.arguments)
        self._at = ctypes.byref(self._arguments)

    def _memory(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Check the rows; return memory for their result, and for the results between."""
        check_norm(x, self._norm, residual)
        rows = len(x)
        if not x.is_contiguous():
            raise ValueError(f"half a layer takes contiguous rows, not {list(x.shape)} with strides {x.stride()}")
        return empty((rows, self._outs), torch.float32), empty((self.scratch_bytes(rows),), torch.uint8)

    def scratch_bytes(self, rows: int) -> int:
        """Return the memory that is needed beside the result of rows."""
        return int(self._library.pagewise_half_layer_scratch(self._at, rows))


class AttentionHalf(_HalfLayer):
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
        super().__init__(norm, qkv, out)
        self.layer, self._head_norm = layer, head_norm
        dim, all_heads = layer.head_dim, heads + 2 * layer.kv_heads
        if layer.dtype not in (torch.float32, INT8, INT4) or layer.latent:
            raise ValueError(f"the pool has keys and values in float32, int8 or int4, not {layer.dtype} or latents")
        if (qkv.ins, qkv.outs, out.ins) != (norm.weight.numel(), all_heads * dim, heads * dim):
            raise ValueError(
                f"{heads} heads of {dim} with {layer.kv_heads} KV heads do not fit weights of {qkv.outs} outputs and "
                f"{out.ins} inputs"
            )
        check_heads(layer, heads)
        self._of_layer = AttentionArguments()
        set_layer(self._of_layer, layer, heads, scale, window, None)
        if head_norm is not None:
            check_head_norm(head_norm.weight, heads + layer.kv_heads, dim, torch.float32)
            self._of_layer.head_norm, self._of_layer.norm_eps = head_norm.weight.data_ptr(), head_norm.eps
        self._layer_at = ctypes.byref(self._of_layer)

    def compute(
        self, step: CpuStep, x: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Return the output [tokens, hidden] for x [tokens, hidden], to which ``residual`` is added in place before.

        ``cos``, ``sin`` [tokens, head_dim]: see ``Rotation``.

        Raises:
            ValueError: shapes or strides do not fit. TypeError: types do not. MemoryError: there is none.
        """
        out, scratch = self._memory(x, residual)
        check_rotation(cos, sin, len(x), self.layer.head_dim, torch.float32)
        if (step.tokens, step.block_size) != (len(x), self.layer.block_size):
            raise ValueError(f"a step of {step.tokens} tokens in blocks of {step.block_size} has not {len(x)} tokens")
        if self._library.pagewise_attention_half(
            self._at, self._layer_at, ctypes.byref(step.shared), cos.data_ptr(), sin.data_ptr(), x.data_ptr(),
            None if residual is None else residual.data_ptr(), out.data_ptr(), scratch.data_ptr(), len(x), threads(),
        ):  # fmt: skip
            raise MemoryError("no memory for the parts of an attention step")
        return out


class MlpHalf(_HalfLayer):
    """Norm, gate and up, silu(gate) · up, and the down projection.

    Raises:
        ValueError: the shapes of the weights do not fit.
    """

    def __init__(self, norm: Norm, gate_up: PackedLinear, down: PackedLinear) -> None:
        super().__init__(norm, gate_up, down)
        if (gate_up.ins, gate_up.outs) != (norm.weight.numel(), 2 * down.ins):
            raise ValueError(f"gate and up of {gate_up.outs} outputs do not fit {down.ins} inputs of down")

    def compute(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the output [tokens, hidden] for x [tokens, hidden], to which ``residual`` is added in place before.

        Raises:
            ValueError: shapes or strides do not fit. TypeError: types do not.
        """
        out, scratch = self._memory(x, residual)
        self._library.pagewise_mlp_half(
            self._at, x.data_ptr(), residual.data_ptr(), out.data_ptr(), scratch.data_ptr(), len(x), threads(),
        )  # fmt: skip
        return out

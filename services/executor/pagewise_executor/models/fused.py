"""Decoders with fewer, larger operations, which replace the decoders of transformers in common families.

Q, K and V are one matrix product, gate and up another, RoPE rotates queries and keys together, and paged attention is
called directly. The next norm, in the next layer or behind the last one, adds the output of a sublayer to the residual.
The results are the same up to the order of floating-point operations.
"""

import functools
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pagewise_executor.attention.backend import PagedLayer
from pagewise_executor.models.four_bit_linear import FourBitLinear
from pagewise_executor.models.long_rope import LongRope
from pagewise_executor.models.operations import HeadNorm, Operations, Rotation
from pagewise_executor.models.quantised_linear import QuantisedLinear, join_linears
from pagewise_executor.models.skinny_linear import Rows
from pagewise_executor.models.support import attention_shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pagewise_executor.models.llama_config import LlamaConfig

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums over the ranks that hold parts of a layer, as ``Ranks.reduce`` does."""


def sum_of_one(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks where there is one rank."""
    return x


_DECODERS = {
    "LlamaDecoderLayer": "LlamaModel",
    "MistralDecoderLayer": "MistralModel",
    "MixtralDecoderLayer": "MixtralModel",
    "Qwen2DecoderLayer": "Qwen2Model",
    "Qwen2MoeDecoderLayer": "Qwen2MoeModel",
    "Qwen3DecoderLayer": "Qwen3Model",
    "Qwen3MoeDecoderLayer": "Qwen3MoeModel",
}
"""From the class of layers that can be fused to the class of their decoder."""


_PLAIN_HEADS = {"MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"}
"""Classes of transformers that compute the logits by their head from the decoder's output, without further
operations."""


def _no_layer(layer: nn.Module) -> bool:
    return False


class CausalLMOutput(NamedTuple):
    """The output of such a model: logits [1, tokens, vocab]."""

    logits: torch.Tensor


class DecoderOutput(NamedTuple):
    """The output of a decoder: hidden states [1, tokens, hidden], and empty fields that transformers reads."""

    last_hidden_state: torch.Tensor
    past_key_values: None = None
    cache: None = None  # their name in transformers 5.24
    hidden_states: None = None
    attentions: None = None
    router_logits: None = None


class FusedDecoder(nn.Module):
    """Replaces a decoder of Llama's structure whose layers are fused, and takes over its weights.

    ``max_model_len``: positions are below it.
    """

    def __init__(self, source: nn.Module, operations: Operations, max_model_len: int) -> None:
        super().__init__()
        self.operations = operations
        self.embed_tokens, self.layers, self.rotary_emb = source.embed_tokens, source.layers, source.rotary_emb
        self.norm = NormWeight(source.norm)
        rope = self.rotary_emb
        num_positions = rope.num_positions if isinstance(rope, LongRope) else max_model_len
        self._rotation_at = operations.rotations(self._angles, num_positions, self.norm.weight.device)
        self._is_hooked: Callable[[nn.Module], bool] = _no_layer

    def call_by_module(self, hooked: Callable[[nn.Module], bool] = _no_layer) -> None:
        """Call the layers for which ``hooked`` is true as modules, as their hooks expect, which may replace others.

        The others may be computed together, without a call.
        """
        self._is_hooked = hooked

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary_emb(self.norm.weight, positions[None])  # type: ignore[operator]
        return cos[0], sin[0]

    def get_decoder(self) -> nn.Module:
        """Return this module: transformers' ``get_decoder`` of a model asks its decoder for it."""
        return self

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: object) -> DecoderOutput:
        """Compute the hidden states of ids and positions [1, tokens]."""
        residual: torch.Tensor = self.embed_tokens(input_ids)[0]  # type: ignore[operator]
        rotation = self._rotation_at(position_ids[0])
        added: torch.Tensor | None = None
        for hooked, layers in groupby(self.layers, self._is_hooked):  # type: ignore[arg-type]
            if not hooked:
                added = self.operations.layers(list(layers), residual, added, rotation)
                continue
            for layer in layers:
                added = layer(residual, added, rotation)
        assert added is not None
        return DecoderOutput(self.operations.rms_norm(added, self.norm.weight, self.norm.eps, residual)[None])


class FusedDecoderLayer(nn.Module):
    """Replaces a layer of such a decoder, and takes over its weights. It computes within a ``FusedDecoder`` only.

    ``mlp``: the module of transformers that computes a mixture of experts; None: the layer has gate, up and down. It
    keeps its name, by which the sums over ranks and adapters find it.
    """

    def __init__(self, layer: nn.Module, operations: Operations, reduce: Reduce) -> None:
        super().__init__()
        self.operations, self.reduce = operations, reduce
        source, mlp = layer.self_attn, layer.mlp
        assert isinstance(source, nn.Module)
        assert isinstance(mlp, nn.Module)
        self.self_attn = source  # for its ``paged_layer``; its projections move here
        config: LlamaConfig | PretrainedConfig = source.config  # type: ignore[assignment]
        self.norm_before_attention = NormWeight(layer.input_layernorm)
        self.norm_before_mlp = NormWeight(layer.post_attention_layernorm)
        self.shape = attention_shape(source, config, self.norm_before_attention.weight.dtype)
        self.qkv = _joined([source.q_proj, source.k_proj, source.v_proj])
        self.out = _linear(source.o_proj)
        self.mlp = mlp if hasattr(mlp, "experts") else None
        if self.mlp is None:
            self.gate_up = _joined([mlp.gate_proj, mlp.up_proj])
            self.down = _linear(mlp.down_proj)
        self.head_norm: HeadNorm | None = None
        if hasattr(source, "q_norm"):
            q_norm, k_norm = NormWeight(source.q_norm), NormWeight(source.k_norm)
            weights = [q_norm.weight.expand(self.shape.heads, -1), k_norm.weight.expand(self.shape.kv_heads, -1)]
            self.head_norm = HeadNorm(torch.cat(weights), q_norm.eps)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            if hasattr(source, name):
                delattr(source, name)

    def forward(self, residual: torch.Tensor, added: torch.Tensor | None, rotation: Rotation) -> torch.Tensor:
        """Return the output of this layer, which the next norm adds to ``residual``; both [tokens, hidden].

        ``added``: the output of the layer before, which this layer adds to ``residual`` in place; None: there is none.
        """
        x, base = (residual, None) if added is None else (added, residual)
        attended = self.operations.attention(self, x, base, rotation)
        return self.operations.feed_forward(self, attended, residual)

    def attention(self, x: Rows, rotation: Rotation) -> torch.Tensor:
        """Return the output [tokens, hidden] of attention for normalised rows."""
        qkv = self.qkv(x).view(len(x), -1, self.shape.head_dim)
        layer: PagedLayer = self.self_attn.paged_layer  # type: ignore[assignment]
        attended = self.operations.attend(layer, qkv, self.shape, rotation, self.head_norm)
        return self.reduce(self.out(attended.reshape(len(x), -1)))

    def feed_forward(self, x: Rows) -> torch.Tensor:
        """Return the output [tokens, hidden] of the MLP for normalised rows."""
        return self.reduce(self.down(self.operations.gated(self.gate_up, x)))


class WrappedLinear(nn.Module):
    """A linear layer ``base`` to whose outputs something may be added."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    @property
    def adds(self) -> bool:
        """Whether something is added in this step, in this layer or another one of the model."""
        raise NotImplementedError


class NormWeight(nn.Module):
    """The weight of an RMSNorm, in the model's type, and its eps."""

    def __init__(self, norm: object) -> None:
        super().__init__()
        assert isinstance(norm, nn.Module)
        assert isinstance(norm.weight, torch.Tensor)
        self.weight = nn.Parameter(norm.weight.detach(), requires_grad=False)
        self.eps = float(norm.variance_epsilon)  # type: ignore[arg-type]


def fuse_layers(model: nn.Module, operations: Operations, within: str = "", reduce: Reduce = sum_of_one) -> int:
    """Replace the decoder layers that have a fused form; return how many were replaced.

    They compute after ``fuse_decoder`` only. ``within``: the name of a part of ``model``; empty: all of it.
    """
    count = 0
    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        kind = getattr(module, "fused_class", FusedDecoderLayer if _fusible(model, name, module) else None)
        if kind is not None:
            model.set_submodule(name, kind(module, operations, reduce))
            count += 1
    return count


def fuse_decoder(model: nn.Module, operations: Operations, max_model_len: int) -> None:
    """Replace the decoder of a model all of whose layers ``fuse_layers`` has replaced."""
    name = next(name for name, module in model.named_modules() if isinstance(module, FusedDecoderLayer))
    decoder = _decoder_name(name)
    model.set_submodule(decoder, FusedDecoder(model.get_submodule(decoder), operations, max_model_len))
    if type(model).__name__ in _PLAIN_HEADS:  # a module calls the ``forward`` of its instance
        model.forward = functools.partial(plain_logits, model)


def plain_logits(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, *, logits_to_keep: torch.Tensor | int = 0, **_: Any
) -> CausalLMOutput:
    """Compute the logits of ids and positions [1, tokens], at the indices ``logits_to_keep``, or at all if 0.

    The model computes them by ``lm_head`` from the hidden states of its decoder, ``model``, without further operations.
    """
    hidden = model.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state
    if isinstance(logits_to_keep, torch.Tensor):
        hidden = hidden[:, logits_to_keep]
    return CausalLMOutput(model.lm_head(hidden))


def _fusible(model: nn.Module, name: str, layer: nn.Module) -> bool:
    if type(layer).__name__ not in _DECODERS:
        return False
    config = layer.self_attn.config  # type: ignore[union-attr]
    decoder = _decoder_name(name)
    # A model that has its decoder within another module may give it embeddings of its own instead of ids (GOT-OCR2).
    is_own = bool(decoder) and "." not in decoder
    modules = model.get_submodule(decoder)
    known = type(modules).__name__ == _DECODERS[type(layer).__name__]
    # Where experts are quantised, the rotation of keys is found by asking attention modules that are complete.
    listed = any(isinstance(each, nn.ModuleList) and at.endswith(".experts") for at, each in modules.named_modules())
    return is_own and known and not listed and getattr(config, "hidden_act", None) == "silu"


def _decoder_name(layer_name: str) -> str:
    return layer_name.rpartition(".")[0].rpartition(".")[0]


def _joined(linears: list[object]) -> nn.Module:
    found = [_linear(linear) for linear in linears]
    parts = [linear for linear in found if isinstance(linear, nn.Linear)]
    if len(parts) < len(found):
        return join_linears(found)
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    return _from_weights(torch.cat([part.weight.detach() for part in parts]), bias)


def _linear(module: object) -> nn.Linear | QuantisedLinear | FourBitLinear:
    assert isinstance(module, nn.Linear | QuantisedLinear | FourBitLinear)
    return module


def _from_weights(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return linear

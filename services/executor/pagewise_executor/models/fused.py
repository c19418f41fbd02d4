"""Decoder layers with fewer, larger operations, which replace those of transformers' models in common families.

Q, K and V are one matrix product, gate and up another, RoPE rotates queries and keys together, and paged attention is
called directly. The results are the same up to the order of floating-point operations.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from pagewise_executor.attention.backend import PagedLayer
from pagewise_executor.models.operations import AttentionShape, HeadNorm, Operations

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pagewise_executor.models.llama_config import LlamaConfig

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums over the ranks that hold parts of a layer; see ``Ranks.reduce``."""

_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}


class FusedDecoderLayer(nn.Module):
    """Replaces a decoder layer of Llama's structure, and takes over its weights."""

    def __init__(self, layer: nn.Module, operations: Operations, reduce: Reduce) -> None:
        super().__init__()
        self.operations, self.reduce = operations, reduce
        source, mlp = layer.self_attn, layer.mlp
        assert isinstance(source, nn.Module)
        assert isinstance(mlp, nn.Module)
        self.self_attn = source  # for its ``paged_layer``; its projections move here
        config: LlamaConfig | PretrainedConfig = source.config  # type: ignore[assignment]
        self.head_dim = int(source.head_dim)  # type: ignore[arg-type]
        heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        # Qwen keeps a layer's window on the layer, Mistral in the configuration, Llama has none.
        windowed = config if type(layer).__name__ == "MistralDecoderLayer" else source
        window: int | None = getattr(windowed, "sliding_window", None)
        self.shape = AttentionShape(heads, kv_heads, float(source.scaling), window)  # type: ignore[arg-type]
        self.qkv = _joined([source.q_proj, source.k_proj, source.v_proj])
        self.out = _linear(source.o_proj)
        self.gate_up = _joined([mlp.gate_proj, mlp.up_proj])
        self.down = _linear(mlp.down_proj)
        self.norm_before_attention = _NormWeight(layer.input_layernorm)
        self.norm_before_mlp = _NormWeight(layer.post_attention_layernorm)
        self.head_norm: HeadNorm | None = None
        if hasattr(source, "q_norm"):
            q_norm, k_norm = _NormWeight(source.q_norm), _NormWeight(source.k_norm)
            weights = [q_norm.weight.expand(heads, -1), k_norm.weight.expand(kv_heads, -1)]
            self.head_norm = HeadNorm(torch.cat(weights), q_norm.eps)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            if hasattr(source, name):
                delattr(source, name)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: object
    ) -> torch.Tensor:
        """hidden_states [1, tokens, hidden] (changed in place); position_embeddings: cos, sin [1, tokens, head_dim]."""
        compute, hidden = self.operations, hidden_states[0]
        before, after = self.norm_before_attention, self.norm_before_mlp
        qkv = self.qkv(compute.rms_norm(hidden, before.weight, before.eps)).view(len(hidden), -1, self.head_dim)
        layer: PagedLayer = self.self_attn.paged_layer  # type: ignore[assignment]
        cos, sin = position_embeddings
        attended = compute.attend(layer, qkv, self.shape, cos[0], sin[0], self.head_norm)
        output = self.reduce(self.out(attended.reshape(len(hidden), -1)))
        gate_up = self.gate_up(compute.add_rms_norm(output, hidden, after.weight, after.eps))
        hidden += self.reduce(self.down(compute.silu_mul(gate_up)))
        return hidden_states


class _NormWeight(nn.Module):
    """The weight of an RMSNorm, in the model's type, and its eps."""

    def __init__(self, norm: object) -> None:
        super().__init__()
        assert isinstance(norm, nn.Module)
        assert isinstance(norm.weight, torch.Tensor)
        self.weight = nn.Parameter(norm.weight.detach(), requires_grad=False)
        self.eps = float(norm.variance_epsilon)  # type: ignore[arg-type]


def fuse_layers(
    model: nn.Module, operations: Operations, within: str = "", reduce: Reduce = lambda partial: partial
) -> int:
    """Replace the decoder layers that have a fused form; return how many were replaced.

    ``within``: the name of the module of ``model`` that is, or has, the layers; empty: all of the model.
    """
    count = 0
    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        if type(module).__name__ in _LAYERS and _fusible(module):
            model.set_submodule(name, FusedDecoderLayer(module, operations, reduce))
            count += 1
    return count


def _fusible(layer: nn.Module) -> bool:
    config = layer.self_attn.config  # type: ignore[union-attr]
    return getattr(config, "hidden_act", None) == "silu"


def _joined(linears: list[object]) -> nn.Linear:
    """Return one linear layer whose output is the concatenated output of ``linears``."""
    parts = [_linear(linear) for linear in linears]
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    return _from_weights(torch.cat([part.weight.detach() for part in parts]), bias)


def _linear(module: object) -> nn.Linear:
    assert isinstance(module, nn.Linear)
    return module


def _from_weights(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return linear

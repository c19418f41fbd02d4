"""Models of Llama's structure, built and read without transformers.

The decoder and its layers hold the weights and have no ``forward``: ``fuse_layers`` and ``fuse_decoder`` replace them
by modules that compute. Checkpoints and transformers' modules have the same names.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.checkpoint import Checkpoint
from pagewise_executor.models.fused import CausalLMOutput, FusedDecoderLayer, plain_logits
from pagewise_executor.models.llama_config import LlamaConfig
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint
from pagewise_executor.models.shards import LLAMA_PLAN, Shards
from pagewise_executor.models.weight_files import Headers


class LlamaAttention(nn.Module):
    """The projections of an attention layer. ``sliding_window``: the length of its window, None for full attention."""

    def __init__(self, config: LlamaConfig, layer_idx: int, sliding_window: int | None) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.scaling, self.sliding_window = self.head_dim**-0.5, sliding_window
        hidden, queries = config.hidden_size, config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        bias = config.qkv_bias or config.attention_bias
        self.q_proj, self.k_proj, self.v_proj = (_linear(hidden, size, bias) for size in (queries, keys, keys))
        self.o_proj = _linear(queries, hidden, config.attention_bias)
        if config.head_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))


class LlamaMLP(nn.Module):
    """The projections of a gated MLP."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (_linear(hidden, inner, config.mlp_bias) for _ in range(2))
        self.down_proj = _linear(inner, hidden, config.mlp_bias)


class LlamaDecoderLayer(nn.Module):
    """The parts of a decoder layer. ``fused_class``: the class of the layer that computes with them."""

    fused_class = FusedDecoderLayer

    def __init__(self, config: LlamaConfig, layer_idx: int, sliding_window: int | None) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx, sliding_window)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class RMSNorm(nn.Module):
    """The weight of a root mean square norm (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)
        self.variance_epsilon = eps


class RotaryEmbedding(nn.Module):
    """The angles of RoPE at given positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.inv_freq = nn.Buffer(config.rope_parameters.frequencies(config.head_dim), persistent=False)

    def forward(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [1, tokens, head_dim] for positions [1, tokens], of the type of ``like``."""
        half = positions[..., None].float() * self.inv_freq
        angles = torch.cat((half, half), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class LlamaModel(nn.Module):
    """The parts of a decoder, for ``FusedDecoder``: embeddings, layers, and the last norm."""

    def __init__(self, config: LlamaConfig, windows: Sequence[int | None]) -> None:
        super().__init__()
        # Not ``nn.Embedding(..., device="meta")``: it draws random weights, for which torch imports its compiler on
        # this device.
        embeddings = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(config.decoder_layer(*layer) for layer in enumerate(windows))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)


class LlamaForCausalLM(nn.Module):
    """A model of Llama's structure whose weights have no data yet. ``windows``: of its layers; None: the config's."""

    def __init__(self, config: LlamaConfig, windows: Sequence[int | None] | None = None) -> None:
        super().__init__()
        self.model = LlamaModel(config, config.windows if windows is None else windows)
        self.lm_head = _linear(config.hidden_size, config.vocab_size, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, as transformers' models do."""
        return self.model.embed_tokens  # type: ignore[no-any-return]

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, as transformers' models do."""
        return self.lm_head

    def get_decoder(self) -> nn.Module:
        """Return the decoder, as transformers' models do."""
        return self.model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *, logits_to_keep: torch.Tensor | int = 0, **_: Any
    ) -> CausalLMOutput:
        """Compute the logits of ids and positions [1, tokens], at the indices ``logits_to_keep``, or at all if 0."""
        return plain_logits(self, input_ids, position_ids, logits_to_keep=logits_to_keep)


class LlamaCheckpoint(Checkpoint):
    """The weight files of such a model. ``Checkpoint`` describes the arguments and the errors."""

    model: LlamaForCausalLM

    def __init__(
        self,
        name: str,
        config: LlamaConfig,
        headers: Headers,
        device: torch.device,
        quantised: QuantisedCheckpoint | None = None,
    ) -> None:
        self.config = config
        super().__init__(name, _empty(config, device), headers, device, quantised, tied=config.tie_word_embeddings)

    def shard(self, ranks: Ranks) -> tuple[nn.Module, Shards | None]:
        """Return this rank's part of the model, with the sizes of ``config``, and how the model is divided."""
        if not ranks.alone:
            self._divide(_empty(self.config, self.device), ranks, LLAMA_PLAN)
        return self.model, self._shards


def _empty(config: LlamaConfig, device: torch.device) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.model.rotary_emb.to(device)
    return model


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta")

"""Models of Llama's structure, built and read without transformers.

The decoder and its layers only hold the weights here and have no ``forward``: ``fuse_layers`` and ``fuse_decoder``
replace them by what computes. Names are those of the checkpoints, and of transformers' modules.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.llama_config import LlamaConfig, NotReadableError
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint
from pagewise_executor.models.shards import LLAMA_PLAN, Shards, vocabulary_names
from pagewise_executor.models.stored_linear import place_stored, place_whole, stored_tensors, take_stored

_TYPES = {"F32", "BF16", "F16"}
_FREQUENCIES = ".rotary_emb.inv_freq"
"""Old checkpoints carry the frequencies of RoPE, which follow from the configuration."""


class CausalLMOutput(NamedTuple):
    """What a model returns: logits [1, n, vocab]."""

    logits: torch.Tensor


class LlamaAttention(nn.Module):
    """The projections of an attention layer. ``sliding_window``: the length of its window, None for full attention."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.scaling = self.head_dim**-0.5
        self.sliding_window = config.windows[layer_idx]
        qwen2 = config.model_type == "qwen2"
        hidden, queries = config.hidden_size, config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        self.q_proj = _linear(hidden, queries, qwen2 or config.attention_bias)
        self.k_proj = _linear(hidden, keys, qwen2 or config.attention_bias)
        self.v_proj = _linear(hidden, keys, qwen2 or config.attention_bias)
        self.o_proj = _linear(queries, hidden, config.attention_bias)
        if config.model_type == "qwen3":
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)


class LlamaMLP(nn.Module):
    """The projections of a gated MLP."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size, config.mlp_bias)


class LlamaDecoderLayer(nn.Module):
    """The parts of a decoder layer, for ``FusedDecoderLayer``."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
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

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        # Not ``nn.Embedding(..., device="meta")``: it draws random weights, which on this device are Python's work, for
        # which torch imports its compiler.
        embeddings = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)


class LlamaForCausalLM(nn.Module):
    """A model of Llama's structure whose weights have no data yet."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaModel(config)
        self.lm_head = _linear(config.hidden_size, config.vocab_size, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """Return what transformers' models do."""
        return self.model.embed_tokens  # type: ignore[no-any-return]

    def get_output_embeddings(self) -> nn.Module:
        """Return what transformers' models do."""
        return self.lm_head

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *, logits_to_keep: torch.Tensor | int = 0, **_: Any
    ) -> CausalLMOutput:
        """Compute the logits of ids and positions [1, tokens], at the indices ``logits_to_keep``, or at all if 0."""
        hidden = self.model(input_ids, position_ids).last_hidden_state
        if isinstance(logits_to_keep, torch.Tensor):
            hidden = hidden[:, logits_to_keep]
        return CausalLMOutput(self.lm_head(hidden))


class LlamaCheckpoint:
    """The weight files of a model. Their headers have been compared with the model; ``read`` reads the weights.

    ``model``: its weights have no data before they are read. ``headers``: of each file, as safetensors has them: by the
    name of a tensor its ``dtype`` and ``shape``. ``device``: where weights go. ``quantised``: how linear layers are
    stored in eight bits, if they are. ``shard``: makes this the part of the model that one rank holds.

    Raises:
        NotReadableError: the files do not have exactly the weights of the model.
        ModelError: linear layers are not stored as ``quantised`` says.
    """

    def __init__(
        self,
        config: LlamaConfig,
        headers: Mapping[Path, Mapping[str, Any]],
        device: torch.device,
        quantised: QuantisedCheckpoint | None = None,
    ) -> None:
        self.config, self.device = config, device
        self.model = LlamaForCausalLM(config).eval().requires_grad_(False)
        self.model.model.rotary_emb.to(device)
        self._names: dict[Path, list[str]] = {}
        types: dict[str, str] = {}
        for file, header in headers.items():
            self._names[file] = [
                name
                for name in header
                if name != "__metadata__"
                and not name.endswith(_FREQUENCIES)
                and (quantised is None or quantised.is_read(name))
            ]
            types |= {name: header[name]["dtype"] for name in self._names[file]}
        if quantised is not None:
            place_stored(self.model, quantised, types)
        self._stored = stored_tensors(self.model)
        self._shards: Shards | None = None
        wanted = {name: list(weight.shape) for name, weight in self.model.state_dict().items()}
        if config.tie_word_embeddings:
            del wanted["lm_head.weight"]
        for file, names in self._names.items():
            for name in names:
                shape = headers[file][name]["shape"]
                stored = self._stored.get(name)
                if (stored.shape_of(shape) if stored else shape) != wanted.pop(name, None):
                    raise NotReadableError(f"its weight {name} has an unexpected name or shape")
                if types[name] not in (stored.types if stored else _TYPES):
                    raise NotReadableError(f"its weight {name} is of type {types[name]}")
        if wanted:
            raise NotReadableError(f"it has no weight {min(wanted)}")

    def shard(self, ranks: Ranks) -> tuple[nn.Module, Shards | None]:
        """Return the part of the model that this rank holds, whose sizes ``config`` has been changed to."""
        if not ranks.alone:
            whole, self.model = self.model, LlamaForCausalLM(self.config).eval().requires_grad_(False)
            self.model.model.rotary_emb.to(self.device)
            place_whole(self.model, whole)
            self._shards = Shards(ranks, LLAMA_PLAN, vocabulary_names(self.model))
        return self.model, self._shards

    def read(self, part: str, dtype: torch.dtype) -> None:
        """Read the weights of the module of ``model`` that is called ``part``, as ``dtype``, before it is replaced.

        A head that is tied to the embedding has to be read after it.

        Raises:
            OSError: a file cannot be read.
            RuntimeError: there is not enough memory. ValueError: stored tensors are not what they should be.
            UnknownShardError: a quantised weight cannot be divided.
        """
        if part == "lm_head" and self.config.tie_word_embeddings:
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
            return
        weights = {}
        for file, names in self._names.items():
            own = [name for name in names if name.startswith(f"{part}.")]
            if not own:
                continue
            # Opened for each part anew: while a file is open, what has been read of it counts as this process's memory.
            with safe_open(file, framework="pt") as opened:
                for name in own:
                    stored = self._stored.get(name)
                    kind = dtype if stored is None else stored.dtype
                    # A copy even where the type is the same: the original is the file, which may change or go.
                    tensor = self._read_one(opened, name).to(self.device, kind, copy=True)
                    weights[name.removeprefix(f"{part}.")] = tensor if stored is None else tensor.view(stored.shape)
        self.model.get_submodule(part).load_state_dict(weights, assign=True)
        take_stored(self.model, part, dtype, self._shards)

    def _read_one(self, opened: Any, name: str) -> torch.Tensor:
        if self._shards is None or name in self._stored:
            return opened.get_tensor(name)  # type: ignore[no-any-return]
        return self._shards.read(opened.get_slice(name), name, list(self.model.get_parameter(name).shape))


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta")

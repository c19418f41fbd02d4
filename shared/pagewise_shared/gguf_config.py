"""The configuration of a model in GGUF files, as config.json would have it.

Nothing is guessed: a key that is not known here is refused, because it may change results.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from pagewise_shared.errors import ModelError


class _Family(NamedTuple):
    """The names of a family in config.json. ``keys``: further keys that its files have, and their names in config.json;
    ``more``: keys that they may have. ``gemma``: the family has Gemma's layers, and a model with so many layers divides
    queries by another number than the size of heads; 0: other layers."""

    model_type: str
    architecture: str
    keys: Mapping[str, str] = MappingProxyType({})
    more: Collection[str] = ()
    gemma: int = 0


_USED = {"expert_used_count": "num_experts_per_tok"}
_OF_QWEN3_MOE = _USED | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
_OF_GLM = _USED | {
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_MORE_OF_GLM = "expert_gating_func", "expert_group_count", "expert_group_used_count", "nextn_predict_layers"
_MORE_OF_GEMMA = "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base_swa"
FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM"),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": _Family("qwen3_moe", "Qwen3MoeForCausalLM", _OF_QWEN3_MOE),
    "glm4moe": _Family("glm4_moe", "Glm4MoeForCausalLM", _OF_GLM, _MORE_OF_GLM),
    "gemma2": _Family("gemma2", "Gemma2ForCausalLM", more=_MORE_OF_GEMMA, gemma=46),
    "gemma3": _Family("gemma3_text", "Gemma3ForCausalLM", more=_MORE_OF_GEMMA, gemma=62),
}
"""By general.architecture. Files of Mistral have the architecture llama."""
_MIXTRAL = _Family("mixtral", "MixtralForCausalLM", _USED | {"expert_count": "num_local_experts"})
"""Files of Mixtral have the architecture llama, too, and experts."""
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""The keys that every file has, and their names in config.json."""
_MORE_KEYS = {
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.type", "tensor_data_layout", "vocab_size",
}  # fmt: skip
_SIGMOID = 2
"""The number of this function, which scores experts."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""How Llama 3.1 and later compute the factors of RoPE."""


def config_of(
    file: str,
    fields: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    factors: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the content of config.json.

    ``file``: for errors. ``fields``: of the files. ``shapes``: of their tensors. ``factors``: by how much slower each
    pair of dimensions turns in RoPE.

    Raises:
        ModelError: a key is missing, unknown, or has a value that is not known.
    """
    kind = fields.get("general.architecture")
    if (family := FAMILIES.get(str(kind))) is None:
        raise ModelError(
            f"{file}: GGUF files are served of the architectures {', '.join(FAMILIES)}, and this one is of {kind}: "
            "take the model's repository with safetensors"
        )
    own = {key.removeprefix(f"{kind}."): value for key, value in fields.items() if key.startswith(f"{kind}.")}
    if kind == "llama" and own.get("expert_count"):
        family = _MIXTRAL
    of_glm = family.model_type == "glm4_moe"
    keys = _KEYS | dict(family.keys)
    known = {*keys, *_MORE_KEYS, *family.more}
    if unknown := sorted(key for key, value in own.items() if value and key not in known):
        raise ModelError(
            f"{file} sets {kind}.{unknown[0]} = {own[unknown[0]]!r:.80}, which is not known and not served"
        )
    if missing := [key for key in keys if not isinstance(own.get(key), int | float)]:
        raise ModelError(f"{file} has no number {kind}.{missing[0]}")
    config: dict[str, Any] = {name: own[key] for key, name in keys.items()}
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file} has no tensor token_embd.weight")
    heads = config["num_attention_heads"]
    head_dim = own.get("attention.key_length") or config["hidden_size"] // max(1, heads)
    for key in ("attention.value_length", *(() if of_glm else ("rope.dimension_count",))):
        if own.get(key, head_dim) != head_dim:
            raise ModelError(f"{file} has heads of {head_dim} and {kind}.{key} = {own[key]}, which is not served")
    config |= {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "head_dim": head_dim,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "vocab_size": embedding[0],
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": _rope(file, own, head_dim, factors),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }
    _set_more(file, config, own, shapes, family)
    return config


def _set_more(
    file: str, config: dict[str, Any], own: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], family: _Family
) -> None:
    """Set the options that some families have."""
    if family.gemma:
        _set_gemma(config, own, family)
    if family.model_type == "glm4_moe":
        _set_glm(file, config, own, shapes)
    if family.model_type == "qwen3_moe":
        config["norm_topk_prob"] = True  # llama.cpp knows no other models
    if family.model_type in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = "blk.0.attn_output.bias" in shapes
    if family.model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in shapes


def _set_glm(file: str, config: dict[str, Any], own: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Set the further options of GLM-4.5, whose files count its MTP layer among the others."""
    if own.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ModelError(f"{file} chooses experts by glm4moe.expert_gating_func = {own['expert_gating_func']}, "
                         "which is not served")  # fmt: skip
    config["num_hidden_layers"] -= own.get("nextn_predict_layers", 0)
    rotated = own.get("rope.dimension_count", config["head_dim"])
    config["rope_parameters"] |= {"partial_rotary_factor": rotated / config["head_dim"]}
    config |= {
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        "n_group": own.get("expert_group_count", 1),
        "topk_group": own.get("expert_group_used_count", 1),
    }


def _set_gemma(config: dict[str, Any], own: Mapping[str, Any], family: _Family) -> None:
    """Set the further options of Gemma 2 and 3. Options that the files lack get the values of llama.cpp."""
    second, rope = family.model_type == "gemma2", config["rope_parameters"]
    heads = config["num_attention_heads"]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            config["hidden_size"] // heads if config["num_hidden_layers"] == family.gemma else config["head_dim"]
        ),
        "sliding_window": own.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": own.get("attn_logit_softcapping", 50.0 if second else None),
        "final_logit_softcapping": own.get("final_logit_softcapping", 30.0 if second else None),
    }
    if not second:
        local = {"rope_type": "default", "rope_theta": own.get("rope.freq_base_swa", 10_000.0)}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    del config["hidden_act"]


def _rope(file: str, own: Mapping[str, Any], head_dim: int, factors: Sequence[float] | None) -> dict[str, Any]:
    theta, kind = own.get("rope.freq_base", 10_000.0), own.get("rope.scaling.type", "none")
    if factors is not None:
        found = {"rope_type": "llama3", "rope_theta": theta, "factor": max(factors), **_LLAMA3}
        if kind != "none" or not _has_factors(found, head_dim, factors):
            raise ModelError(f"{file} has factors of RoPE (rope_freqs.weight) that are not those of Llama 3")
        return found
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": own.get("rope.scaling.factor")}
    if kind != "none":
        raise ModelError(f"{file} has RoPE of type {kind}, which is not served from GGUF files")
    return {"rope_type": "default", "rope_theta": theta}


def _has_factors(rope: Mapping[str, Any], head_dim: int, factors: Sequence[float]) -> bool:
    """Return whether the parameters ``rope`` lead to these factors."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    expected = []
    for pair in range(head_dim // 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return len(factors) == len(expected) and all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-4), factors, expected))

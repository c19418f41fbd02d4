"""Tiny random models of every causal-LM configuration that transformers knows."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from pagewise_executor.models.latents import register_mistral4
from safetensors.torch import load_file, save_file

from tests.model_builders import VOCAB_SIZE

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "sep_token_id": 1,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "emb_dim": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 80,
    "ffn_dim": 80,
    "ffn_hidden_size": 80,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "encoder_layers": 1,
    "decoder_layers": 4,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "max_seq_len": 512,
    "model_max_length": 512,
    "sliding_window": 9,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "attention_chunk_size": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_labels": 2,
}
"""Sizes by the name that configurations have for them."""

_KINDS = ["sliding_attention", "full_attention"]
_GEMMA4 = {"num_hidden_layers": 4, "layer_types": 2 * _KINDS, "global_head_dim": 32}

OVERRIDES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "cpmant": {"dim_head": 16, "dim_ff": 80},
    "ctrl": {"dff": 80},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 80, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    },
    "olmo_hybrid": {"linear_value_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 9},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dots3_note_vision_encoder": {"num_hidden_layers": 42, "adapter_in_dim": 64, "adapter_out_dim": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", *_KINDS],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma3_text": {"layer_types": 2 * _KINDS},
    "laguna": {"layer_types": 2 * _KINDS},
    "mellum": {"layer_types": 2 * _KINDS},
    "dots1": {"layer_types": 2 * _KINDS, "n_shared_experts": 1},
    "gemma4_text": _GEMMA4 | {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8},
    "gemma4_unified_text": _GEMMA4,
    "gemma4_vision": {"position_embedding_size": 64},
    "gemma4_unified_vision": {"mm_embed_dim": 64, "mm_posemb_size": 64},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "vocab_size_per_layer_input": 0,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
        }
    },
    "got_ocr2_vision": {"image_size": 64, "mlp_dim": 80, "output_channels": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "doge": {"sliding_window": None},
    "moshi": {"audio_vocab_size": 64, "sliding_window": 512},
    "phimoe": {"sliding_window": 512},
    "qwen2_moe": {"use_sliding_window": False},
    "phi4_multimodal_audio": {
        "num_blocks": 1,
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 32,
    },
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further settings of a family, by model_type, where the sizes above are inconsistent, or others are large."""


FEW = ("bloom", "deepseek_v3", "falcon", "gpt_oss", "granitemoe", "jamba", "llama4_text", "ministral", "olmo2", "opt")
"""Families that represent all, of which long tests cover the rest: some are served, each of the others is refused for
another reason."""
PARAMETERS = 3_000_000
"""More than a tiny model has."""


def causal_lms() -> dict[str, type[transformers.PreTrainedConfig]]:
    """The configurations that transformers has a causal LM for, by model_type."""
    register_mistral4()
    return {config.model_type: config for config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING}


def tiny_config(kind: str) -> transformers.PreTrainedConfig:
    """The configuration of a tiny model of a family."""
    config = causal_lms()[kind]
    return config(**tiny_settings(config))


def tiny_settings(config: type[transformers.PreTrainedConfig], sizes: Mapping[str, Any] = _SIZES) -> dict[str, Any]:
    """Settings that make a configuration tiny, its parts included."""
    own = OVERRIDES.get(config.model_type, {})
    names = {field.name for field in fields(config)} | set(config.attribute_map)
    found: dict[str, Any] = {name: value for name, value in sizes.items() if name in names}
    if "kv_lora_rank" in names:
        found["num_key_value_heads"] = found["num_attention_heads"]  # latents are expanded to all heads
    found |= own
    for name, part in config.sub_configs.items():
        if part is transformers.AutoConfig:
            kind = own.get(name, {}).get("model_type")
            part = transformers.CONFIG_MAPPING[kind] if kind else type(getattr(config(), name))
        if isinstance(part, type) and issubclass(part, transformers.PreTrainedConfig):
            found[name] = {"model_type": part.model_type} | tiny_settings(part) | own.get(name, {})
    return found


def build_tiny(config: transformers.PreTrainedConfig, path: Path) -> transformers.PreTrainedModel:
    """Save a random model of this configuration, with weights so large that attention decides the next token.

    Of Gemma 3n, whose image encoder is made by another library (timm), this is the text part, saved as of the whole.
    """
    if config.model_type == "gemma3n":
        model = build_tiny(config.get_text_config(), path)
        _save_as_whole(config, path)
        return model
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5.0)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model.save_pretrained(path)
    return model.eval()


def _save_as_whole(config: transformers.PreTrainedConfig, path: Path) -> None:
    """Make the checkpoint of a text part that of a multimodal model, as they are on the hub."""
    weights = load_file(path / "model.safetensors")
    whole = {f"model.language_model.{name.removeprefix('model.')}": weight for name, weight in weights.items()}
    whole["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.ones(2, 3, 3, 3)
    save_file(whole, path / "model.safetensors", {"format": "pt"})
    config.architectures = ["Gemma3nForConditionalGeneration"]
    config.save_pretrained(path)

"""Tiny random-weight models, one per family, saved where a test wants them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pagewise_executor.models.latents import register_mistral4
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

VOCAB_SIZE = 199

EXPANDS_LATENTS = hasattr(DeepseekV3Attention, "expand_kv")
"""Whether models with multi-head latent attention (MLA) can be served, for which transformers 5.13 is too old."""
GIVES_STATES = hasattr(transformers.DynamicCache, "get_conv_state")
"""Whether models with recurrent layers can be served, for which transformers before 5.21 is too old."""

_COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_DECODER = _COMMON | {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _DECODER),
    "qwen2": ("Qwen2Config", _DECODER),
    "qwen3": ("Qwen3Config", _DECODER | {"head_dim": 16}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _DECODER | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "mistral": ("MistralConfig", _DECODER | {"sliding_window": 13}),
    "gemma2": ("Gemma2Config", _DECODER | {"head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        _DECODER | {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    ),
    "gpt_oss": (
        "GptOssConfig",
        _DECODER
        | {
            "head_dim": 16,
            "sliding_window": 9,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    # Layers of two kinds with heads of two sizes, of which the last three read K and V of earlier layers.
    "gemma4": (
        "Gemma4TextConfig",
        _DECODER
        | {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 9,
            "num_hidden_layers": 8,
            "layer_types": [
                *("sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"),
                *("sliding_attention", "sliding_attention", "full_attention"),
            ],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 30.0,
        },
    ),
    # Attention chunks, layers without RoPE whose queries are scaled by position, and every other layer with experts.
    "llama4": (
        "Llama4TextConfig",
        _DECODER
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "attention_chunk_size": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "floor_scale": 7,
        },
    ),
    "phi3": ("Phi3Config", _DECODER),
    "opt": (
        "OPTConfig",
        _COMMON
        | {
            "hidden_size": 48,
            "ffn_dim": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 48,
            "max_position_embeddings": 512,
        },
    ),
    "gpt2": ("GPT2Config", _COMMON | {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "gpt_neox": (
        "GPTNeoXConfig",
        _COMMON
        | {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
        },
    ),
}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    # Fewer KV heads in layers of full attention, whose values are their keys before the rotation; and experts.
    "gemma4_moe": (
        "Gemma4TextConfig",
        _DECODER
        | {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 9,
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        _DECODER
        | {
            "head_dim": 16,
            "sliding_window": 9,
            "num_hidden_layers": 5,
            "layer_types": [
                *("sliding_attention", "full_attention", "sliding_attention"),
                *("sliding_attention", "full_attention"),
            ],
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        _DECODER
        | {
            "head_dim": 16,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "use_qk_norm": True,
        },
    ),
    "minimax_m2": ("MiniMaxM2Config", _DECODER | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo3": ("Olmo3Config", _DECODER | {"num_hidden_layers": 4, "sliding_window": 9}),
    # A norm over all heads that has the size of the hidden state, whatever the heads are.
    "olmoe": ("OlmoeConfig", _DECODER | {"num_experts": 4, "num_experts_per_tok": 2}),
    "ministral": (
        "MinistralConfig",
        _DECODER
        | {"head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4},
    ),
    "mixtral": ("MixtralConfig", _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        _DECODER
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
}
"""Families that single tests need."""

EAGER = ("gemma2", "gpt_oss")
"""Families that transformers computes exactly only by its eager attention."""

_LATENT = _DECODER | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
}
_LATENT_MIXTURE = _LATENT | {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
_GROUPED_EXPERTS = {"n_group": 4, "topk_group": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2Config", _LATENT_MIXTURE | {"q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", _LATENT_MIXTURE | _GROUPED_EXPERTS | {"rope_parameters": _YARN}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _LATENT_MIXTURE),
    "mistral4": (
        "Mistral4Config",
        _LATENT_MIXTURE
        | {
            "rope_parameters": _YARN
            | {"factor": 16.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}
        },
    ),
    "minicpm3": ("MiniCPM3Config", _LATENT),
    "youtu": ("YoutuConfig", _LATENT),
    "axk1": ("AXK1Config", _LATENT_MIXTURE | _GROUPED_EXPERTS),
}
"""Families with multi-head latent attention (MLA)."""

_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
_DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", _DECODER | _DELTA | _EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", _DECODER | _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _DECODER | _DELTA | _EXPERTS),
    "olmo_hybrid": ("OlmoHybridConfig", _DECODER | _DELTA | {"linear_num_key_heads": 4}),
    "nemotron_h": (
        "NemotronHConfig",
        _DECODER
        | {
            "head_dim": 16,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        _DECODER
        | _MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        _DECODER | _MAMBA | {"head_dim": 16, "mamba_d_ssm": 96, "tie_word_embeddings": False},
    ),
    "bamba": ("BambaConfig", _DECODER | _MAMBA | {"attn_layer_indices": [1]}),
    "lfm2": (
        "Lfm2Config",
        _DECODER | {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        _DECODER
        | {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        _LATENT
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "linear_head_dim": 12,
            "linear_num_heads": 4,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
        },
    ),
}
"""Families with recurrent layers."""

FEW_LAYERS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {},
    "gemma3": {"num_hidden_layers": 6},
}
"""Settings of families with short convolutions, Mamba-2, gated delta nets, Mamba-2 among layers without tokens, and
windows: as few layers as have all groups."""

FUSED = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose decoder layers the executor computes by layers of its own."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Families of which it does so, but for the experts, which the Triton kernels and the operations in C compute."""


def model_fixture(*families: Any, seed: int = 0, **more: object) -> Any:
    """Return a fixture, once in a module, of the path of a model: see ``build_model``. Of several ``families``, which
    may be parameters of pytest, each has its turn."""

    @pytest.fixture(scope="module", params=families if len(families) > 1 else None)
    def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        family = request.param if len(families) > 1 else families[0]
        folder = tmp_path_factory.mktemp(family)
        build_model(family, folder, seed, **more)
        return folder

    return path


def need_states() -> None:
    """Skip a test of recurrent layers where transformers is too old for them."""
    if not GIVES_STATES:
        pytest.skip(f"transformers {transformers.__version__} has no caches that give states by methods")


def build_model(family: str, path: Path, seed: int = 0, **more: object) -> transformers.PreTrainedModel:
    """Save a model of ``family`` under ``path`` (weights large enough that attention decides the next token).

    ``more``: settings of its configuration that differ from the family's. Skips the test where transformers is too old
    for the family.
    """
    name, settings = (FAMILIES | OTHERS | LATENTS | RECURRENT)[family]
    torch.manual_seed(seed)
    if family == "mistral4":
        register_mistral4()
    if family in LATENTS and not EXPANDS_LATENTS:
        pytest.skip(f"transformers {transformers.__version__} has no method that expands latents")
    if family in RECURRENT:
        need_states()
    if (made := getattr(transformers, name, None)) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no causal LM for {name}")
    config = made(**settings | more)
    if family == "gemma4_moe" and not hasattr(config, "is_heterogeneous"):
        pytest.skip(f"transformers {transformers.__version__} has no configurations of layers with their own KV heads")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("sinks", "experts.gate_up_proj_bias", "experts.down_proj_bias", "router.bias")):
                parameter.normal_()
            elif parameter.ndim >= 2:
                parameter.mul_(5.0)
            elif family == "gemma4_moe" and parameter_name.endswith("k_norm.weight"):
                parameter.uniform_(0.5, 1.5)  # keys are values times this weight
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model.save_pretrained(path)
    return model.eval()


def spoil_weights(path: Path) -> None:
    """Make the weights of a model unreadable, in a way that their sizes do not tell."""
    file = path / "model.safetensors"
    data, count = re.subn(rb'"dtype":"F32"', b'"dtype":"F99"', file.read_bytes())
    assert count, "it is in float32"
    file.write_bytes(data)

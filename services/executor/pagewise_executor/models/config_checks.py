"""Checks the values of config.json from which modules get their sizes, before a module is made.

With values that cannot be, modules of transformers fail by errors of arithmetic that name no key, or compute what
nobody means. The file is checked first, where keys have the names that its author knows, and then the configuration
that transformers makes of it, which has all defaults.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pagewise_shared.errors import ModelError

MOST_LAYERS = 10_000
"""A model of more layers is refused: to build it would take hours."""
_LARGEST = 2**31 - 1
_POSITIVE = "and not a positive whole number"
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("num_key_value_heads", "num_global_key_value_heads", "head_dim", "global_head_dim", "intermediate_size"),
    *("moe_intermediate_size", "sliding_window", "attention_chunk_size", "query_pre_attn_scalar"),
    *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_group", "topk_group"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv", "mamba_n_groups"),
    *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel", "n_groups", "conv_L_cache"),
)
"""Keys whose value is a positive whole number, or a list of one for each layer, or none."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""The keys for the experts of a layer, and for those that compute a token."""
_DENSE_WITHOUT = (
    *("doge", "flint", "gemma4_text", "granitemoehybrid", "jamba", "nemotron_h"),
    *("qwen2_moe", "qwen3_moe", "qwen3_next"),
)
"""Families some or all of whose layers can have no experts, which write 0 experts for none."""
_MULTIPLES = (
    ("num_attention_heads", "num_key_value_heads"),
    ("num_attention_heads", "num_global_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("mamba_n_heads", "mamba_n_groups"),
    ("mamba_num_heads", "n_groups"),
    ("n_routed_experts", "n_group"),
)
"""Pairs of keys of which the first value is a multiple of the second."""
_OBJECTS = ("text_config", "quantization_config", "compression_config", "rope_parameters", "rope_scaling", "auto_map")

Get = Callable[[str], Any]
"""Returns the value of a key; None: there is none."""


def check_file(model: str, path: Path) -> None:
    """Check config.json in the folder ``path``, and the part of it for a language model.

    Raises:
        ModelError: a value is unusable; the text names the key and the value.
    """
    try:
        found = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        return  # the reader of the whole file reports the error
    why = _of_kinds(found)
    for part in (found, found.get("text_config") or {}):
        why = why or _of_rope(part) or _of_dtype(part.get("dtype") or part.get("torch_dtype")) or _of_sizes(part.get)
    if why:
        raise ModelError(f"{model} (model_type {found.get('model_type')}): config.json is unusable: {why}")


def unusable_size(text: Any) -> str:
    """Return what is wrong with the sizes in the configuration of a language model, as a part of a sentence; empty:
    nothing."""
    # In a heterogeneous configuration some settings of a layer differ from those of the other layers.
    parts = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    return next((why for part in parts if (why := _of_sizes(partial(_attribute, part)))), "")


def _attribute(part: Any, key: str) -> Any:
    return getattr(part, key, None)


def _of_kinds(settings: Mapping[str, Any]) -> str:
    """Return which key has no object or list, as a part of a sentence; empty: each has. So do the functions below."""
    for key in (*_OBJECTS, "architectures"):
        kind, name = (list, "a list") if key == "architectures" else (dict, "an object")
        if not isinstance(value := settings.get(key), kind | None):
            return f"{key} is {value!r:.100}, and not {name}"
    return ""


def _of_sizes(get: Get) -> str:
    for key in _SIZES:
        if key == "sliding_window" and get("use_sliding_window") is False:
            continue  # Qwen2-MoE writes 0 for none
        value = get(key)
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and (type(one) is not int or one < 1):
                return f"{key} is {value!r:.100}, {_POSITIVE}"
            most = MOST_LAYERS if key == "num_hidden_layers" else _LARGEST
            if one is not None and one > most:
                return f"{key} is {value!r:.100}, and at most {most:,} is served"
    for key, other in _MULTIPLES:
        many, few = get(key), get(other)
        if isinstance(many, int) and isinstance(few, int) and many % few:
            return f"{key} is {many}, and no multiple of {other}, which is {few}"
    pairs = [*((few, many) for few in _CHOSEN for many in _EXPERTS), ("topk_group", "n_group")]
    for key, other in pairs:
        few, many = get(key), get(other)
        if isinstance(few, int) and isinstance(many, int) and many and not 1 <= few <= many:
            return f"{key} is {few}, and not from 1 to {other}, which is {many}"
    for key in _EXPERTS:
        if get(key) == 0 and get("model_type") not in _DENSE_WITHOUT:
            return f"{key} is 0, {_POSITIVE}"
    # Whether each layer has RoPE; an empty list means the default. Layers behind the end of a longer one do not exist.
    rotated, layers = get("no_rope_layers"), get("num_hidden_layers")
    if isinstance(rotated, list) and isinstance(layers, int) and 0 < len(rotated) < layers:
        return f"no_rope_layers is {rotated!r:.100}, with fewer entries than num_hidden_layers, which is {layers}"
    return ""


def _of_rope(settings: Mapping[str, Any]) -> str:
    parts = [{"rope_theta": settings.get("rope_theta")}]
    for found in (settings.get("rope_parameters") or {}, settings.get("rope_scaling") or {}):
        parts += [found, *(part for part in found.values() if isinstance(part, dict))]  # one for each kind of layers
    for key in ("rope_theta", "factor"):
        for value in (part.get(key) for part in parts):
            if value is not None and (type(value) not in (int, float) or value <= 0):
                return f"{key} of RoPE is {value!r:.100}, and not a positive number"
    return ""


def _of_dtype(name: Any) -> str:
    if name is None or isinstance(name, dict) or name == "auto":
        return ""
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return ""
    return f"dtype is {name!r:.100}, and no type of floating-point numbers"

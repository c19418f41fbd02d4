"""Models whose keys are made of their values (Gemma 4 26B and 31B), which ``attention.stored_once`` explains."""

from typing import Any

from torch import nn

from pagewise_executor.attention.stored_once import StoredOnce


def store_once(model: nn.Module) -> None:
    """Let the attention modules that compute their keys from their values keep both as one vector.

    Modules whose K and V other layers read keep both, and so do modules that rotate whole keys.
    """
    for module in list(model.modules()):
        attention: Any = module
        if not getattr(attention, "use_alternative_attention", False):
            continue
        rope = attention.config.rope_parameters[attention.layer_type]
        pairs = int(rope.get("partial_rotary_factor", 1.0) * attention.head_dim // 2)
        shares = attention.is_kv_shared_layer or attention.store_full_length_kv
        if rope["rope_type"] == "proportional" and 2 * pairs < attention.head_dim and not shares:
            attention.stored_once = StoredOnce(attention.k_norm.weight, pairs)

"""The attention layers of a model, and the shape of each one's attention."""

from typing import TYPE_CHECKING, Any

import torch
from pagewise_shared.errors import ModelError

from pagewise_executor.attention.backend import AttentionShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pagewise_executor.models.llama_config import LlamaConfig


def attention_modules(
    name: str, model: torch.nn.Module, text: "LlamaConfig | PretrainedConfig"
) -> list[torch.nn.Module]:
    """Return the attention modules of a model by layer.

    Raises:
        ModelError: paged attention cannot replace its attention layers.
    """
    found: dict[int, torch.nn.Module] = {
        int(module.layer_idx): module  # type: ignore[arg-type]
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and type(module).__name__.endswith("Attention")
    }
    if sorted(found) != list(range(text.num_hidden_layers)):
        raise ModelError(f"{name} ({type(model).__name__}) does not expose its attention layers: not supported")
    if any(getattr(module, "sinks", None) is not None for module in found.values()):
        raise ModelError(f"{name} uses attention sinks, which paged attention does not support")
    return [found[layer] for layer in sorted(found)]


def attention_shape(module: Any, text: "LlamaConfig | PretrainedConfig", dtype: torch.dtype) -> AttentionShape:
    """Return the shape of an attention module. ``text``: the configuration of the language model."""
    heads = int(text.num_attention_heads)
    head_dim = getattr(module, "head_dim", None) or getattr(text, "head_dim", None) or text.hidden_size // heads
    return AttentionShape(
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        dtype=dtype,
        scale=float(getattr(module, "scaling", None) or head_dim**-0.5),
        window=_window(module, text) or None,  # Qwen2-MoE writes 0 for none
        softcap=getattr(module, "attn_logit_softcapping", None),
    )


def _window(module: Any, text: Any) -> int | None:
    """Return the window of a module, from its attribute, or from the configuration by the type of the layer."""
    kinds = getattr(text, "layer_types", None)
    slides = getattr(module, "is_sliding", True)
    if hasattr(module, "sliding_window"):
        return module.sliding_window if slides else None
    if kinds and kinds[module.layer_idx] != "sliding_attention":
        return None
    return getattr(text, "sliding_window", None) if slides else None

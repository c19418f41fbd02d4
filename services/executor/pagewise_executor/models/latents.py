"""Models with multi-head latent attention (MLA), which ``attention.absorbed`` explains.

Their attention modules, code of transformers, make latents into keys and values in ``expand_kv``, and pass the result
to the attention function. Only this method is replaced. How families make, rotate and scale queries stays theirs.
"""

import re
from typing import Any

import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from torch import nn

from pagewise_executor.attention.absorbed import Absorbed

_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def register_mistral4() -> None:
    """Register the language model of Mistral 4, which transformers builds for its multimodal model only."""
    from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def keeps_latents(module: nn.Module) -> bool:
    """Return whether an attention module computes latents (MLA), by its structure."""
    return all(isinstance(getattr(module, name, None), int) for name in _SIZES)


def latent_sizes(module: Any) -> tuple[int, int]:
    """Return the sizes of the rotated part of a key and of a latent in an attention module that computes latents."""
    return int(module.qk_rope_head_dim), int(module.kv_lora_rank)


def check_latents(config: ExecutorConfig, text: Any) -> None:
    """Check that the options are for latents, if the language model with the configuration ``text`` has any.

    Raises:
        ModelError: they are not.
    """
    if getattr(text, "kv_lora_rank", None) is not None and config.kv_dtype != "auto":
        raise ModelError(
            f"--kv-dtype {config.kv_dtype}: {config.model} (model_type {text.model_type}) has multi-head latent "
            "attention (MLA), whose latents are kept in the type of the model only"
        )


def unfit_latents(model: nn.Module) -> str:
    """Return why latents of a model cannot be kept, as a part of a sentence; empty: they can, or it has none."""
    return next((why for module in model.modules() if keeps_latents(module) and (why := _unfit(module))), "")


def _unfit(module: Any) -> str:
    """Return why latents of an attention module cannot be kept, as a part of a sentence; empty if they can."""
    if getattr(module, "indexer", None) is not None:
        return "of which an indexer chooses the tokens that a query sees (DSA): sparse attention is not served"
    if getattr(module, "sliding_window", None):
        return "with a sliding window, which is not served together with latents"
    if not callable(getattr(module, "expand_kv", None)) or type(getattr(module, "kv_b_proj", None)) is not nn.Linear:
        from transformers import __version__

        return f"without a method expand_kv that expands latents in transformers {__version__}: take a later version"
    return ""


def latent_plan(model: nn.Module) -> dict[str, str]:
    """Return how the attention of a model with latents is divided among ranks: by query heads.

    Every rank computes and keeps the latents of all tokens. Empty: the model has no latents.
    """
    styles = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
    return {
        f"{re.sub(r'[.][0-9]+(?=[.]|$)', '.*', name)}.{projection}": style
        for name, module in model.named_modules()
        if keeps_latents(module)
        for projection, style in styles.items()
        if getattr(module, projection, None) is not None
    }


def absorb_latents(model: nn.Module) -> None:
    """Let the attention modules of a model that compute latents attend to them.

    ``Absorbed`` replaces their ``kv_b_proj``, as ``absorbed``, where ``paged_attention`` finds it. It multiplies
    queries and results instead of latents, which no quantised product does, so a quantised weight is dequantised.
    """
    for module in list(model.modules()):
        if keeps_latents(module):
            attention: Any = module
            weight, quantised = attention.kv_b_proj.weight, getattr(attention.kv_b_proj, "quantised", None)
            if quantised is not None:
                weight = quantised.dequantised().to(next(attention.parameters()).dtype)
            attention.absorbed = Absorbed(
                weight,
                plain=attention.qk_nope_head_dim,
                rotated=attention.qk_rope_head_dim,
                value=attention.v_head_dim,
            )
            del attention.kv_b_proj
            attention.expand_kv = _stored


def _stored(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key and the value of tokens as the pool keeps them, instead of the keys and values of every head.

    latent [1, 1, tokens, latent], rotated [1, 1, tokens, rotated]. The value is the end of the key. The rotated part
    comes first, where other models have it too: so segments are moved like theirs.
    """
    key = torch.cat([rotated, latent], dim=-1)
    return key, key[..., rotated.shape[-1] :]

"""Models with multi-head latent attention (MLA), which ``attention.absorbed`` explains.

Their attention modules, code of transformers, make latents into keys and values in ``expand_kv``, and pass the result
to the attention function. Only this method is replaced. How families make, rotate and scale queries stays theirs.
"""

from typing import TYPE_CHECKING, Any

import torch
from pagewise_shared.errors import ModelError
from torch import nn

from pagewise_executor.attention.absorbed import Absorbed

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def keeps_latents(module: nn.Module) -> bool:
    """Return whether an attention module computes latents (MLA), by its structure."""
    return all(isinstance(getattr(module, name, None), int) for name in _SIZES)


def latent_sizes(module: Any) -> tuple[int, int]:
    """Return the sizes of the rotated part of a key and of a latent in an attention module that computes latents."""
    return int(module.qk_rope_head_dim), int(module.kv_lora_rank)


def check_latents(name: str, config: "PretrainedConfig", text: Any, *, trust_remote_code: bool) -> None:
    """Check the attention of a model whose configuration has latents, before its weights are read.

    ``config``, ``text``: of the model, and of its language model.

    Raises:
        ModelError: it computes something else beside them, or this version of transformers has no ``expand_kv``.
    """
    if getattr(text, "kv_lora_rank", None) is None:
        return
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, trust_remote_code=trust_remote_code
        )
    for module in model.modules():
        if keeps_latents(module) and (why := _unfit(module)):
            raise ModelError(f"{name} ({type(model).__name__}) has multi-head latent attention (MLA) {why}")


def _unfit(module: Any) -> str:
    """Return why latents of an attention module cannot be kept, as a part of a sentence; empty if they can."""
    if getattr(module, "indexer", None) is not None:
        return "of which an indexer chooses the tokens that a query sees (DSA): sparse attention is not served"
    if getattr(module, "sliding_window", None):
        return "with a sliding window, which is not served together with latents"
    if not callable(getattr(module, "expand_kv", None)) or type(getattr(module, "kv_b_proj", None)) is not nn.Linear:
        from transformers import __version__

        return (
            f"without a method expand_kv that expands latents in transformers {__version__}: a later version may have it"
        )
    return ""


def absorb_latents(model: nn.Module) -> None:
    """Let the attention modules of a model that compute latents attend to them.

    ``Absorbed`` replaces their ``kv_b_proj``, as ``absorbed``, where ``paged_attention`` finds it.
    """
    for module in list(model.modules()):
        if keeps_latents(module):
            attention: Any = module
            attention.absorbed = Absorbed(
                attention.kv_b_proj.weight,
                plain=attention.qk_nope_head_dim,
                rotated=attention.qk_rope_head_dim,
                value=attention.v_head_dim,
            )
            del attention.kv_b_proj
            attention.expand_kv = _stored


def _stored(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key and the value of tokens as the pool keeps them, instead of those of every head.

    latent [1, 1, tokens, latent], rotated [1, 1, tokens, rotated]. The value is the end of the key. The rotated part
    comes first, where other models have it too: so segments are moved like theirs.
    """
    key = torch.cat([rotated, latent], dim=-1)
    return key, key[..., rotated.shape[-1] :]

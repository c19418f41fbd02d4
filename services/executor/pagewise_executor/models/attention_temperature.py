"""Attention temperatures that depend on positions (Llama 4, after arXiv 2501.19399), made independent of the batch.

transformers takes the place of a token in its batch for the position of the token, and adds the tokens that are cached
already. The flat batch of a step holds tokens of many sequences. So the executor scales the queries itself: the rotary
embedding of the model gets the positions of each step, from which the scales of all layers are computed once.
"""

from typing import Any

import torch
from pagewise_shared.errors import ModelError
from torch import nn


class AttentionTemperature:
    """Scales queries by 1 + ``strength`` · log(1 + ⌊(position + 1) / ``floor``⌋)."""

    def __init__(self, floor: float, strength: float) -> None:
        self._floor, self._strength = floor, strength
        self._scales = torch.ones(1, 1, 1)

    def read_positions(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: object) -> None:
        """Compute the scales of a step: a hook of a rotary embedding, which is called with positions [1, tokens]."""
        steps = torch.floor((args[1][0].float() + 1.0) / self._floor)
        self._scales = (torch.log1p(steps) * self._strength + 1.0)[:, None, None]

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        """Return the queries [tokens, heads, head_dim] of a step, scaled."""
        return (q * self._scales).to(q.dtype)


def fix_temperature(name: str, model: nn.Module) -> None:
    """Let the executor scale the queries of the layers of ``model`` that do so by position.

    Raises:
        ModelError: the model has no rotary embedding from which the positions are known.
    """
    scaled: list[Any] = [
        module
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False)
    ]
    if not scaled:
        return
    rotary = [module for key, module in model.named_modules() if key.endswith("rotary_emb")]
    if len(rotary) != 1:
        raise ModelError(f"{name} scales queries by position in a way that is not known here")
    temperature = AttentionTemperature(float(scaled[0].floor_scale), float(scaled[0].attn_scale))
    rotary[0].register_forward_hook(temperature.read_positions)
    for module in scaled:
        module.attn_temperature_tuning, module.scale_queries = False, temperature

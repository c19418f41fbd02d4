"""Mixtures of experts by Triton kernels, in place of modules of transformers: router and experts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pagewise_executor.models.fused import FusedDecoderLayer
from pagewise_executor.models.skinny_linear import FEW_ROWS


class GroupedRouter(nn.Module):
    """Chooses ``top_k`` experts of each token, by ``weight`` [experts, hidden].

    ``normalise``: the weights of the experts of a token sum up to 1. ``dtype``: of these weights.
    """

    def __init__(self, weight: torch.Tensor, top_k: int, normalise: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.top_k, self.normalise, self.dtype = top_k, normalise, dtype

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [tokens, experts], weights [tokens, k], and experts int32 [tokens, k] of x [tokens, hidden]."""
        from pagewise_kernels.experts import choose_experts
        from pagewise_kernels.skinny_linear import skinny_linear

        logits = skinny_linear(x, self.weight) if len(x) <= FEW_ROWS else F.linear(x, self.weight)
        return logits, *choose_experts(logits, self.top_k, normalise=self.normalise, dtype=self.dtype)


class GroupedExperts(nn.Module):
    """Experts with the weights ``gate_up`` [experts, 2 · inner, hidden] and ``down`` [experts, hidden, inner]."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(weight, requires_grad=False) for weight in (gate_up, down))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums [tokens, hidden] of the outputs of the ``chosen`` experts [tokens, k] for x."""
        from pagewise_kernels.experts import sum_of_experts

        return sum_of_experts(x, self.gate_up_proj, self.down_proj, chosen, weights)


def make_grouped(model: nn.Module, within: str) -> None:
    """Give the mixtures of fused decoder layers within a part of a model these modules, with their weights."""
    for layer in model.get_submodule(within).modules():
        if isinstance(layer, FusedDecoderLayer) and layer.mlp is not None:
            block: Any = layer.mlp
            # Mixtral has no setting for it: it always normalises, and keeps these weights in float32.
            always = not hasattr(block.gate, "norm_topk_prob")
            dtype = torch.float32 if always else block.gate.weight.dtype
            normalise = always or bool(block.gate.norm_topk_prob)
            block.gate = GroupedRouter(block.gate.weight.detach(), int(block.gate.top_k), normalise, dtype)
            block.experts = GroupedExperts(block.experts.gate_up_proj.detach(), block.experts.down_proj.detach())


def sum_one_by_one(
    compute: Callable[[int, torch.Tensor], torch.Tensor],
    count: int,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sums [tokens, hidden] of the outputs of ``count`` experts, computed one after the other.

    ``compute``: maps the number of an expert and the rows of its tokens to its outputs. On a GPU this waits for the
    device, because the host has to know how many tokens each expert has.
    """
    result = torch.zeros_like(x)
    order = chosen.flatten().argsort(stable=True)
    sizes = chosen.flatten().bincount(minlength=count).tolist()
    for expert, chosen_at in enumerate(torch.split(order, sizes)):
        if len(chosen_at):
            rows = chosen_at // chosen.shape[1]
            made = compute(expert, x[rows]) * weights.flatten()[chosen_at, None]
            result.index_add_(0, rows, made.to(x.dtype))
    return result

"""Routers and experts of mixtures by the CPU operations, in place of modules of transformers.

A module is replaced if the operations in C compute the same results for sample tokens. So families need no list, and
other modules stay as they are.
"""

import functools
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from pagewise_kernels.cpu.experts import Activation, PackedExperts, Router


class CpuRouter(nn.Module):
    """A router in float32."""

    def __init__(self, packed: "Router") -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [tokens, experts], weights [tokens, k] and experts [tokens, k] of x [.., hidden]."""
        return self.packed.choose(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))


class CpuExperts(nn.Module):
    """Experts in float32."""

    def __init__(self, packed: "PackedExperts") -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums [tokens, hidden] of the outputs of the ``chosen`` experts [tokens, k] for x."""
        return self.packed.sums(x, chosen, weights)


class CpuMixture(nn.Module):
    """A mixture of experts in float32 that is a router and its experts, and nothing else."""

    def __init__(self, gate: CpuRouter, experts: CpuExperts) -> None:
        from pagewise_kernels.cpu.experts import Mixture

        super().__init__()
        self.gate, self.experts, self.mixture = gate, experts, Mixture(gate.packed, experts.packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., hidden] to [.., hidden]."""
        return self.mixture.sums(x.reshape(-1, x.shape[-1])).view(x.shape)


@torch.no_grad()
def pack_mixtures(model: nn.Module, within: str, alone: bool = True) -> None:
    """Replace the routers and experts in float32 within a part of a model that the operations in C compute.

    ``alone``: other ranks have no part of the experts, so that nothing has to be done between them and their block.
    """
    from pagewise_kernels.cpu.library import has_fast_products

    if not has_fast_products():
        return
    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        if (router := _router(module)) is not None:
            model.set_submodule(name, CpuRouter(router))
        elif (experts := _experts(module)) is not None:
            model.set_submodule(name, CpuExperts(experts))
    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        if alone and (mixture := _mixture(module)) is not None:
            model.set_submodule(name, mixture)


def _router(module: Any) -> "Router | None":
    """Return a router that chooses as a module of transformers does; None: there is none."""
    from pagewise_kernels.cpu.experts import Choice, Router

    weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
    if not _is_float32(weight, 2) or not isinstance(top_k, int) or len(signature(module.forward).parameters) != 1:
        return None
    assert isinstance(weight, torch.Tensor)
    bias, scale = getattr(module, "bias", None), float(getattr(module, "routed_scaling_factor", 1.0))
    groups, correction = (1, 1), getattr(module, "e_score_correction_bias", None)
    if correction is not None:
        groups = getattr(module, "num_group", None) or 1, getattr(module, "topk_group", None) or 1
    x = _some_tokens(16, weight.shape[1])
    largest = F.linear(x, weight).abs().amax(dim=1, keepdim=True).clamp(min=1e-6)
    # Logits of up to 2 and up to 10: a limit of logits would show, and sigmoids are not all 1.
    x *= torch.tensor([2.0, 10.0]).repeat(8)[:, None] / largest
    expected = module(x)
    if not isinstance(expected, tuple) or len(expected) != 3:
        return None
    for normalise in (True, False):
        choice = Choice(top_k, normalise, scale, correction, *groups)
        if choice.fits(len(weight)):
            router = Router(weight, bias, choice)
            if _choose_the_same(expected, router.choose(x)):
                return router
    return None


def _choose_the_same(expected: tuple[Any, ...], found: tuple[torch.Tensor, ...]) -> bool:
    """Return whether two results of routers are the same but for the order of a token's experts."""
    (_, weights, chosen), (_, found_weights, found_chosen) = expected, found
    if not isinstance(chosen, torch.Tensor) or chosen.shape != found_chosen.shape or weights.dtype != torch.float32:
        return False
    order, found_order = chosen.argsort(dim=1), found_chosen.argsort(dim=1)
    same = torch.equal(chosen.gather(1, order).long(), found_chosen.gather(1, found_order))
    return same and torch.allclose(weights.gather(1, order), found_weights.gather(1, found_order), rtol=3e-5, atol=1e-7)


def _experts(module: Any) -> "PackedExperts | None":
    """Return experts that compute as a module of transformers does; None: there are none."""
    from pagewise_kernels.cpu.experts import PackedExperts

    if (found := find_experts(module)) is None:
        return None
    weights, activation = found
    return functools.partial(PackedExperts, activation=activation)(*weights)


def is_experts(module: Any) -> bool:
    """Return whether a module has weights in float32 as experts of transformers have them."""
    return all(_is_float32(getattr(module, name, None), 3) for name in ("gate_up_proj", "down_proj"))


def find_experts(module: Any) -> "tuple[list[torch.Tensor], Activation] | None":
    """Return the weights in float32 of gate and up and of down, then biases if there are any, and the activation, with
    which ``PackedExperts`` compute as a module of transformers does; None: there are none.
    """
    from pagewise_kernels.cpu.experts import SILU, Activation, PackedExperts

    if not is_experts(module):
        return None
    weights: list[torch.Tensor] = [module.gate_up_proj.detach(), module.down_proj.detach()]
    if getattr(module, "has_bias", False):
        weights += [module.gate_up_proj_bias.detach(), module.down_proj_bias.detach()]
    if getattr(module, "is_transposed", False):
        weights[:2] = (weight.transpose(1, 2) for weight in weights[:2])
    if not getattr(module, "is_concatenated", True):  # gate and up of a number follow each other
        weights[::2] = (torch.cat([weight[:, ::2], weight[:, 1::2]], dim=1) for weight in weights[::2])
    if weights[0].shape != (len(weights[1]), 2 * weights[1].shape[2], weights[1].shape[1]):
        return None
    activation = SILU
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        activation = Activation(float(module.alpha), 1.0, float(module.limit))
    first = functools.partial(PackedExperts, activation=activation)(*(weight[:1] for weight in weights))
    # Gate and up of up to 3 and up to 100: other functions show in small ones, and limits in large ones.
    x = _some_tokens(2, first.hidden)
    largest = F.linear(x, weights[0][0]).abs().amax(dim=1, keepdim=True).clamp(min=1e-6)
    x *= torch.tensor([[3.0], [100.0]]) / largest
    given = x, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    expected = module(*given)
    errors = (first.sums(*given) - expected).abs().amax(dim=1)
    return (weights, activation) if (errors <= 1e-4 * expected.abs().amax(dim=1)).all() else None


def _mixture(module: Any) -> CpuMixture | None:
    """Return the router and the experts of a module that has nothing else in one; None: it is none."""
    match dict(module.named_children()):
        case {"gate": CpuRouter() as router, "experts": CpuExperts() as experts, **others} if not others:
            mixture = CpuMixture(router, experts)
            x = _some_tokens(3, experts.packed.hidden)[None]
            expected = module(x)
            same = isinstance(expected, torch.Tensor) and torch.allclose(expected, mixture(x), rtol=1e-5, atol=1e-6)
            return mixture if same else None
    return None


def _some_tokens(count: int, size: int) -> torch.Tensor:
    """Return tokens [count, size], which are different, and the same each time."""
    return torch.cos(torch.arange(count * size, dtype=torch.float64).square()).float().view(count, size)


def _is_float32(weight: object, dimensions: int) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dtype == torch.float32 and weight.dim() == dimensions

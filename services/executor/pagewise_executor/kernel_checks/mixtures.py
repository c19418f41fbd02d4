"""The checks of the kernels that compute mixtures of experts."""

from collections.abc import Iterator

import torch
from pagewise_kernels.experts import sum_of_experts
from torch import nn

from pagewise_executor.kernel_checks.compared import TOLERANCE, Compared
from pagewise_executor.kernel_checks.use import KernelUse
from pagewise_executor.models.mxfp4_experts import sum_of_dequantised
from pagewise_executor.models.operations import Operations


def experts(use: KernelUse) -> Iterator[Compared]:
    """Each tile of pairs, of which the number of tokens for each expert decides, as the model's weights take them."""
    assert use.mixture is not None
    router, module = use.mixture
    gate_up, down = module.gate_up_proj, module.down_proj
    for rows in (1, *(per_expert * len(down) // router.top_k + 1 for per_expert in (16, 64))):
        x = use.draw(rows, use.hidden_size) / use.hidden_size**0.5
        logits, weights, chosen = router(x)
        shares, expected = nn.functional.softmax(logits.float(), dim=-1), torch.zeros_like(x, dtype=torch.float32)
        largest = shares.topk(router.top_k).values
        wanted = largest / largest.sum(dim=-1, keepdim=True) if router.normalise else largest
        yield Compared(weights, wanted, TOLERANCE[use.dtype])
        for expert in range(len(down)):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            made = Operations().gated(nn.Identity(), nn.functional.linear(x[token], gate_up[expert]))
            part = nn.functional.linear(made, down[expert]) * weights[token, slot, None]
            expected.index_add_(0, token, part.float())
        found = sum_of_experts(x, gate_up, down, chosen, weights)  # and not the module, which sums over ranks
        yield Compared(found, expected, TOLERANCE[use.dtype])


def mxfp4_experts(use: KernelUse) -> Iterator[Compared]:
    """Each tile of pairs."""
    assert use.mxfp4 is not None
    module, top_k = use.mxfp4
    count = len(module.down.bias)
    for rows in (1, *(per_expert * count // top_k + 1 for per_expert in (16, 64))):
        x = use.draw(rows, module.gate_up.ins)
        weights, chosen = use.draw(rows, count, seed=1).softmax(dim=-1).topk(top_k)
        expected = sum_of_dequantised(module.gate_up, module.down, module.limit, module.alpha, x, chosen, weights)
        yield Compared(module(x, chosen, weights), expected, TOLERANCE[use.dtype])

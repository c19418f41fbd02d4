"""The experts of a layer of Qwen3-30B-A3B in a decode step, by the grouped products and as transformers computes them;
bars are the predicted times."""

from collections.abc import Iterator
from itertools import cycle

import torch
from pagewise_kernels.experts import choose_experts, sum_of_experts
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.kernels.bench import Bench

_PREDICTED = {1: 29.6, 64: 296.2}
"""µs by the number of tokens, with the choice of experts, but without the router's product."""
_DRAWS = 8
"""Choices of experts that take turns, so that a token's experts are not in a cache."""


def experts(bench: Bench) -> None:
    """Measure times. Only the weights of the chosen experts count as bytes."""
    hidden, inner, count, top_k = (48, 32, 8, 2) if bench.smoke else (2048, 768, 128, 8)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=hidden, moe_intermediate_size=inner, num_hidden_layers=1, num_experts=count,
        num_experts_per_tok=top_k, norm_topk_prob=True,
    )  # fmt: skip
    with torch.device(bench.device):
        layer = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).model.layers[0]  # type: ignore[no-untyped-call]
    theirs = layer.mlp.experts.requires_grad_(False)
    gate_up, down = (weight.normal_(std=hidden**-0.5) for weight in (theirs.gate_up_proj, theirs.down_proj))
    for tokens, micros in _PREDICTED.items():
        name = f"experts {tokens}"
        if not bench.wants(name) or (bench.smoke and tokens > 1):
            continue
        x = torch.randn(tokens, hidden, device=bench.device).bfloat16()
        draws = [torch.randn(tokens, count, device=bench.device).bfloat16() for _ in range(_DRAWS)]
        chosen = [len({*choose_experts(logits, top_k, normalise=True)[1].flatten().tolist()}) for logits in draws]
        turns = cycle(draws)

        def ours(x: torch.Tensor = x, turns: Iterator[torch.Tensor] = turns) -> object:
            weights, ids = choose_experts(next(turns), top_k, normalise=True)
            return sum_of_experts(x, gate_up, down, ids, weights)

        def grouped_mm(x: torch.Tensor = x, turns: Iterator[torch.Tensor] = turns) -> object:
            shares, ids = torch.softmax(next(turns), dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
            return theirs(x, ids, (shares / shares.sum(dim=-1, keepdim=True)).bfloat16())

        size = sum(chosen) // len(chosen) * 3 * hidden * inner * 2
        bench.bytes(name, "pagewise", ours, size, f"<= {micros} µs")
        bench.bytes(name, "transformers", grouped_mm, size, "")

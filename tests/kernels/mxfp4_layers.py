"""Random experts in MXFP4, and the oracle in float64 that computes them."""

from typing import Any

import torch
from pagewise_kernels.mxfp4 import Mxfp4Weights

LIMIT, ALPHA = 1.5, 1.702
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""Errors of results in each type, relative to the largest of all."""
# Tokens, experts, experts of a token, hidden, inner: of each tile of pairs, and of few rows, a block of them and more;
# inputs that are cut into 128 and that are not, outputs of whole tiles and of cut ones.
SHAPES: list[Any] = [
    (1, 4, 2, 64, 32),
    (0, 4, 2, 64, 32),
    (7, 6, 3, 96, 160),
    (20, 18, 4, 128, 64),
    (70, 4, 2, 160, 128),
    (210, 3, 2, 64, 96),
]


def drawn(experts: int, outs: int, ins: int, device: torch.device) -> Mxfp4Weights:
    blocks = torch.randint(256, (experts, outs, ins // 32, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(120, 126, (experts, outs, ins // 32), dtype=torch.uint8, device=device)
    return Mxfp4Weights(blocks, scales, torch.randn(experts, outs, device=device))


def value(code: int) -> float:
    """Of four bits: a sign, two bits of exponent with a bias of 1, a bit of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if code >> 3 else size


def dequantised(weights: Mxfp4Weights) -> torch.Tensor:
    """[experts, outs, ins] in float64."""
    values = torch.tensor([value(code) for code in range(16)], dtype=torch.float64, device=weights.blocks.device)
    codes = torch.stack([weights.blocks & 15, weights.blocks >> 4], dim=-1).flatten(-2)
    return (values[codes.long()] * 2.0 ** (weights.scales.double() - 127)[..., None]).flatten(-2)


def drawn_layer(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Mxfp4Weights, Mxfp4Weights, torch.Tensor, torch.Tensor]:
    """x, gate and up, down, chosen and weights."""
    tokens, experts, top_k, hidden, inner = shape
    x = torch.randn(tokens, hidden + 8, device=device).to(dtype)[:, :hidden]
    chosen = torch.rand(tokens, experts, device=device).argsort(dim=1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k, device=device).to(dtype)
    return x, drawn(experts, 2 * inner, hidden, device), drawn(experts, hidden, inner, device), chosen, weights


def oracle(
    x: torch.Tensor, gate_up: Mxfp4Weights, down: Mxfp4Weights, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    gate_ups, downs = dequantised(gate_up), dequantised(down)
    for expert in range(len(downs)):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        both = x[token].double() @ gate_ups[expert].T + gate_up.bias[expert].double()
        gate, up = both[:, ::2].clamp(max=LIMIT), both[:, 1::2].clamp(-LIMIT, LIMIT)
        made = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
        part = made @ downs[expert].T + down.bias[expert].double()
        result.index_add_(0, token, part * weights[token, slot, None].double())
    return result


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max()) if len(found) else 0.0

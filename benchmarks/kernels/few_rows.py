"""The products of a decode step in the shape of Llama 3 8B, in 16 bits and in FP8, by the kernel for few rows and by
the library; bars are the predicted times of the kernel."""

from collections.abc import Callable
from itertools import cycle

import torch
from pagewise_executor.models.quantised_linear import ScaledMMLinear
from pagewise_executor.models.quantised_weight import FP8, Inputs, QuantisedWeight, quantise
from pagewise_kernels.quantised import quantise_rows
from pagewise_kernels.silu_mul import silu_mul
from pagewise_kernels.skinny_linear import MOST_ROUNDED_ROWS, skinny_linear

from benchmarks.kernels.bench import Bench

_SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate_up": (4096, 28_672), "down": (14_336, 4096)}
_PREDICTED = {
    ("bf16", 1): (11.7, 9.0, 54.6, 30.0),
    ("bf16", 64): (13, 9, 56, 32),
    ("bf16", 256): (27.5, 16, 93, 48),
    ("fp8", 1): (5.9, 5.8, 27.3, 17.4),
    ("fp8", 64): (8, 6, 28, 18),
    ("fp8", 256): (17, 10.5, 49.5, 29.5),
}
"""µs of each product, without the rounding of its inputs where more than two rows are rounded before it."""
_CACHE = 2**28
"""Weights take turns until they have so many bytes together, so that none of them is in a cache."""


def few_rows(bench: Bench) -> None:
    """Times of products; their bytes are the bytes of the weight."""
    for (kind, rows), predicted in _PREDICTED.items():
        for (product, shape), micros in zip(_SHAPES.items(), predicted, strict=True):
            name = f"linear-of-few-rows {product} {kind} {rows}"
            ins, outs = (48, 64) if bench.smoke else shape
            if bench.wants(name) and not (bench.smoke and rows > 1):
                size = ins * outs * (1 if kind == "fp8" else 2)
                make = _in_fp8 if kind == "fp8" else _in_16_bits
                copies = 1 if bench.smoke else max(1, _CACHE // size)
                calls = make(bench.device, rows, ins, outs, copies, product)
                for (who, call), bar in zip(calls.items(), (f"<= {micros} µs", ""), strict=True):
                    bench.bytes(name, who, call, size, bar)


Calls = dict[str, Callable[[], object]]


def _in_16_bits(device: torch.device, rows: int, ins: int, outs: int, copies: int, product: str) -> Calls:
    gated = product == "gate_up"
    weights = cycle([torch.randn(outs, ins, device=device).bfloat16() for _ in range(copies)])
    x = torch.randn(rows, ins, device=device).bfloat16()
    activate = silu_mul if gated else torch.Tensor.contiguous
    return {
        "pagewise": lambda: skinny_linear(x, next(weights), gated=gated),
        "torch": lambda: activate(torch.nn.functional.linear(x, next(weights))),
    }


def _in_fp8(device: torch.device, rows: int, ins: int, outs: int, copies: int, product: str) -> Calls:
    gated, rounded_here = product == "gate_up", product in ("out", "down") and rows <= MOST_ROUNDED_ROWS
    weight = quantise(torch.randn(outs, ins, device=device), FP8)
    weights = [QuantisedWeight(weight.values.clone(), weight.scales, weight.block) for _ in range(copies)]
    layers = cycle([ScaledMMLinear(one, Inputs(), torch.bfloat16) for one in weights])
    x = torch.randn(rows, ins, device=device).bfloat16()
    values, scales = quantise_rows(x, FP8)
    x_scales = scales[:, 0].contiguous()

    def kernel() -> object:
        layer = next(layers)
        weight_scales = layer.column_scales[0]
        if rounded_here:
            return skinny_linear(x, layer.values, weight_scales=weight_scales, gated=gated)
        return skinny_linear(
            values, layer.values, x_scales=x_scales, weight_scales=weight_scales, gated=gated, dtype=x.dtype
        )

    def library() -> object:
        y = next(layers)(x)
        return silu_mul(y) if gated else y

    return {"pagewise": kernel, "torch": library}

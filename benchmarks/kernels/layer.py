"""A decoder layer of a decode step, with kernels one after the other and with kernels that begin early."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from pagewise_kernels.attention import DecodePlan, decode_attention
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.launch import use_dependent_launch
from pagewise_kernels.rms_norm import rms_norm
from pagewise_kernels.rope_write_kv import rope_write_kv
from pagewise_kernels.silu_mul import silu_mul
from pagewise_kernels.skinny_linear import MOST_ROWS, skinny_linear

from benchmarks.kernels.bench import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, Bench


def layer(bench: Bench) -> None:
    """The shape of Llama 3 8B with contexts of 1k; bytes: weights and KV, each read once."""
    hidden, inner, heads, kv_heads, dim = (
        (64, 96, 4, 2, 16) if bench.smoke else (4096, 14_336, HEADS, KV_HEADS, HEAD_DIM)
    )
    for batch in (1, 3) if bench.smoke else (1, 16, 64, 256):
        name, context = f"decoder layer, batch {batch}", 20 if bench.smoke else 1024
        if not bench.wants(name):
            continue
        call, moved = _decoder_layer(bench.device, batch, context, hidden, inner, heads, kv_heads, dim)
        try:
            for who, early in (("apart", False), ("early", True)):
                use_dependent_launch(early)
                bench.bytes(name, who, call, moved)
        finally:
            use_dependent_launch(True)


def _decoder_layer(
    device: torch.device, batch: int, context: int, hidden: int, inner: int, heads: int, kv_heads: int, dim: int
) -> tuple[Callable[[], object], int]:
    """Return the function that computes a layer, and the bytes that it has to read."""
    dtype = torch.bfloat16

    def random(*shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(shape, device=device) / math.sqrt(shape[-1])
        return values.to(dtype)

    rows = heads + 2 * kv_heads
    qkv_weight, out_weight = random(rows * dim, hidden), random(hidden, heads * dim)
    gate_up, down, norm = random(2 * inner, hidden), random(hidden, inner), random(hidden)
    blocks = -(-context // BLOCK_SIZE)
    keys, values = (random(batch * blocks, BLOCK_SIZE, kv_heads, dim) for _ in range(2))
    cache = KVLayer(keys, values)
    tables = torch.randperm(batch * blocks).int().view(batch, blocks).to(device)
    plan = DecodePlan(max_queries=batch, heads=heads, kv_heads=kv_heads, head_dim=dim, kv_dtype=dtype, device=device)
    plan.plan(torch.full((batch,), context, dtype=torch.int32).to(device))
    positions = torch.full((batch,), context - 1).to(device)
    slots = tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    angles = random(context, dim // 2)
    x, residual = random(batch, hidden), random(batch, hidden)
    few = batch <= MOST_ROWS
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = skinny_linear if few else F.linear

    def call() -> torch.Tensor:
        qkv = multiply(rms_norm(x, norm, 1e-6, residual=residual), qkv_weight).view(batch, rows, dim)
        rope_write_kv(qkv, positions, angles, angles, cache, slots)
        seen = decode_attention(qkv[:, :heads], cache, tables, plan)
        normed = rms_norm(multiply(seen.flatten(1), out_weight), norm, 1e-6, residual=residual)
        gated = skinny_linear(normed, gate_up, gated=True) if few else silu_mul(F.linear(normed, gate_up))
        return multiply(gated, down)

    return call, sum(tensor.nbytes for tensor in (qkv_weight, out_weight, gate_up, down, keys, values))

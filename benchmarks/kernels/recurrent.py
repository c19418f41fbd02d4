"""Recurrent layers between their projections: decodes, which read and write states, and a prompt."""

from collections.abc import Callable

import torch
from pagewise_executor.kernel_checks.recurrent_problems import random_form
from pagewise_executor.models.triton_recurrence import kernels_of
from pagewise_kernels.recurrent import CHUNK, BlockStates, ChunkPlan, Recurrence, recur

from benchmarks.kernels.bench import Bench

SHAPES = {"gated delta net": (32, 16, 128, 128), "KDA": (32, 32, 128, 128), "Mamba-2": (128, 8, 128, 64)}
"""Heads, groups that share keys and queries, key and value: of Qwen3-Next 80B, Kimi-Linear 48B and Nemotron-H 8B."""


def recurrent(bench: Bench) -> None:
    for kind, sizes in SHAPES.items():
        layer = kernels_of(random_form(kind, *((2, 2, 16, 16) if bench.smoke else sizes)), bench.device)
        assert isinstance(layer, Recurrence)
        state = layer.heads * layer.key * layer.value
        for count in (2,) if bench.smoke else (1, 16, 256):
            if bench.wants(name := f"recurrent {kind}, {count} decodes"):
                call = _call(bench, layer, [1] * count)
                bench.bytes(name, "pagewise", call, 8 * count * state, ">= 70%")
        tokens = 70 if bench.smoke else 8192
        if bench.wants(name := f"recurrent {kind}, a prompt of {tokens}"):
            # Of a token and head: the products with the state, and the products within a chunk.
            done = tokens * layer.heads * (6 * layer.key * layer.value + 4 * CHUNK * (layer.key + layer.value))
            bench.flops(name, "pagewise", _call(bench, layer, [tokens]), done)


def _call(bench: Bench, layer: Recurrence, sizes: list[int]) -> Callable[[], object]:
    """Return the call for sequences of these sizes, which have states."""
    firsts, chunks, at = [0], [], 0
    for block, size in enumerate(sizes):
        for start in range(at, at + size, CHUNK):
            stop = min(start + CHUNK, at + size)
            chunks.append((start, stop, block, block if stop == at + size else -1, at, size == 1))
        at += size
        firsts.append(len(chunks))
    of_tokens, of_sequences, of_chunks = (
        torch.tensor(each, dtype=torch.int32, device=bench.device) for each in ([at], firsts, chunks)
    )
    plan = ChunkPlan(of_tokens, of_sequences, of_chunks, max(sizes) > 1)
    projected = torch.randn(at, layer.size, device=bench.device).bfloat16()
    states = []
    for values, dtype in (
        (layer.conv.shape[0] * layer.kept, projected.dtype),
        (layer.heads * layer.key * layer.value, torch.float32),
    ):
        memory = torch.zeros(len(sizes), values * dtype.itemsize, dtype=torch.uint8, device=bench.device)
        tables = torch.arange(len(sizes), dtype=torch.int32, device=bench.device)[:, None]
        states.append(BlockStates(memory, tables, 0, dtype))
    return lambda: recur(layer, projected, plan, *states)

"""Operations around attention: norms, gates, rotations, K and V into the pool, block copies, linear layers, inputs."""

from collections.abc import Callable

import torch
from pagewise_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from pagewise_kernels.decode_inputs import decode_inputs
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.kv_write import write_kv
from pagewise_kernels.matmul import linear
from pagewise_kernels.rms_norm import rms_norm
from pagewise_kernels.rope_write_kv import rope_write_kv
from pagewise_kernels.silu_mul import silu_mul
from pagewise_kernels.skinny_linear import skinny_linear

from benchmarks.kernels.bench import BLOCK_SIZE, HEAD_DIM, KV_HEADS, Bench


def elementwise(bench: Bench) -> None:
    tokens, hidden, dtype = (3, 64, torch.bfloat16) if bench.smoke else (16_384, 4096, torch.bfloat16)
    item = dtype.itemsize

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=bench.device).to(dtype)

    x, weight, residual = random(tokens, hidden), random(hidden), random(tokens, hidden)
    out = torch.empty_like(x)
    bench.bytes("rms_norm", "pagewise", lambda: rms_norm(x, weight, 1e-6, out=out), 2 * x.numel() * item, ">= 85%")
    bench.bytes(
        "rms_norm with residual", "pagewise", lambda: rms_norm(x, weight, 1e-6, residual=residual, out=out),
        4 * x.numel() * item, ">= 85%",
    )  # fmt: skip
    torch_norm = torch.nn.functional.rms_norm
    bench.bytes("rms_norm", "torch", lambda: torch_norm(x, (hidden,), weight, 1e-6), 2 * x.numel() * item)
    gate_up = random(tokens, 4 * hidden)
    half = gate_up.numel() // 2
    gated = torch.empty(tokens, 2 * hidden, device=bench.device, dtype=dtype)
    bench.bytes("silu_mul", "pagewise", lambda: silu_mul(gate_up, gated), 3 * half * item)
    heads, dim = (2, 32) if bench.smoke else (KV_HEADS, HEAD_DIM)
    pool = torch.zeros(2, 2 * (tokens // BLOCK_SIZE + 1), BLOCK_SIZE, heads, dim, device=bench.device, dtype=dtype)
    layer = KVLayer(*pool)
    k, v = random(tokens, heads, dim), random(tokens, heads, dim)
    slots = torch.randperm(pool.shape[1] * BLOCK_SIZE, device=bench.device)[:tokens]
    bench.bytes("write_kv", "pagewise", lambda: write_kv(k, v, layer, slots), 4 * k.numel() * item, ">= 85%")
    qkv, angles, positions = random(tokens, 6 * heads, dim), random(tokens, dim // 2), torch.arange(tokens).to(slots)
    for name, norm in (("rope_write_kv", None), ("rope_write_kv with norm", random(5 * heads, dim))):

        def turn(norm: torch.Tensor | None = norm) -> None:
            rope_write_kv(qkv, positions, angles, angles, layer, slots, head_norm=norm, eps=1e-6)

        bench.bytes(name, "pagewise", turn, 2 * qkv.numel() * item, ">= 85%")
    blocks = torch.randperm(pool.shape[1], device=bench.device)
    count = len(blocks) // 2
    pairs = torch.stack([blocks[:count], blocks[count : 2 * count]], 1).contiguous()
    size = pool[:, 0].numel() * item
    bench.bytes("copy_blocks", "pagewise", lambda: copy_blocks(pool, pairs), 2 * count * size, ">= 85%")
    staged = torch.empty(count, size, dtype=torch.uint8, device=bench.device)
    bench.bytes("gather_blocks", "pagewise", lambda: gather_blocks(pool, blocks[:count], staged), 2 * count * size)
    if bench.device.type == "cuda":
        pinned = torch.empty(count, size, dtype=torch.uint8, pin_memory=True)
        bench.bytes(
            "gather_blocks to the host", "pagewise", lambda: gather_blocks(pool, blocks[:count], pinned),
            count * size, ">= 45 GB/s",
        )  # fmt: skip
        bench.bytes(
            "scatter_blocks from the host", "pagewise", lambda: scatter_blocks(pool, blocks[:count], pinned),
            count * size, ">= 45 GB/s",
        )  # fmt: skip


def linears(bench: Bench) -> None:
    """Gate and up of Llama 3 8B: few rows read the weights, many rows compute. Beside torch's, whose rows depend."""
    size_in, size_out = (48, 80) if bench.smoke else (4096, 28_672)
    weight = torch.randn(size_out, size_in, device=bench.device).bfloat16()
    for rows in (1, 3) if bench.smoke else (1, 64, 4096):
        name = f"linear {rows} x {size_in} x {size_out}"
        if not bench.wants(name):
            continue
        x = torch.randn(rows, size_in, device=bench.device).bfloat16()
        for who, multiply in (("pagewise", linear), ("torch", torch.nn.functional.linear)):

            def call(x: torch.Tensor = x, multiply: Callable[..., torch.Tensor] = multiply) -> object:
                return multiply(x, weight)

            if rows < 256:
                bench.bytes(name, who, call, (weight.numel() + rows * (size_in + size_out)) * weight.itemsize)
            else:
                bench.flops(name, who, call, 2 * rows * weight.numel())
    for rows in (1, 3) if bench.smoke else (1, 16, 64):
        name = f"gated linear {rows} x {size_in} x {size_out}"
        if not bench.wants(name):
            continue
        x = torch.randn(rows, size_in, device=bench.device).bfloat16()
        moved = (weight.numel() + rows * (size_in + size_out // 2)) * weight.itemsize

        def one(x: torch.Tensor = x) -> object:
            return skinny_linear(x, weight, gated=True)

        def two(x: torch.Tensor = x) -> object:
            return silu_mul(torch.nn.functional.linear(x, weight))

        bench.bytes(name, "pagewise", one, moved)
        bench.bytes(name, "torch, silu_mul", two, moved)


def inputs(bench: Bench) -> None:
    """The inputs of a decode step: a few kilobytes, so the time counts and not the rate."""
    queries, blocks = (3, 4) if bench.smoke else (256, 512)
    device = bench.device
    rows = torch.randperm(queries, device=device).int()
    lengths = torch.randint(1, blocks * BLOCK_SIZE, (queries,), device=device).int()
    tables = torch.randint(0, 2**16, (queries, blocks), device=device).int()
    last_tokens = torch.randint(0, 1000, (queries,), device=device)
    ids, positions, slots = (torch.zeros(queries, dtype=torch.int64, device=device) for _ in range(3))
    moved = queries * (4 + 4 + 4 + 8 + 3 * 8)

    def ours() -> None:
        decode_inputs(
            rows, lengths, tables, last_tokens, block_size=BLOCK_SIZE, ids=ids, positions=positions, slots=slots
        )

    def theirs() -> None:
        held = rows.long()
        positions.copy_(lengths - 1)
        slots.copy_(tables[held, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)
        torch.index_select(last_tokens, 0, held, out=ids)

    bench.bytes(f"decode_inputs {queries}", "pagewise", ours, moved)
    bench.bytes(f"decode_inputs {queries}", "torch", theirs, moved)

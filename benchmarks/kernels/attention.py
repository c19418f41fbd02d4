"""Attention: decode in its variants, with and without a shared prefix, and prefill."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from pagewise_kernels.attention import (
    Chunk,
    DecodePlan,
    PrefillPlan,
    decode_attention,
    prefill_attention,
)
from pagewise_kernels.attention.config import TileConfig, decode_configs
from pagewise_kernels.kv_layer import KVLayer, Scales

from benchmarks.kernels import peers
from benchmarks.kernels.bench import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, Bench

_FP8_CAPABILITY = (8, 9)


@dataclass
class Paged:
    """KV of ``batch`` sequences of ``context`` tokens, in blocks that lie in disorder."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor

    @cached_property
    def layer(self) -> KVLayer:
        """K and V as kernels take them."""
        return KVLayer(self.keys, self.values)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def plan(
        self,
        *,
        deterministic: bool = False,
        kv_dtype: torch.dtype | None = None,
        config: TileConfig | None = None,
    ) -> DecodePlan:
        """For one query of each sequence, planned."""
        queries, heads, dim = self.q.shape
        plan = DecodePlan(
            max_queries=queries, heads=heads, kv_heads=self.keys.shape[2], head_dim=dim,
            kv_dtype=kv_dtype or self.keys.dtype, device=self.q.device, deterministic=deterministic,
            max_context=self.tables.shape[1] * BLOCK_SIZE if deterministic else None, config=config,
        )  # fmt: skip
        plan.plan(self.lengths)
        return plan

    def decode(self, plan: DecodePlan) -> Callable[[], object]:
        """The call that computes it."""
        return lambda: decode_attention(self.q, self.layer, self.tables, plan)


def paged(bench: Bench, batch: int, context: int, *, shared: int = 0, prefill: bool = False) -> Paged:
    """``shared``: tokens at the beginning of all contexts that lie in the same blocks; whole blocks."""
    heads, kv_heads, dim = (4, 2, 16) if bench.smoke else (HEADS, KV_HEADS, HEAD_DIM)
    own = -(-context // BLOCK_SIZE) - shared // BLOCK_SIZE
    ids = torch.randperm(shared // BLOCK_SIZE + batch * own, device=bench.device).int()
    common, rest = ids[: shared // BLOCK_SIZE], ids[shared // BLOCK_SIZE :]
    tables = torch.cat([common.expand(batch, -1), rest.view(batch, own)], dim=1).contiguous()
    shape = (len(ids), BLOCK_SIZE, kv_heads, dim)
    dtype = torch.bfloat16
    keys, values = (torch.randn(shape, device=bench.device, dtype=torch.float32).to(dtype) for _ in range(2))
    lengths = torch.full((batch,), context, dtype=torch.int32, device=bench.device)
    q = torch.randn(context if prefill else batch, heads, dim, device=bench.device).to(dtype)
    return Paged(q, keys, values, tables, lengths)


def decode(bench: Bench) -> None:
    for batch, context, bar in (
        (1, 1024, "<= 10 µs"),
        (1, 131_072, ""),
        (16, 8192, ">= 3,900 GB/s"),
        (64, 2048, ">= 3,900 GB/s"),
        (72, 2048, ">= 3,900 GB/s"),
        (256, 1024, ">= 3,900 GB/s"),
    ):
        name = f"decode {batch} x {context}"
        if not bench.wants(name):
            continue
        case = paged(bench, min(batch, 2) if bench.smoke else batch, min(context, 40) if bench.smoke else context)
        plan, moved = case.plan(), case.kv_bytes
        bench.bytes(name, "pagewise", case.decode(plan), moved, bar)

        def planned(case: Paged = case, plan: DecodePlan = plan) -> object:
            plan.plan(case.lengths)
            return decode_attention(case.q, case.layer, case.tables, plan)

        bench.bytes(f"{name}, planned each time", "pagewise", planned, moved)
        bench.bytes(f"{name}, deterministic", "pagewise", case.decode(case.plan(deterministic=True)), moved)
        if bench.device.type == "cpu" or torch.cuda.get_device_capability(bench.device) >= _FP8_CAPABILITY:
            _decode_fp8(bench, f"{name}, float8 KV", case)
        for who, make in peers.decode(case.q, case.keys, case.values, case.tables, case.lengths):
            bench.peer(who, make, lambda call, who=who, name=name, moved=moved: bench.bytes(name, who, call, moved))  # type: ignore[misc]


def _decode_fp8(bench: Bench, name: str, case: Paged) -> None:
    keys, values = (tensor.to(torch.float8_e4m3fn) for tensor in (case.keys, case.values))
    scales = Scales(*(torch.ones(keys.shape[:3], device=keys.device) for _ in range(2)))
    plan = case.plan(kv_dtype=keys.dtype)
    moved = 2 * (keys.numel() + 4 * scales.keys.numel())
    layer = KVLayer(keys, values, scales)
    bench.bytes(name, "pagewise", lambda: decode_attention(case.q, layer, case.tables, plan), moved)


def shared(bench: Bench) -> None:
    """Rates are of the KV that has to be read at least: shared blocks once, and each sequence's own."""
    batch, own = (3, 24) if bench.smoke else (64, 256)
    for common in (32,) if bench.smoke else (512, 2048, 8192):
        name = f"shared prefix {batch} x ({common} + {own})"
        if not bench.wants(name):
            continue
        case = paged(bench, batch, common + own, shared=common)
        plan, moved = case.plan(), case.kv_bytes
        plan.share(np.array([(0, batch, common)]), np.arange(batch))
        plan.plan(case.lengths)
        bench.bytes(name, "pagewise", case.decode(plan), moved)
        bench.bytes(f"{name}, each alone", "pagewise", case.decode(case.plan()), moved)
        for who, make in peers.decode(case.q, case.keys, case.values, case.tables, case.lengths):
            bench.peer(who, make, lambda call, who=who, name=name, moved=moved: bench.bytes(name, who, call, moved))  # type: ignore[misc]


def sweep(bench: Bench) -> None:
    """Decode with other tiles: which of them is the fastest is for a device to say."""
    for batch, context in ((1, 1024), (64, 2048), (256, 1024)):
        for config in decode_configs(HEADS // KV_HEADS):
            name = f"sweep {batch} x {context}: tile {config.tile}, {config.num_warps} warps, {config.programs} per SM"
            if not bench.wants(name):
                continue
            case = paged(bench, min(batch, 2) if bench.smoke else batch, min(context, 40) if bench.smoke else context)
            bench.bytes(name, "pagewise", case.decode(case.plan(config=config)), case.kv_bytes)


def prefill(bench: Bench) -> None:
    for context in (4096, 8192, 32_768):
        name = f"prefill {context}"
        if not bench.wants(name):
            continue
        case = paged(bench, 1, min(context, 40) if bench.smoke else context, prefill=True)
        size, heads, dim = case.q.shape
        plan = PrefillPlan(
            [Chunk(0, 0, size, 0)], heads=heads, kv_heads=case.keys.shape[2], head_dim=dim, kv_dtype=case.keys.dtype,
            device=bench.device,
        )  # fmt: skip
        done = 2 * heads * dim * size * size  # causal: half of 4 · n²

        def ours(case: Paged = case, plan: PrefillPlan = plan) -> object:
            return prefill_attention(case.q, case.layer, case.tables, plan)

        bench.flops(name, "pagewise", ours, done, ">= 0.75 x FA3 (541 to 639 TFLOP/s)")
        for who, make in peers.prefill(case.q, case.keys, case.values, case.tables, case.lengths):
            bench.peer(who, make, lambda call, who=who, name=name, done=done: bench.flops(name, who, call, done))  # type: ignore[misc]

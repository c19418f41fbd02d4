"""The halves of a decoder layer by one call, beside the operations one by one, in every build of the library."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pagewise_kernels.cpu.attention import CpuStep, Rotation
from pagewise_kernels.cpu.build import Variant
from pagewise_kernels.cpu.layer import AttentionHalf, MlpHalf, Norm
from pagewise_kernels.cpu.linear_grouped import GroupedWeight
from pagewise_kernels.cpu.linear_int4 import Int4Weight
from pagewise_kernels.cpu.linear_int8 import Int8Weight
from pagewise_kernels.cpu.operations import PackedWeight, rms_norm, silu_mul
from pagewise_kernels.kv_layer import INT8, KVLayer, Scales

from tests.cpu_kernels import need_cpu_kernels
from tests.kernels.int4_layers import drawn

HEADS, KV_HEADS, DIM, HIDDEN, INNER, BLOCK = 4, 2, 32, 96, 160, 4


def floats(outs: int, ins: int) -> PackedWeight:
    return PackedWeight(torch.randn(outs, ins) / 10, torch.randn(outs))


def int8(outs: int, ins: int) -> Int8Weight:
    return Int8Weight(torch.randn(outs, ins) / 10, torch.randn(outs))


def int4(outs: int, ins: int) -> Int4Weight:
    return Int4Weight(*drawn(outs, ins, 32, zeros=True, scattered=True), torch.randn(outs))


def grouped(outs: int, ins: int) -> GroupedWeight:
    codes, scales = torch.randint(16, (outs, ins), dtype=torch.uint8), torch.rand(outs, ins // 32).half() / 50
    return GroupedWeight(codes, 4, 0, scales, None, scales * 7)


KINDS: list[Callable[[int, int], Any]] = [floats, int8, int4, grouped]


class Problem:
    """Three decodes and a chunk of ``size`` tokens, with two pools of the same contents."""

    def __init__(self, size: int, window: int | None, in_int8: bool) -> None:
        lengths = np.array([5, 17, 9], np.int64)
        tables = torch.randperm(44).view(4, 11).int().numpy()
        tables[2, 0] = tables[0, 0]
        rows = np.array([0, 1, 2, *[3] * size])
        positions = np.array([*(lengths - 1), *range(size)])
        slots = tables[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        self.step = CpuStep(
            slots, tables, rows[:3], lengths, np.array([[3, 3, 0, size]], np.int64)[: bool(size)], block_size=BLOCK,
            prefixes=np.array([[0, 2, 4]], np.int64), members=np.array([0, 2]),
        )  # fmt: skip
        self.window, shape = window, (44, BLOCK, KV_HEADS, DIM)
        self.pools = [torch.randn(shape), torch.randn(shape)]
        self.scales = None
        if in_int8:
            self.pools = [(pool * 30).to(INT8) for pool in self.pools]
            self.scales = Scales(torch.rand(shape[:3]) / 9, torch.rand(shape[:3]) / 9)
        self.x, self.residual = torch.randn(3 + size, HIDDEN), torch.randn(3 + size, HIDDEN)
        self.cos, self.sin = (torch.randn(3 + size, DIM) for _ in range(2))

    def layer(self) -> KVLayer:
        scales = self.scales and Scales(*(scale.clone() for scale in self.scales))
        keys, values = (pool.clone() for pool in self.pools)
        return KVLayer(keys, values, scales)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_by_one_call_is_that_of_its_operations(build: Variant, kind: Callable[[int, int], Any]) -> None:
    del build
    qkv, out = kind((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), kind(HIDDEN, HEADS * DIM)
    norm, head_norm = Norm(torch.randn(HIDDEN), 1e-5), Norm(torch.randn(HEADS + KV_HEADS, DIM), 1e-6)
    for size, window, in_int8, own, added in (
        (0, None, False, None, True), (40, None, False, head_norm, False), (3, 6, True, head_norm, True),
    ):  # fmt: skip
        problem = Problem(size, window, in_int8)
        layers, residual = [problem.layer(), problem.layer()], problem.residual if added else None
        half = AttentionHalf(norm, qkv, out, HEADS, layers[0], 0.2, window, own)
        kept = None if residual is None else residual.clone()
        found = half.compute(problem.step, problem.x, residual, problem.cos, problem.sin)

        normed = rms_norm(problem.x, norm.weight, norm.eps, kept)
        q, k, v = qkv.linear(normed).view(-1, HEADS + 2 * KV_HEADS, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        rotation = Rotation(problem.cos, problem.sin, *(own or (None, 0.0)))
        attended = problem.step.attend(q, k, v, layers[1], scale=0.2, window=window, rotation=rotation)
        assert torch.equal(found, out.linear(attended.flatten(1)))
        assert torch.equal(layers[0].keys, layers[1].keys)
        assert torch.equal(layers[0].values, layers[1].values)
        if residual is not None:
            assert kept is not None
            assert torch.equal(residual, kept)
        # The arguments of a layer that attended by itself are not those of the step.
        again = half.compute(problem.step, problem.x, problem.residual, problem.cos, problem.sin)
        assert again.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_mlp_by_one_call_is_that_of_its_operations(build: Variant, kind: Callable[[int, int], Any]) -> None:
    del build
    gate_up, down, norm = kind(2 * INNER, HIDDEN), kind(HIDDEN, INNER), Norm(torch.randn(HIDDEN), 1e-5)
    half = MlpHalf(norm, gate_up, down)
    for rows in (1, 5, 130):
        x, residual = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
        kept = residual.clone()
        found = half.compute(x, residual)
        expected = down.linear(silu_mul(gate_up.linear(rms_norm(x, norm.weight, norm.eps, kept))))
        assert torch.equal(found, expected)
        assert torch.equal(residual, kept)


def test_weights_and_rows_that_do_not_fit_are_refused() -> None:
    need_cpu_kernels()
    norm, problem = Norm(torch.randn(HIDDEN), 1e-5), Problem(0, None, False)
    qkv, out = floats((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), floats(HIDDEN, HEADS * DIM)
    with pytest.raises(ValueError, match="3 heads of 32 with 2 KV heads do not fit weights of 256 outputs"):
        AttentionHalf(norm, qkv, out, 3, problem.layer(), 0.2, None, None)
    with pytest.raises(ValueError, match="3 heads of 32 with 2 KV heads are not supported"):
        AttentionHalf(norm, floats(7 * DIM, HIDDEN), floats(HIDDEN, 3 * DIM), 3, problem.layer(), 0.2, None, None)
    with pytest.raises(ValueError, match="gate and up of 256 outputs do not fit 128 inputs"):
        MlpHalf(norm, floats(256, HIDDEN + 1), out)
    with pytest.raises(ValueError, match="bfloat16"):
        MlpHalf(Norm(torch.randn(HIDDEN).bfloat16(), 1e-5), floats(256, HIDDEN), out)
    half = AttentionHalf(norm, qkv, out, HEADS, problem.layer(), 0.2, None, None)
    with pytest.raises(ValueError, match="3 tokens"):
        half.compute(problem.step, problem.x[:2], None, problem.cos[:2], problem.sin[:2])
    with pytest.raises(ValueError, match="rows"):
        half.compute(problem.step, problem.x.repeat(1, 2)[:, ::2], None, problem.cos, problem.sin)
    with pytest.raises(TypeError, match="float64"):
        half.compute(problem.step, problem.x.double(), None, problem.cos, problem.sin)


def test_long_prompts_have_scratch_of_more_than_four_gibibytes() -> None:
    need_cpu_kernels()
    half, rows = MlpHalf(Norm(torch.randn(HIDDEN), 1e-5), floats(2 * INNER, HIDDEN), floats(HIDDEN, INNER)), 1 << 21
    assert half.scratch_bytes(rows) == rows * 4 * (HIDDEN + 3 * INNER) > 1 << 32

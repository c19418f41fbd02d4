"""Decoder layers by one call, beside the operations one by one, in every build of the library."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pagewise_kernels.cpu.attention import CpuStep, Rotation
from pagewise_kernels.cpu.build import Variant
from pagewise_kernels.cpu.layer import AttentionHalf, HalfLayers, MlpHalf, Norm, RotatedStep
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

    def rotated(self) -> RotatedStep:
        return RotatedStep(self.step, self.cos, self.sin)


class Layer:
    """The weights of a decoder layer, and its halves, which attend with ``pool``."""

    def __init__(self, kind: Callable[[int, int], Any], pool: KVLayer, window: int | None, own: Norm | None) -> None:
        self.qkv, self.out = kind((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), kind(HIDDEN, HEADS * DIM)
        self.gate_up, self.down = kind(2 * INNER, HIDDEN), kind(HIDDEN, INNER)
        self.norms = [Norm(torch.randn(HIDDEN), 1e-5), Norm(torch.randn(HIDDEN), 1e-6)]
        self.window, self.own = window, own
        self.attention = AttentionHalf(self.norms[0], self.qkv, self.out, HEADS, pool, 0.2, window, own)
        self.mlp = MlpHalf(self.norms[1], self.gate_up, self.down)

    def attend(self, problem: Problem, pool: KVLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        normed = rms_norm(x, *self.norms[0], residual)
        q, k, v = self.qkv.linear(normed).view(-1, HEADS + 2 * KV_HEADS, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        rotation = Rotation(problem.cos, problem.sin, *(self.own or (None, 0.0)))
        attended = problem.step.attend(q, k, v, pool, scale=0.2, window=self.window, rotation=rotation)
        return self.out.linear(attended.flatten(1))  # type: ignore[no-any-return]

    def feed_forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.down.linear(silu_mul(self.gate_up.linear(rms_norm(x, *self.norms[1], residual))))  # type: ignore[no-any-return]


CASES = [(0, None, False, True), (40, None, False, False), (3, 6, True, True)]
"""Tokens of the chunk, the window, whether the pool is in int8, and whether there is something to add."""


def layer_of(
    kind: Callable[[int, int], Any], window: int | None, in_int8: bool, size: int
) -> tuple[Layer, Problem, list[KVLayer]]:
    problem = Problem(size, window, in_int8)
    pools = [problem.layer(), problem.layer()]
    own = Norm(torch.randn(HEADS + KV_HEADS, DIM), 1e-6) if size == 40 else None
    return Layer(kind, pools[0], window, own), problem, pools


@pytest.mark.parametrize("kind", KINDS)
def test_attention_by_one_call_is_that_of_its_operations(build: Variant, kind: Callable[[int, int], Any]) -> None:
    del build
    for size, window, in_int8, adds in CASES:
        layer, problem, pools = layer_of(kind, window, in_int8, size)
        half = HalfLayers([layer.attention])
        residual, added = (problem.residual, problem.x) if adds else (problem.x, None)
        kept = residual.clone()
        found = half.compute(residual, added, problem.rotated())
        expected = layer.attend(problem, pools[1], problem.x, kept if adds else None)
        assert torch.equal(found, expected)
        assert torch.equal(pools[0].keys, pools[1].keys)
        assert torch.equal(pools[0].values, pools[1].values)
        assert torch.equal(residual, kept)
        # The arguments of a layer that attended by itself are not those of the step.
        assert half.compute(problem.residual, problem.x, problem.rotated()).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_mlp_by_one_call_is_that_of_its_operations(build: Variant, kind: Callable[[int, int], Any]) -> None:
    del build
    layer, _, _ = layer_of(kind, None, False, 0)
    for rows in (1, 5, 130):
        x, residual = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
        kept = residual.clone()
        assert torch.equal(HalfLayers([layer.mlp]).compute(residual, x), layer.feed_forward(x, kept))
        assert torch.equal(residual, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_several_layers_by_one_call_are_those_of_their_operations(
    build: Variant, kind: Callable[[int, int], Any]
) -> None:
    del build
    for size, window, in_int8, adds in CASES:
        problem = Problem(size, window, in_int8)
        pools = [[problem.layer(), problem.layer()] for _ in range(3)]
        # A window in some of them; and the last layer's weights are of another kind.
        layers = [Layer(kind if n < 2 else int8, one, window if n else None, None) for n, (one, _) in enumerate(pools)]
        whole = HalfLayers([half for layer in layers for half in (layer.attention, layer.mlp)])
        residual, added = (problem.residual, problem.x) if adds else (problem.x, None)
        base = residual.clone()
        found = whole.compute(residual, added, problem.rotated())
        for layer, (_, pool) in zip(layers, pools, strict=True):
            attended = layer.attend(problem, pool, *((base, None) if added is None else (added, base)))
            added = layer.feed_forward(attended, base)
        assert added is not None
        assert torch.equal(found, added)
        assert torch.equal(residual, base)
        for pool, expected in pools:
            assert torch.equal(pool.keys, expected.keys)


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
    with pytest.raises(ValueError, match="100 outputs are not added to a residual of 96"):
        MlpHalf(norm, floats(256, HIDDEN), floats(100, 128))
    with pytest.raises(ValueError, match="bfloat16"):
        MlpHalf(Norm(torch.randn(HIDDEN).bfloat16(), 1e-5), floats(256, HIDDEN), out)
    with pytest.raises(ValueError, match="one hidden size"):
        HalfLayers([])
    half = HalfLayers([AttentionHalf(norm, qkv, out, HEADS, problem.layer(), 0.2, None, None)])
    with pytest.raises(ValueError, match="3 tokens"):
        half.compute(problem.x[:2], None, RotatedStep(problem.step, problem.cos[:2], problem.sin[:2]))
    with pytest.raises(ValueError, match="no step"):
        half.compute(problem.x)
    with pytest.raises(ValueError, match="rows"):
        half.compute(problem.x.repeat(1, 2)[:, ::2], None, problem.rotated())
    with pytest.raises(ValueError, match="contiguous"):
        half.compute(problem.x, problem.x.repeat(1, 2)[:, :HIDDEN], problem.rotated())
    with pytest.raises(TypeError, match="float64"):
        half.compute(problem.x.double(), None, problem.rotated())


def test_long_prompts_have_scratch_of_more_than_four_gibibytes() -> None:
    need_cpu_kernels()
    norm, rows = Norm(torch.randn(HIDDEN), 1e-5), 1 << 21
    half = HalfLayers([MlpHalf(norm, floats(2 * INNER, HIDDEN), floats(HIDDEN, INNER))])
    assert half.scratch_bytes(rows) == rows * 4 * (HIDDEN + 3 * INNER) > 1 << 32

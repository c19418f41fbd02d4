"""Experts in MXFP4 by Triton kernels and in C against an oracle in float64, whatever tokens choose."""

import re
from typing import Any

import pytest
import torch
from pagewise_kernels import mxfp4_experts
from pagewise_kernels.cpu.mxfp4_experts import PackedMxfp4Experts
from pagewise_kernels.mxfp4 import Mxfp4Weights
from pagewise_kernels.mxfp4_experts import pack, sum_of_mxfp4_experts

from tests.cpu_kernels import need_cpu_kernels

CPU = torch.device("cpu")
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
REAL: list[Any] = [pytest.param((tokens, 32, 4, 2880, 2880), marks=pytest.mark.gpu) for tokens in (1, 3, 64, 300, 2000)]


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


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
def test_kernels_compute_what_the_oracle_does(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, gate_up, down, chosen, weights = drawn_layer(shape, dtype, device)
    packed = pack(gate_up), pack(down)
    for own, from_packed in zip((gate_up, down), packed, strict=True):
        assert torch.equal(from_packed.dequantised(1, torch.float32).double(), dequantised(own)[1])
        assert torch.equal(own.dequantised(1, torch.float32).double(), dequantised(own)[1])
    found = sum_of_mxfp4_experts(x, *packed, chosen.int(), weights, limit=LIMIT, alpha=ALPHA)
    assert found.dtype == dtype
    assert error(found, oracle(x, gate_up, down, chosen, weights)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("shape", SHAPES)
def test_operations_in_c_compute_what_the_oracle_does(shape: tuple[int, ...]) -> None:
    need_cpu_kernels()
    x, gate_up, down, chosen, weights = drawn_layer(shape, torch.float32, CPU)
    packed = PackedMxfp4Experts(gate_up, down, LIMIT, ALPHA)
    expected = oracle(x, gate_up, down, chosen, weights)
    for choice in (chosen, chosen.int()):
        assert error(packed.sums(x, choice, weights), expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_instructions_make_numbers_of_all_words(dtype: torch.dtype) -> None:
    """The interpreter cannot run them, so they run here, on all words of four codes in both halves of a register."""
    lowest = {torch.bfloat16: 6, torch.float16: 9}[dtype]
    words = torch.arange(1 << 16)
    registers = {"$4": words | words.flip(0) << 16}
    for line in re.findall(r"([^;{}]+);", mxfp4_experts.instructions(lowest)):
        if line.strip().startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        target, *operands = (each.strip() for each in rest.split(","))
        read = [registers[each] if each in registers else torch.tensor(int(each, 0)) for each in operands]
        match name:
            case "shl.b32":
                made = read[0] << read[1]
            case "shr.b32":
                made = read[0] >> read[1]
            case "and.b32":
                made = read[0] & read[1]
            case "lop3.b32":
                assert int(read.pop()) == 0xEA  # (0xF0 & 0xCC) | 0xAA
                made = read[0] & read[1] | read[2]
            case _:
                pytest.fail(f"not known here: {line}")
        registers[target] = made & 0xFFFFFFFF
    values = torch.tensor([value(code) for code in range(16)])
    small = 2.0 ** -(126 if dtype == torch.bfloat16 else 14)
    for block in range(4):
        for half, word in ((0, words), (16, words.flip(0))):
            bits = (registers[f"${block}"] >> half & 0xFFFF).to(torch.int16)
            assert torch.equal(bits.view(dtype).float() / small, values[word >> 4 * block & 15])


def test_a_token_has_the_same_sum_with_other_tokens_beside_it() -> None:
    need_cpu_kernels()
    x, gate_up, down, chosen, weights = drawn_layer((130, 5, 2, 96, 64), torch.float32, CPU)
    packed = PackedMxfp4Experts(gate_up, down, LIMIT, ALPHA)
    together = packed.sums(x, chosen, weights)
    for token in (0, 64, 129):
        alone = packed.sums(x[token : token + 1], chosen[token : token + 1], weights[token : token + 1])
        assert torch.equal(alone[0], together[token])


def test_a_token_that_is_no_number_leaves_the_others_as_they_are(device: torch.device) -> None:
    x, gate_up, down, chosen, weights = drawn_layer((3, 4, 2, 96, 64), torch.float32, device)

    def sums() -> list[torch.Tensor]:
        by_kernels = sum_of_mxfp4_experts(x, pack(gate_up), pack(down), chosen.int(), weights, limit=LIMIT, alpha=ALPHA)
        if device.type == "cuda":
            return [by_kernels]
        return [by_kernels, PackedMxfp4Experts(gate_up, down, LIMIT, ALPHA).sums(x, chosen, weights)]

    before = sums()
    x[1] = float("nan")
    for old, new in zip(before, sums(), strict=True):
        assert torch.equal(new[::2], old[::2])
        assert new[1].isnan().all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, gate_up, down, chosen, weights = drawn_layer((3, 4, 2, 96, 64), torch.float32, device)
    packed, chosen = (pack(gate_up), pack(down)), chosen.int()
    for kind, match, call in (
        (ValueError, "does not fit experts of 96 and 64", lambda: (x[:, :64], *packed, chosen, weights)),
        (ValueError, "do not fit 3 rows", lambda: (x, *packed, chosen[:2], weights)),
        (ValueError, "contiguous", lambda: (x, *packed, chosen.t().contiguous().t(), weights)),
        (TypeError, "experts int32", lambda: (x, *packed, chosen.long(), weights)),
    ):
        with pytest.raises(kind, match=match):
            sum_of_mxfp4_experts(*call(), limit=LIMIT, alpha=ALPHA)
    gate_up.scales[0, 1, 2] = 129
    with pytest.raises(ValueError, match=r"scales up to 2, not 2\^2"):
        pack(gate_up)


def test_what_does_not_fit_the_operations_in_c_is_refused() -> None:
    need_cpu_kernels()
    x, gate_up, down, chosen, weights = drawn_layer((3, 4, 2, 96, 64), torch.float32, CPU)
    packed = PackedMxfp4Experts(gate_up, down, LIMIT, ALPHA)
    for wrong in (4, -1, -2):
        with pytest.raises(ValueError, match="not among the 4"):
            packed.sums(x, torch.full_like(chosen, wrong), weights)
    with pytest.raises(ValueError, match=r"of 3 tokens are \[tokens, k\]"):
        packed.sums(x, chosen[:2], weights)
    with pytest.raises(TypeError, match="float32"):
        packed.sums(x.bfloat16(), chosen, weights)
    with pytest.raises(ValueError, match="experts in MXFP4 with 96 inputs and 128 outputs"):
        PackedMxfp4Experts(gate_up._replace(scales=gate_up.scales[:, 1:]), down, LIMIT, ALPHA)
    with pytest.raises(TypeError, match="codes and scales uint8"):
        PackedMxfp4Experts(gate_up._replace(scales=gate_up.scales.int()), down, LIMIT, ALPHA)
    with pytest.raises(ValueError, match="are contiguous"):
        PackedMxfp4Experts(gate_up, down._replace(bias=torch.randn(96, 4).t()), LIMIT, ALPHA)

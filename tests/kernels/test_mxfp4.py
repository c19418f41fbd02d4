"""Experts in MXFP4 by Triton kernels against an oracle in float64, whatever tokens choose."""

import re
from typing import Any

import pytest
import torch
from pagewise_kernels import mxfp4_experts
from pagewise_kernels.mxfp4_experts import pack, sum_of_mxfp4_experts

from tests.kernels.mxfp4_layers import (
    ALPHA,
    LIMIT,
    SHAPES,
    TOLERANCE,
    dequantised,
    drawn_layer,
    error,
    oracle,
    value,
)

REAL: list[Any] = [pytest.param((tokens, 32, 4, 2880, 2880), marks=pytest.mark.gpu) for tokens in (1, 3, 64, 300, 2000)]


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


def test_a_token_that_is_no_number_leaves_the_others_as_they_are(device: torch.device) -> None:
    x, gate_up, down, chosen, weights = drawn_layer((3, 4, 2, 96, 64), torch.float32, device)

    def sums() -> torch.Tensor:
        return sum_of_mxfp4_experts(x, pack(gate_up), pack(down), chosen.int(), weights, limit=LIMIT, alpha=ALPHA)

    before = sums()
    x[1] = float("nan")
    found = sums()
    assert torch.equal(found[::2], before[::2])
    assert found[1].isnan().all()


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

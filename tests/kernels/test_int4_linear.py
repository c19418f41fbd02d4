"""Linear layers in four bits by a Triton kernel against float64."""

import re
from typing import Any

import pytest
import torch
from pagewise_kernels.int4_linear import instructions, int4_linear, pack, unpack

from tests.kernels.int4_layers import dequantised, drawn

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Errors of results in each type, relative to the largest of them."""
REAL: list[Any] = [
    pytest.param(rows, 4096, 6144, 128, scattered, marks=pytest.mark.gpu)
    for rows, scattered in ((1, False), (16, True), (64, False), (500, False))
]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("rows", "ins", "outs", "group", "scattered"),
    [(1, 64, 40, 32, False), (17, 300, 33, 64, False), (3, 256, 70, 128, True), (2, 96, 8, 96, True),
     (5, 1024, 40, 128, False), (0, 64, 8, 64, False), *REAL],
)  # fmt: skip
def test_the_kernel_multiplies_by_codes_with_scales_and_zeros(
    rows: int, ins: int, outs: int, group: int, scattered: bool, dtype: torch.dtype, device: torch.device
) -> None:
    codes, scales, zeros, group_of = drawn(outs, ins, group, zeros=rows != 5, scattered=scattered)
    scales = scales.to(dtype).float()
    parts = codes.to(device), scales.to(device), None if zeros is None else zeros.to(device), group_of.to(device)
    assert torch.allclose(unpack(pack(*parts, dtype)), dequantised(*parts).float(), rtol=1e-6)
    x = torch.randn(rows, ins + 3, device=device).to(dtype)[:, :ins]
    bias = torch.randn(outs, device=device).to(dtype) if rows % 2 else None
    found = int4_linear(x, pack(*parts, dtype), bias)
    assert found.dtype == dtype
    expected = x.double() @ dequantised(*parts).t() + (0 if bias is None else bias.double())
    assert rows == 0 or float((found.double() - expected).abs().max()) <= TOLERANCE[dtype] * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_instructions_put_every_code_into_a_number(dtype: torch.dtype) -> None:
    """The interpreter cannot run them, so the first two run here, on all words; the others are sums and products."""
    words = torch.arange(1 << 16)
    for block in range(4):
        text = instructions(dtype, block)
        shift, mask, bits = re.findall(r"\$1, (\d+);.*code, code, (\d+), (\d+), 0xea", text)[0]
        made = (words | words.flip(0) << 16) >> int(shift) & int(mask) | int(bits)
        for half, word in ((0, words), (16, words.flip(0))):
            numbers = (made >> half & 0xFFFF).to(torch.int16).view(dtype).float()
            least = 128 if dtype == torch.bfloat16 else 1024
            assert torch.equal(numbers - least, (word >> 4 * block & 15).float())
        ones, nothing = (int(one) for one in re.findall(r"one, (\d+); mov.b32 none, (\d+);", text)[0])
        pair = torch.tensor([ones, nothing]).to(torch.int32).view(dtype).tolist()
        assert pair == [1, 1, 0, 0]
        assert nothing == 0x80008000, "a sum with minus zero keeps the sign of zero"


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    parts = [None if part is None else part.to(device) for part in drawn(8, 64, 32, zeros=True, scattered=False)]
    weight = pack(*parts, torch.float32)  # type: ignore[arg-type, call-arg]
    x = torch.zeros(1, 64, device=device)
    for kind, match, call in (
        (ValueError, "rows of 64 inputs", lambda: (x[:, :63], weight)),
        (ValueError, "each of 8 outputs", lambda: (x, weight, torch.zeros(7, device=device))),
        (TypeError, "of one type", lambda: (x.half(), weight)),
    ):
        with pytest.raises(kind, match=match):
            int4_linear(*call())
    parts[1] = torch.full((8, 2), 1e6, device=device)
    with pytest.raises(ValueError, match=r"not finite in torch\.float16"):
        pack(*parts, torch.float16)  # type: ignore[arg-type, call-arg]

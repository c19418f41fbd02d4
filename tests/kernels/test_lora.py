"""LoRA of mixed batches against a loop over tokens."""

from typing import Any

import pytest
import torch
from pagewise_kernels.lora import LEAST_RANK, LoraLayer, LoraTiles, add_lora, padded_rank

TOLERANCE: dict[torch.dtype, Any] = {
    torch.float32: {"atol": 1e-4, "rtol": 1e-4},
    torch.bfloat16: {"atol": 0.1, "rtol": 0.05},
}


def tiles_of(slots: list[int], rows: int, device: torch.device) -> LoraTiles:
    """Tiles as the executor makes them, and two that are not used."""
    order: list[int] = []
    tiles: list[list[int]] = []
    for slot in sorted(set(slots) - {-1}):
        tokens = [token for token, own in enumerate(slots) if own == slot]
        for start in range(0, len(tokens), rows):
            piece = tokens[start : start + rows]
            tiles.append([slot, len(order), len(order) + len(piece)])
            order += piece
    tiles += [[-1, 0, 0], [-1, 0, 0]]
    ints = {"dtype": torch.int32, "device": device}
    return LoraTiles(torch.tensor(tiles, **ints), torch.tensor(order, **ints), rows)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("ins", "ends", "rank", "rows"),
    [
        (48, (48, 72, 96), 7, LEAST_RANK),
        (80, (48,), 16, LEAST_RANK),
        (1100, (70, 100), 4, LEAST_RANK),
        (48, (80, 160), 20, 64),
    ],
)
def test_each_token_gets_what_its_adapter_adds(
    ins: int, ends: tuple[int, ...], rank: int, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(3)
    slots = [2, -1, 0, 0, 2, 2, -1, *[0] * 21, 1]
    padded, outs, parts = padded_rank(rank), ends[-1], len(ends)
    a, b = torch.zeros(3, parts * padded, ins, device=device), torch.zeros(3, outs, padded, device=device)
    a.view(3, parts, padded, ins)[:, :, :rank] = torch.randn(3, parts, rank, ins, device=device) / ins**0.5
    b[:, :, :rank] = torch.randn(3, outs, rank, device=device)
    x, y = (torch.randn(len(slots), size, device=device) for size in (ins, outs))
    a, b, x, y = (each.to(dtype) for each in (a, b, x, y))
    expected = y.float().clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            shrunk = (a[slot].float() @ x[token].float()).view(parts, padded)
            for part, (start, stop) in enumerate(zip((0, *ends), ends, strict=False)):
                expected[token, start:stop] += b[slot, start:stop].float() @ shrunk[part]
    add_lora(x, y, LoraLayer(a, b, ends), tiles_of(slots, rows, device))
    torch.testing.assert_close(y.float(), expected, **TOLERANCE[dtype])
    assert torch.equal(y[1].float(), expected[1]), "a token without an adapter has changed"


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, y = torch.zeros(4, 32, device=device), torch.zeros(4, 48, device=device)
    a, b = torch.zeros(2, 16, 32, device=device), torch.zeros(2, 48, 16, device=device)
    tiles = tiles_of([0, 0, 1, 1], 16, device)
    with pytest.raises(ValueError, match="do not fit"):
        add_lora(x[:, :16], y, LoraLayer(a, b, (48,)), tiles)
    with pytest.raises(ValueError, match="parts of rank"):
        LoraLayer(a, b, (24, 48))
    with pytest.raises(TypeError, match="one floating-point type"):
        add_lora(x, y.half(), LoraLayer(a, b, (48,)), tiles)

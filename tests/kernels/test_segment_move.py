"""Tokens that move: keys are rotated by the distance, values are copied, float8 is scaled anew."""

import pytest
import torch
from pagewise_executor.kv.segment_mover import KeyRotation
from pagewise_kernels.kv_layer import KVLayer, Scales
from pagewise_kernels.kv_write import write_kv
from pagewise_kernels.segment_move import move_tokens

BLOCK_SIZE, HEADS, DIM = 4, 3, 20


def _slots(tokens: int, num_blocks: int, block_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots to move from, some of them twice, and others to move to."""
    order = torch.randperm(num_blocks * block_size, device=device)
    sources = order[: tokens - 2]
    return torch.cat([sources, sources[:2]]), order[tokens : 2 * tokens]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [DIM // 2, 6, 0])
@pytest.mark.parametrize("heads_first", [False, True])
def test_keys_are_rotated_and_values_copied(
    dtype: torch.dtype, interleaved: bool, pairs: int, heads_first: bool, device: torch.device
) -> None:
    shape = (9, HEADS, BLOCK_SIZE, DIM) if heads_first else (9, BLOCK_SIZE, HEADS, DIM)
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    if heads_first:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    sources, targets = _slots(11, 9, BLOCK_SIZE, device)
    rotation = KeyRotation(torch.rand(pairs, device=device), interleaved)
    cos, sin = rotation.angles(torch.randint(0, 30_000, (11,), device=device))
    flat_keys, flat_values = keys.flatten(0, 1).clone(), values.flatten(0, 1).clone()
    expected = flat_keys.clone()
    expected[targets] = rotation.rotate(flat_keys[sources].float(), cos, sin).to(dtype)
    flat_values[targets] = flat_values[sources]
    move_tokens(KVLayer(keys, values), sources, targets, cos, sin, interleaved=interleaved)
    # The products and the sum of a rotation may be rounded together.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(keys.flatten(0, 1), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(values.flatten(0, 1), flat_values)


def test_fp8_keys_are_scaled_anew(device: torch.device) -> None:
    k, v = (torch.randn(6, 2, 16, device=device) * 100 for _ in range(2))
    keys, values = (torch.zeros(4, 4, 2, 16, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scales = Scales(*(torch.zeros(4, 4, 2, device=device) for _ in range(2)))
    layer = KVLayer(keys, values, scales)
    write_kv(k, v, layer, torch.arange(6, device=device))
    rotation = KeyRotation(torch.rand(8, device=device))
    cos, sin = rotation.angles(torch.full((6,), 1000, device=device))
    move_tokens(layer, torch.arange(6, device=device), torch.arange(8, 14, device=device), cos, sin)

    def read(pool: torch.Tensor, scale: torch.Tensor, start: int) -> torch.Tensor:
        at = slice(start, start + 6)
        return pool.float().flatten(0, 1)[at] * scale.flatten(0, 1)[at][..., None]

    moved = read(keys, scales.keys, 8)
    wanted = rotation.rotate(read(keys, scales.keys, 0), cos, sin)
    torch.testing.assert_close(moved, wanted, atol=float(wanted.abs().max()) / 400, rtol=0.07)
    assert torch.equal(read(values, scales.values, 8), read(values, scales.values, 0))


def test_what_does_not_fit_is_refused() -> None:
    pool = torch.zeros(4, 2, 2, 16)
    layer = KVLayer(pool, pool)
    slots, angles = torch.arange(3), torch.zeros(3, 8)
    with pytest.raises(ValueError, match="not of the same tokens"):
        move_tokens(layer, slots, slots[:2], angles, angles)
    with pytest.raises(ValueError, match="9 pairs of elements are not in a head of 16"):
        move_tokens(layer, slots, slots, torch.zeros(3, 9), torch.zeros(3, 9))
    with pytest.raises(TypeError, match="int32 or int64"):
        move_tokens(layer, slots.float(), slots, angles, angles)
    with pytest.raises(TypeError, match="KV in eight bits comes with scales"):
        KVLayer(pool, pool, Scales(pool, pool))
    with pytest.raises(ValueError, match="scales are float32"):
        KVLayer(*(pool.to(torch.float8_e4m3fn) for _ in range(2)), Scales(pool, pool))

"""KV write, block copies, norms, RoPE and SiLU·mul against their oracles."""

from typing import Any

import numpy as np
import pytest
import torch
from pagewise_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from pagewise_kernels.cpu.small_blocks import SmallBlocks
from pagewise_kernels.decode_inputs import decode_inputs
from pagewise_kernels.kv_int4 import unpack
from pagewise_kernels.kv_layer import FP8, GROUP, INT4, INT8, RECORD, KVLayer, Scales
from pagewise_kernels.kv_write import write_kv
from pagewise_kernels.matmul import linear
from pagewise_kernels.quantised import quantise_rows
from pagewise_kernels.rms_norm import rms_norm, rounded_rms_norm
from pagewise_kernels.rope_write_kv import rope_write_kv
from pagewise_kernels.silu_mul import silu_mul

from tests.cpu_kernels import need_cpu_kernels
from tests.kernels import oracles

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE: dict[torch.dtype, Any] = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


def sum_errors(sums: torch.Tensor, terms: int) -> torch.Tensor:
    """Bounds of the rounding errors of float32 sums of so many random products, which have a standard deviation of 1.

    Partial sums grow like a random walk, to sqrt(k / terms) after k products or to the sum itself if that is larger,
    and each addition rounds by a relative error uniform up to 2^-24. So errors have a standard deviation of about
    2^-24 sqrt(terms / 6) max(1, sum). The largest of 200,000 errors for 4096 products was 5.0 of them; 7 are allowed.
    """
    return 7 * 2**-24 * (terms / 6) ** 0.5 * sums.abs().clamp(min=1)


REAL = [pytest.param(True, marks=pytest.mark.gpu), False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("real", REAL)
def test_kv_goes_where_the_slots_say(dtype: torch.dtype, real: bool, device: torch.device) -> None:
    tokens, heads, dim, block_size, num_blocks = (5000, 8, 128, 16, 400) if real else (9, 3, 20, 4, 7)
    packed = torch.randn(tokens, 2 * heads, dim, device=device).to(dtype)
    k, v = packed[:, :heads], packed[:, heads:]
    keys, values = (torch.zeros(num_blocks, block_size, heads, dim, device=device, dtype=dtype) for _ in range(2))
    slots = torch.randperm(num_blocks * block_size, device=device)[:tokens]
    slots[2] = -1  # a row that pads
    write_kv(k, v, KVLayer(keys, values), slots)
    written = torch.arange(tokens, device=device) != 2
    for pool, new in ((keys, k), (values, v)):
        flat = pool.flatten(0, 1)
        assert torch.equal(flat[slots[written]], new[written])
        untouched = torch.ones(len(flat), dtype=torch.bool, device=device)
        untouched[slots[written]] = False
        assert not flat[untouched].any()


@pytest.mark.parametrize("stored_as", [FP8, INT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_in_eight_bits_is_scaled_by_token_and_head(
    dtype: torch.dtype, stored_as: torch.dtype, device: torch.device
) -> None:
    k, v = (torch.randn(6, 2, 16, device=device).to(dtype) * 100 for _ in range(2))
    k[3, 1] = 0.0
    pool = [torch.zeros(4, 2, 2, 16, device=device).to(stored_as) for _ in range(2)]
    scales = Scales(*(torch.zeros(4, 2, 2, device=device) for _ in range(2)))
    slots = torch.tensor([7, 0, 3, 4, 5, 1], device=device)
    write_kv(k, v, KVLayer(*pool, scales), slots)
    for stored, scale, new in zip(pool, (scales.keys, scales.values), (k, v), strict=True):
        back = stored.float().flatten(0, 1)[slots] * scale.flatten(0, 1)[slots][..., None]
        if stored_as == INT8:
            assert ((back - new.float()).abs() <= 0.5001 * scale.flatten(0, 1)[slots][..., None]).all()
        else:  # the smallest numbers are multiples of 2^-9 times the scale
            torch.testing.assert_close(back, new.float(), atol=float(scale.max()) / 512, rtol=0.07)


def test_kv_that_does_not_fit_is_refused() -> None:
    new, layer = torch.zeros(3, 2, 8), KVLayer(*torch.zeros(2, 4, 2, 2, 8))
    slots = torch.arange(3)
    with pytest.raises(ValueError, match="do not go into a pool"):
        write_kv(new, new, layer, torch.arange(4))
    with pytest.raises(TypeError, match="slots are int32 or int64"):
        write_kv(new, new, layer, slots.float())
    with pytest.raises(TypeError, match=r"does not take torch\.float16"):
        write_kv(new.half(), new.half(), layer, slots)
    with pytest.raises(ValueError, match="next to each other"):
        write_kv(new.transpose(1, 2).contiguous().transpose(1, 2), new, layer, slots)


@pytest.mark.parametrize(
    "shape", [(1, 7, 4, 3, 20), (3, 5, 3), (4, 6, 5, 1, 3), pytest.param((64, 300, 16, 8, 128), marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("blocks_first", [False, True])
def test_blocks_are_copied(
    shape: tuple[int, ...], dtype: torch.dtype, blocks_first: bool, device: torch.device
) -> None:
    pool = torch.randint(0, 100, shape, device=device).to(dtype)
    if blocks_first:  # all parts of a block lie together
        pool = pool.transpose(0, 1).contiguous().transpose(0, 1)
    before = pool.clone()
    copy_blocks(pool, torch.tensor([[0, 3], [1, 2]], device=device))
    expected = before.clone()
    expected[:, 3], expected[:, 2] = before[:, 0], before[:, 1]
    assert torch.equal(pool, expected)
    size = pool[:, 0].numel() * pool.element_size()
    staged = torch.zeros(3, size + 5, dtype=torch.uint8, device=device)[:, :size]
    blocks = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    gather_blocks(pool, blocks, staged)
    content = pool[:, blocks.long()].transpose(0, 1).contiguous()
    assert torch.equal(staged, content.view(torch.uint8).view(3, size))
    empty = torch.zeros_like(pool)
    scatter_blocks(empty, blocks, staged)
    assert torch.equal(empty[:, blocks.long()], pool[:, blocks.long()])
    assert not empty[:, [1, 3]].any()


@pytest.mark.gpu
def test_blocks_go_to_pinned_memory_and_back(device: torch.device) -> None:
    pool = torch.randn(4, 100, 16, 8, 128, device=device)
    staged = torch.zeros(10, pool[:, 0].numel() * 4, dtype=torch.uint8, pin_memory=True)
    blocks = torch.randperm(100, device=device)[:10]
    gather_blocks(pool, blocks, staged)
    torch.cuda.synchronize()
    content = pool[:, blocks].transpose(0, 1).contiguous()
    assert torch.equal(staged.to(device), content.view(torch.uint8).view(10, -1))
    back = torch.zeros_like(pool)
    scatter_blocks(back, blocks, staged)
    assert torch.equal(back[:, blocks], pool[:, blocks])


def test_blocks_that_do_not_fit_are_refused() -> None:
    pool = torch.zeros(2, 4, 2, 3)
    with pytest.raises(ValueError, match=r"pairs are \[n, 2\]"):
        copy_blocks(pool, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match="int32 or int64"):
        gather_blocks(pool, torch.zeros(2), torch.zeros(2, 48, dtype=torch.uint8))
    with pytest.raises(ValueError, match="2 blocks of 48 bytes do not go into"):
        gather_blocks(pool, torch.zeros(2, dtype=torch.int64), torch.zeros(2, 47, dtype=torch.uint8))
    with pytest.raises(ValueError, match="has to be contiguous"):
        copy_blocks(pool.transpose(2, 3), torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (3, 100), (1, 1), pytest.param((4096, 4096), marks=pytest.mark.gpu)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, int], with_residual: bool, device: torch.device) -> None:
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1], device=device).to(dtype)
    if not with_residual:
        result = rms_norm(x, weight, 1e-6, offset=1.0)
        torch.testing.assert_close(result.double(), oracles.rms_norm(x, weight, 1e-6, 1.0), **TOLERANCE[dtype])
        return
    total = x + residual
    result = rms_norm(x, weight, 1e-6, residual=residual, out=x)
    assert result is x
    # The interpreter cuts off where bfloat16 is rounded.
    torch.testing.assert_close(residual.float(), total.float(), atol=0, rtol=0.008 if dtype == torch.bfloat16 else 0)
    total = residual.clone()
    torch.testing.assert_close(result.double(), oracles.rms_norm(total, weight, 1e-6), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (3, 100), pytest.param((4096, 4096), marks=pytest.mark.gpu)])
def test_a_rounded_norm_is_the_norm_and_then_the_quantisation(
    dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    x[1], residual[1], x[2, 3] = 0.0, 0.0, float("nan")
    weight = torch.randn(shape[1], device=device).to(dtype)
    other = residual.clone()
    values, scales = rounded_rms_norm(x, weight, 1e-6, residual=residual)
    wanted, wanted_scales = quantise_rows(rms_norm(x, weight, 1e-6, residual=other), FP8)
    # Compiled, the two kernels add up a row's squares in different orders, so a value between two of float8 may go to
    # either.
    compiled = device.type == "cuda"
    torch.testing.assert_close(scales, wanted_scales[:, 0], rtol=1e-6 if compiled else 0, atol=0, equal_nan=True)
    bits, wanted_bits = (each.view(torch.uint8).int() for each in (values, wanted))
    assert int((bits - wanted_bits).abs().max()) <= compiled
    assert float((bits != wanted_bits).float().mean()) <= (1e-3 if compiled else 0)
    torch.testing.assert_close(residual, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(3, 1, 16), (4, 2, 20), (1, 1, 2), pytest.param(32, 8, 128, marks=pytest.mark.gpu)]
)
def test_heads_are_normalised_and_rotated_and_kv_goes_into_the_pool(
    dtype: torch.dtype, with_norm: bool, heads: int, kv_heads: int, dim: int, device: torch.device
) -> None:
    tokens, rotated, half = 5, heads + kv_heads, dim // 2
    wide = torch.randn(tokens, rotated + kv_heads + 2, dim, device=device).to(dtype)
    before, qkv = wide.clone(), wide[:, : rotated + kv_heads]
    weight = torch.randn(rotated, dim, device=device).to(dtype) if with_norm else None
    angles = torch.randn(30, half, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.tensor([29, 0, 3, 3, 17], device=device)
    keys, values = (torch.zeros(4, 3, kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
    slots = torch.tensor([7, 0, -1, 11, 5], device=device)  # one of them pads
    rope_write_kv(qkv, positions, cos, sin, KVLayer(keys, values), slots, head_norm=weight, eps=1e-5)
    expected = before[:, :rotated]
    if weight is not None:
        expected = oracles.rms_norm(expected, weight, 1e-5)
    expected = oracles.rope(expected, cos[positions], sin[positions])
    tolerance = {name: 2 * value for name, value in TOLERANCE[dtype].items()}  # rounded twice
    torch.testing.assert_close(qkv[:, :heads].double(), expected[:, :heads], **tolerance)
    assert torch.equal(wide[:, heads:], before[:, heads:])
    written = slots >= 0
    held = keys.flatten(0, 1)[slots[written]]
    torch.testing.assert_close(held.double(), expected[written, heads:], **tolerance)
    assert torch.equal(values.flatten(0, 1)[slots[written]], before[written, rotated : rotated + kv_heads])
    for pool in (keys, values):
        untouched = torch.ones(12, dtype=torch.bool, device=device)
        untouched[slots[written]] = False
        assert not pool.flatten(0, 1)[untouched].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_keys_are_scaled_like_others_for_an_fp8_pool(dtype: torch.dtype, device: torch.device) -> None:
    heads, kv_heads, dim, block_size = 3, 2, 16, 2
    qkv = 100 * torch.randn(4, heads + 2 * kv_heads, dim, device=device).to(dtype)
    v = qkv[:, -kv_heads:].clone()
    angles, positions = torch.randn(9, dim // 2, device=device), torch.tensor([8, 1, 0, 4], device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([5, 2, 3, 0], device=device)
    shape = (3, block_size, kv_heads, dim)
    plain = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]
    rope_write_kv(qkv.clone(), positions, cos, sin, KVLayer(*plain), slots)
    pools, scales = [], []
    for fused in (True, False):
        pool = [torch.zeros(shape, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
        scale = Scales(*(torch.zeros(shape[:3], device=device) for _ in range(2)))
        if fused:
            rope_write_kv(qkv, positions, cos, sin, KVLayer(*pool, scale), slots)
        else:
            write_kv(plain[0].flatten(0, 1)[slots], v, KVLayer(*pool, scale), slots)
        pools.append([tensor.float() for tensor in pool])
        scales.append(scale)
    for found, expected in zip(pools[0], pools[1], strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(scales[0].keys, scales[1].keys)
    assert torch.equal(scales[0].values, scales[1].values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 10), (2, 6002), pytest.param((4096, 28672), marks=pytest.mark.gpu)])
def test_silu_mul(dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    gate_up = torch.randn(shape, device=device).to(dtype)
    torch.testing.assert_close(silu_mul(gate_up).double(), oracles.silu_mul(gate_up), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "size_in", "size_out"), [(1, 40, 50), (37, 96, 33), pytest.param(300, 4096, 6144, marks=pytest.mark.gpu)]
)
def test_linear_equals_the_oracle_and_rows_are_independent(
    dtype: torch.dtype, rows: int, size_in: int, size_out: int, device: torch.device
) -> None:
    x = torch.randn(rows, size_in, device=device).to(dtype)
    weight = (torch.randn(size_out, size_in, device=device) / size_in**0.5).to(dtype)
    bias = torch.randn(size_out, device=device).to(dtype)
    result = linear(x, weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    tolerance = TOLERANCE[dtype]
    if dtype == torch.float32:
        tolerance = tolerance | {"atol": float(sum_errors(torch.ones(1), size_in))}
    torch.testing.assert_close(result.double(), expected, **tolerance)
    assert torch.equal(linear(x[rows // 2 :], weight, bias), result[rows // 2 :])
    torch.testing.assert_close(linear(x, weight).double(), x.double() @ weight.double().T, **tolerance)


def test_decode_inputs(device: torch.device) -> None:
    tables = torch.tensor([[7, 8, 9], [1, 2, 3], [0, 0, 0]], dtype=torch.int32, device=device)
    last = torch.tensor([50, 60, 70], device=device)
    rows = torch.tensor([1, 0, 2, 1], dtype=torch.int32, device=device)
    lengths = torch.tensor([5, 12, 0, 1], dtype=torch.int32, device=device)
    ids, positions, slots = torch.full((3, 4), 99, device=device)
    decode_inputs(rows, lengths, tables, last, block_size=4, ids=ids, positions=positions, slots=slots)
    assert ids.tolist() == [60, 50, 0, 60]
    assert positions.tolist() == [4, 11, 0, 0]
    assert slots.tolist() == [2 * 4 + 0, 9 * 4 + 3, -1, 1 * 4]
    known = torch.tensor([-1, 33, 44, 0], dtype=torch.int32, device=device)
    decode_inputs(rows, lengths, tables, last, block_size=4, ids=ids, positions=positions, slots=slots, known=known)
    assert ids.tolist() == [60, 33, 0, 0]


def test_decode_inputs_of_layers_in_several_pools_and_of_rings(device: torch.device) -> None:
    tables = torch.tensor([[[7, 8], [1, 2]], [[5, 6], [3, 4]]], dtype=torch.int32, device=device)
    rows = torch.tensor([1, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([5, 12], dtype=torch.int32, device=device)
    given = {"last_tokens": torch.tensor([50, 60], device=device), "block_size": 4, "ring": True}
    ids, positions = torch.full((2, 2), 99, device=device)
    slots = torch.full((2, 3), 99, device=device)
    decode_inputs(rows, lengths, tables, ids=ids, positions=positions, slots=slots[:, :2], **given)
    assert (ids.tolist(), positions.tolist()) == ([60, 50], [4, 11])
    assert slots.tolist() == [[2 * 4 + 0, 7 * 4 + 3, 99], [4 * 4 + 0, 5 * 4 + 3, 99]], "block 2 is entry 0"
    with pytest.raises(ValueError, match="do not fit tables"):
        decode_inputs(rows, lengths, tables, ids=ids, positions=positions, slots=slots[0, :2], **given)


def test_wrong_shapes_are_refused() -> None:
    x = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="rms_norm takes"):
        rms_norm(x, torch.zeros(7), 1e-6)
    with pytest.raises(ValueError, match="are alike"):
        rms_norm(x, torch.zeros(8), 1e-6, residual=torch.zeros(4, 8, dtype=torch.float16))
    qkv, pool, ids = torch.zeros(4, 5, 8), torch.zeros(2, 3, 2, 2, 8), torch.arange(4)
    layer = KVLayer(*pool)
    angles = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="rope_write_kv takes"):
        rope_write_kv(qkv[:, :4], ids, angles, angles, layer, ids)
    with pytest.raises(ValueError, match=r"cos and sin \[max_positions, 4\]"):
        rope_write_kv(qkv, ids, angles[:, :3], angles[:, :3], layer, ids)
    with pytest.raises(ValueError, match="positions are int64"):
        rope_write_kv(qkv, ids.int(), angles, angles, layer, ids)
    with pytest.raises(ValueError, match=r"head_norm is \[3, 8\]"):
        rope_write_kv(qkv, ids, angles, angles, layer, ids, head_norm=torch.zeros(8))
    with pytest.raises(TypeError, match=r"does not take torch\.float32"):
        rope_write_kv(qkv, ids, angles, angles, KVLayer(*pool.half()), ids)
    with pytest.raises(ValueError, match="linear takes"):
        linear(x, torch.zeros(3, 7))
    with pytest.raises(TypeError, match="of one floating-point type"):
        linear(x, torch.zeros(3, 8, dtype=torch.float16))
    ids = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"ids is torch\.int64"):
        decode_inputs(ids, ids, x, ids, block_size=4, ids=ids, positions=ids, slots=ids)
    with pytest.raises(ValueError, match="silu_mul takes"):
        silu_mul(torch.zeros(4, 7))
    with pytest.raises(ValueError, match="run on"):
        silu_mul(torch.zeros(4, 8, device="meta"))


@pytest.mark.interpreted
@pytest.mark.parametrize("head_dim", [32, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_in_four_bits_is_written_as_by_the_operations_in_c(dtype: torch.dtype, head_dim: int) -> None:
    """Alone, and by the kernel that rotates keys."""
    need_cpu_kernels()
    heads, kv_heads, tokens, eps = 3, 2, 4, 1e-6
    qkv = 10 * torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    qkv[1, heads] = 0.3
    qkv[2, -1] = 1.0000001e-3
    norm = torch.randn(heads + kv_heads, head_dim).to(dtype)
    angles, positions = torch.randn(9, head_dim // 2), torch.tensor([8, 1, 0, 4])
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([5, 2, 3, 0])
    rotated = [torch.zeros(3, 2, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    rope_write_kv(qkv.clone(), positions, cos, sin, KVLayer(*rotated), slots, head_norm=norm, eps=eps)
    k, v = (part.flatten(0, 1)[slots] for part in rotated)
    size = head_dim // GROUP * RECORD
    both = [torch.zeros(3, 2, kv_heads, size, dtype=torch.uint8).view(INT4) for _ in range(2)]
    write_kv(k, v, KVLayer(*both), slots)
    fused = [torch.zeros(3, 2, kv_heads, size, dtype=torch.uint8).view(INT4) for _ in range(2)]
    rope_write_kv(qkv, positions, cos, sin, KVLayer(*fused), slots, head_norm=norm, eps=eps)
    blocks = SmallBlocks(kv_heads * head_dim * dtype.itemsize, head_dim, dtype, 4)
    for new, *pools in zip((k, v), both, fused, strict=True):
        expected = np.zeros((tokens, blocks.num_bytes), np.uint8)
        blocks.shrink(new.flatten(1).view(torch.uint8).numpy(), expected)
        for pool in pools:
            found = pool.view(torch.uint8).flatten(0, 1)
            assert torch.equal(found[slots].flatten(1), torch.from_numpy(expected))
            assert not found[[1, 4]].any()


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_makes_its_group_in_four_bits_nan(bad: float) -> None:
    new = torch.randn(1, 1, 64)
    new[0, 0, 5] = bad
    pool = [torch.zeros(1, 1, 1, 2 * RECORD, dtype=torch.uint8).view(INT4) for _ in range(2)]
    write_kv(new, new, KVLayer(*pool), torch.zeros(1, dtype=torch.int64))
    assert unpack(pool[0]).isnan().flatten().tolist() == [True] * 32 + [False] * 32

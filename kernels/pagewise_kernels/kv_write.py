"""Writes the K and V of a step into the paged pool, through the slot mapping."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.kv_int4 import store_int4
from pagewise_kernels.kv_layer import INT8, KVLayer
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.shapes import power_of_two

FP8_MOST, INT8_MOST = 448.0, 127.0


@triton.jit
def round_to_e4m3(value):
    """The nearest float32 with three bits of mantissa, ties to even.

    The interpreter's own conversion forgets the exponent when rounding up carries into it.
    """
    bits = value.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rounded_kv(value, MOST: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Round scaled K or V to numbers that float8 or int8 represents, up to ``MOST``; returns float32.

    Whole numbers are rounded to even, because conversion to an integer cuts off. Float8 is rounded by its conversion.
    """
    if MOST == 127.0:
        value = (value + 12582912.0) - 12582912.0
    elif ROUND_FIRST:
        value = round_to_e4m3(value)
    return value


@triton.jit
def write_kv_kernel(
    new_keys, new_values, keys, values, k_scales, v_scales, slots,
    stride_nk, stride_nkh, stride_nv, stride_nvh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_sb, stride_st, stride_sh,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, HAS_SCALES: tl.constexpr, MOST: tl.constexpr, ROUND_FIRST: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per token: all its heads, K and V."""
    token = tl.program_id(0).to(tl.int64)
    wait_for_predecessor(PDL)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        heads = tl.arange(0, HEADS_PADDED)
        dims = tl.arange(0, DIM)
        inside = (heads < HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(new_keys + token * stride_nk + heads[:, None] * stride_nkh + dims[None, :], mask=inside, other=0.0)
        v = tl.load(
            new_values + token * stride_nv + heads[:, None] * stride_nvh + dims[None, :], mask=inside, other=0.0
        )
        k_at = keys + block * stride_kb + offset * stride_kt + heads[:, None] * stride_kh + dims[None, :]
        v_at = values + block * stride_vb + offset * stride_vt + heads[:, None] * stride_vh + dims[None, :]
        scale_at = block * stride_sb + offset * stride_st
        if HAS_SCALES:
            wide_k, wide_v = k.to(tl.float32), v.to(tl.float32)
            k_scale = tl.maximum(tl.max(tl.abs(wide_k), 1), 1e-12) / MOST
            v_scale = tl.maximum(tl.max(tl.abs(wide_v), 1), 1e-12) / MOST
            tl.store(k_scales + scale_at + heads * stride_sh, k_scale, mask=heads < HEADS)
            tl.store(v_scales + scale_at + heads * stride_sh, v_scale, mask=heads < HEADS)
            scaled_k, scaled_v = wide_k / k_scale[:, None], wide_v / v_scale[:, None]
            scaled_k, scaled_v = rounded_kv(scaled_k, MOST, ROUND_FIRST), rounded_kv(scaled_v, MOST, ROUND_FIRST)
            tl.store(k_at, scaled_k.to(keys.dtype.element_ty), mask=inside)
            tl.store(v_at, scaled_v.to(values.dtype.element_ty), mask=inside)
        elif keys.dtype.element_ty == tl.int32:
            k_to = keys + block * stride_kb + offset * stride_kt + heads * stride_kh
            v_to = values + block * stride_vb + offset * stride_vt + heads * stride_vh
            store_int4(k_to, k.to(tl.float32), heads < HEADS, DIM, HEAD_DIM)
            store_int4(v_to, v.to(tl.float32), heads < HEADS, DIM, HEAD_DIM)
        else:
            tl.store(k_at, k, mask=inside)
            tl.store(v_at, v, mask=inside)


def most_of(layer: KVLayer) -> float:
    """Return the largest number that is stored in eight bits, which the largest of a token and head becomes."""
    return INT8_MOST if layer.dtype == INT8 else FP8_MOST


def write_kv(new_keys: torch.Tensor, new_values: torch.Tensor, layer: KVLayer, slots: torch.Tensor) -> None:
    """Write K and V of each token into its slot, block * block_size + offset; a negative slot is skipped.

    new_keys, new_values [tokens, kv_heads, head_dim]; of latents, the values are not read. slots int32 or int64
    [tokens], no two alike. In a pool of float8_e4m3fn or int8 each token and head is scaled by its own greatest value,
    which is written to the scales of the layer. In four bits it becomes records (``kv_int4``).

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    keys, values = layer.pointers
    if layer.latent:  # the same numbers are written to the same place twice
        new_values, values = new_keys, keys
    if new_keys.shape != new_values.shape or new_keys.dtype != new_values.dtype or new_values.stride(-1) != 1:
        raise ValueError(
            f"new keys and values are alike, not {new_keys.dtype} {list(new_keys.shape)} and {new_values.dtype} "
            f"{list(new_values.shape)}"
        )
    layer.check_new(new_keys, slots)
    tokens, heads, head_dim = new_keys.shape
    check_device(new_keys, new_values, layer.keys, slots)
    launch(
        write_kv_kernel,
        (tokens,),
        new_keys, new_values, keys, values, *layer.scale_pointers, slots,
        new_keys.stride(0), new_keys.stride(1), new_values.stride(0), new_values.stride(1),
        *layer.strides, *layer.strides, *layer.scale_strides,
        BLOCK_SIZE=layer.block_size, HEADS=heads, HEADS_PADDED=power_of_two(heads), HEAD_DIM=head_dim,
        DIM=power_of_two(head_dim), HAS_SCALES=layer.scales is not None, MOST=most_of(layer),
        ROUND_FIRST=interpreted(), num_warps=4 if heads * head_dim <= 2048 else 8,
    )  # fmt: skip

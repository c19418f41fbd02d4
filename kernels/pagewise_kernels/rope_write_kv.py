"""The steps between the projection of a layer and its attention: norm of the heads, RoPE, and K and V into the pool.

Rotary position embedding (Su et al., arXiv 2104.09864) with halves turned against each other as in Llama, after an
RMSNorm of each query and key where the model has one (Qwen3).
"""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.kv_int4 import store_int4
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.kv_write import most_of, rounded_kv
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.shapes import power_of_two

_TILE = 1024
"""Pairs of elements that a program turns: eight for each of its threads, of which 16 bits are one access."""


@triton.jit
def whole_heads(
    at, cos, sin, norm, is_key, is_value, eps, HALF: tl.constexpr, DIM: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Keys and values float32 [rows, DIM] as the kernel rotates them, where neighbouring elements share a record.

    ``at``, ``norm`` [rows]: their heads and weights. Each element ``x`` of a key is turned against the ``other`` of its
    pair.
    """
    kind = at.dtype.element_ty
    dims = tl.arange(0, DIM)
    in_head = (dims < 2 * HALF)[None, :]
    others = (dims + HALF) % (2 * HALF)
    inside, weighed = (is_key | is_value)[:, None] & in_head, is_key[:, None] & in_head
    x = tl.load(at[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at[:, None] + others[None, :], mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + dims % HALF).to(tl.float32)[None, :]
    s = tl.load(sin + dims % HALF).to(tl.float32)[None, :]
    a, b = x, other
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(a * a, 1) / (2 * HALF) + eps)[:, None]
        weight = tl.load(norm[:, None] + dims[None, :], mask=weighed, other=0.0).to(tl.float32)
        its_weight = tl.load(norm[:, None] + others[None, :], mask=weighed, other=0.0).to(tl.float32)
        a = ((a * scale).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
        b = ((b * scale).to(kind).to(tl.float32) * its_weight).to(kind).to(tl.float32)
    turned = tl.where((dims < HALF)[None, :], a * c - b * s, a * c + b * s)
    return tl.where(is_key[:, None], turned, x).to(kind).to(tl.float32)


@triton.jit
def rope_write_kv_kernel(
    qkv, positions, cos, sin, head_norm, keys, values, k_scales, v_scales, slots,
    stride_token, stride_head, stride_cos, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_sb,
    stride_st, stride_sh,
    eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr, MOST: tl.constexpr,
    ROUND_FIRST: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: token, ROWS of its heads (queries, then keys, then values)."""
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, HALF_PADDED)
    is_query, is_key = rows < HEADS, (rows >= HEADS) & (rows < HEADS + KV_HEADS)
    is_value = (rows >= HEADS + KV_HEADS) & (rows < HEADS + 2 * KV_HEADS)
    is_turned = (rows < HEADS + KV_HEADS)[:, None]
    in_head = (dims < HALF)[None, :]
    inside = (rows < HEADS + 2 * KV_HEADS)[:, None] & in_head
    at = qkv + token * stride_token + rows[:, None] * stride_head + dims[None, :]
    wait_for_predecessor(PDL)
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    angle_at = tl.load(positions + token) * stride_cos
    c = tl.load(cos + angle_at + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle_at + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    # Rounded after each operation, as the models do it.
    kind = qkv.dtype.element_ty
    a, b = first, second
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        weight_at = head_norm + rows[:, None] * (2 * HALF) + dims[None, :]
        weighed = is_turned & in_head
        a = (a * scale).to(kind).to(tl.float32) * tl.load(weight_at, mask=weighed, other=0.0).to(tl.float32)
        b = (b * scale).to(kind).to(tl.float32) * tl.load(weight_at + HALF, mask=weighed, other=0.0).to(tl.float32)
        a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
    first = tl.where(is_turned, a * c - b * s, first).to(kind)
    second = tl.where(is_turned, b * c + a * s, second).to(kind)
    tl.store(at, first, mask=is_query[:, None] & in_head)
    tl.store(at + HALF, second, mask=is_query[:, None] & in_head)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_head, v_head = rows - HEADS, rows - HEADS - KV_HEADS
        if keys.dtype.element_ty == tl.int32:
            k_at = keys + block * stride_kb + offset * stride_kt + k_head * stride_kh
            v_at = values + block * stride_vb + offset * stride_vt + v_head * stride_vh
            x = whole_heads(
                qkv + token * stride_token + rows * stride_head, cos + angle_at, sin + angle_at,
                head_norm + rows * (2 * HALF), is_key, is_value, eps, HALF, 2 * HALF_PADDED, HAS_NORM,
            )  # fmt: skip
            store_int4(tl.where(is_key, k_at, v_at), x, is_key | is_value, 2 * HALF_PADDED, 2 * HALF)
        else:
            k_at = keys + block * stride_kb + offset * stride_kt + k_head[:, None] * stride_kh + dims[None, :]
            v_at = values + block * stride_vb + offset * stride_vt + v_head[:, None] * stride_vh + dims[None, :]
            if HAS_SCALES:
                a, b = first.to(tl.float32), second.to(tl.float32)
                most = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1)
                own = tl.maximum(most, 1e-12) / MOST
                scale_at = block * stride_sb + offset * stride_st
                tl.store(k_scales + scale_at + k_head * stride_sh, own, mask=is_key)
                tl.store(v_scales + scale_at + v_head * stride_sh, own, mask=is_value)
                a = rounded_kv(a / own[:, None], MOST, ROUND_FIRST)
                b = rounded_kv(b / own[:, None], MOST, ROUND_FIRST)
                stored_first, stored_second = a.to(keys.dtype.element_ty), b.to(keys.dtype.element_ty)
            else:
                stored_first, stored_second = first, second
            tl.store(k_at, stored_first, mask=is_key[:, None] & in_head)
            tl.store(k_at + HALF, stored_second, mask=is_key[:, None] & in_head)
            tl.store(v_at, stored_first, mask=is_value[:, None] & in_head)
            tl.store(v_at + HALF, stored_second, mask=is_value[:, None] & in_head)


def rope_write_kv(
    qkv: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: KVLayer,
    slots: torch.Tensor, *, head_norm: torch.Tensor | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """Rotate the queries of qkv [tokens, heads + 2 · kv_heads, head_dim] in place; write keys and values into the pool.

    positions int64 [tokens]: rows of cos and sin [max_positions, head_dim / 2]; they have to be below max_positions.
    Element i of a query or key is turned against element i + head_dim / 2. ``layer`` and slots: as in ``write_kv``.
    With ``head_norm`` [heads + kv_heads, head_dim] queries and keys have an RMSNorm with these weights before. The keys
    and values in qkv do not change.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    kv_heads = layer.kv_heads
    if qkv.dim() != 3 or qkv.shape[1] <= 2 * kv_heads or qkv.shape[2] % 2:
        raise ValueError(
            "rope_write_kv takes qkv [tokens, heads + 2 * kv_heads, head_dim] with an even head_dim, not "
            f"{list(qkv.shape)} beside {kv_heads} KV heads"
        )
    tokens, rows, head_dim = qkv.shape
    half = head_dim // 2
    layer.check_new(qkv[:, rows - kv_heads :], slots)
    _check_angles(positions, cos, sin, tokens, half)
    if head_norm is not None and (head_norm.shape != (rows - kv_heads, head_dim) or not head_norm.is_contiguous()):
        raise ValueError(f"head_norm is [{rows - kv_heads}, {head_dim}], not {list(head_norm.shape)}")
    norm = qkv if head_norm is None else head_norm
    check_device(qkv, positions, cos, sin, norm, layer.keys, slots)
    padded = power_of_two(half)
    tile_rows = min(max(1, _TILE // padded), power_of_two(rows))
    launch(
        rope_write_kv_kernel,
        (tokens, triton.cdiv(rows, tile_rows)),
        qkv, positions, cos, sin, norm, *layer.pointers, *layer.scale_pointers, slots,
        qkv.stride(0), qkv.stride(1), cos.stride(0),
        *layer.strides, *layer.strides, *layer.scale_strides, float(eps),
        HEADS=rows - 2 * kv_heads, KV_HEADS=kv_heads, HALF=half, HALF_PADDED=padded, ROWS=tile_rows,
        BLOCK_SIZE=layer.block_size, HAS_NORM=head_norm is not None, HAS_SCALES=layer.scales is not None,
        MOST=most_of(layer),
        ROUND_FIRST=interpreted(), num_warps=4,
    )  # fmt: skip


def _check_angles(positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tokens: int, half: int) -> None:
    """Raise ValueError if these are not positions int64 [tokens], and cos and sin [max_positions, half] by position."""
    if cos.dim() != 2 or cos.shape[1] != half or sin.shape != cos.shape or sin.stride() != cos.stride():
        raise ValueError(f"cos and sin [max_positions, {half}] are alike, not {list(cos.shape)} and {list(sin.shape)}")
    if cos.stride(1) != 1 or positions.shape != (tokens,) or positions.dtype != torch.int64:
        raise ValueError(f"positions are int64 [{tokens}] and angles contiguous, not {positions.dtype}")

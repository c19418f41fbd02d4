"""Moves the K and V of tokens to other positions: K is rotated by the distance, V is copied."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.kv_layer import KVLayer, check_slots
from pagewise_kernels.kv_write import most_of, rounded_kv
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.shapes import power_of_two


@triton.jit
def move_tokens_kernel(
    keys, values, k_scales, v_scales, sources, targets, cos, sin,
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_sb, stride_st, stride_sh,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr, MOST: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """One program per token: all its heads, K and V. ``PAIRS``: of elements that are rotated, at the head's beginning.

    Each element is loaded together with the other one of its pair, so that a row of a head stays in one piece.
    """
    token = tl.program_id(0).to(tl.int64)
    source, target = tl.load(sources + token).to(tl.int64), tl.load(targets + token).to(tl.int64)
    heads = tl.arange(0, HEADS_PADDED)
    dims = tl.arange(0, DIM)
    inside = (heads < HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    rotated = dims < 2 * PAIRS
    if INTERLEAVED:
        pair, first = dims // 2, dims % 2 == 0
        other = tl.where(first, dims + 1, dims - 1)
    else:
        first = dims < PAIRS
        pair = tl.where(first, dims, dims - PAIRS)
        other = tl.where(first, dims + PAIRS, dims - PAIRS)
    other = tl.where(rotated, other, dims)
    c = tl.load(cos + token * PAIRS + pair, mask=rotated, other=1.0)[None, :]
    s = tl.load(sin + token * PAIRS + pair, mask=rotated, other=0.0)
    s = tl.where(first, -s, s)[None, :]

    from_block, from_offset = source // BLOCK_SIZE, source % BLOCK_SIZE
    to_block, to_offset = target // BLOCK_SIZE, target % BLOCK_SIZE
    k_from = keys + from_block * stride_kb + from_offset * stride_kt + heads[:, None] * stride_kh
    k_to = keys + to_block * stride_kb + to_offset * stride_kt + heads[:, None] * stride_kh
    v_from = values + from_block * stride_vb + from_offset * stride_vt + heads[:, None] * stride_vh
    v_to = values + to_block * stride_vb + to_offset * stride_vt + heads[:, None] * stride_vh
    k = tl.load(k_from + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    k_other = tl.load(k_from + other[None, :], mask=inside, other=0.0).to(tl.float32)
    moved = k * c + k_other * s
    if HAS_SCALES:
        scale_from = from_block * stride_sb + from_offset * stride_st + heads * stride_sh
        scale_to = to_block * stride_sb + to_offset * stride_st + heads * stride_sh
        moved *= tl.load(k_scales + scale_from, mask=heads < HEADS, other=0.0)[:, None]
        scale = tl.maximum(tl.max(tl.abs(moved), 1), 1e-12) / MOST
        tl.store(k_scales + scale_to, scale, mask=heads < HEADS)
        moved = moved / scale[:, None]
        moved = rounded_kv(moved, MOST, ROUND_FIRST)
        v_scale = tl.load(v_scales + scale_from, mask=heads < HEADS, other=0.0)
        tl.store(v_scales + scale_to, v_scale, mask=heads < HEADS)
    tl.store(k_to + dims[None, :], moved.to(keys.dtype.element_ty), mask=inside)
    tl.store(v_to + dims[None, :], tl.load(v_from + dims[None, :], mask=inside, other=0.0), mask=inside)


def move_tokens(
    layer: KVLayer,
    sources: torch.Tensor,
    targets: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Move tokens of one layer from slots to slots, block * block_size + offset; no target is a source.

    sources, targets int32 or int64 [tokens]; cos, sin float32 [tokens, pairs]: the rotation of each token's keys,
    in the first 2 * pairs elements of a head. ``interleaved``: the elements of a pair lie side by side, else ``pairs``
    apart. In a float8_e4m3fn pool each token and head is scaled anew. Source: RoPE, arXiv 2104.09864.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    tokens = len(sources)
    if not (sources.shape == targets.shape == cos.shape[:1]) or cos.shape != sin.shape:
        raise ValueError(
            f"sources {list(sources.shape)}, targets {list(targets.shape)}, cos {list(cos.shape)} and sin "
            f"{list(sin.shape)} are not of the same tokens"
        )
    heads, head_dim, pairs = layer.kv_heads, layer.head_dim, cos.shape[1]
    if 2 * pairs > head_dim:
        raise ValueError(f"{pairs} pairs of elements are not in a head of {head_dim}")
    check_slots(sources, targets)
    if {cos.dtype, sin.dtype} != {torch.float32} or not (cos.is_contiguous() and sin.is_contiguous()):
        raise TypeError(f"cos and sin are float32 and contiguous, not {cos.dtype} and {sin.dtype}")
    if not tokens:
        return
    check_device(layer.keys, sources, targets, cos, sin)
    launch(
        move_tokens_kernel,
        (tokens,),
        layer.keys, layer.values, *layer.scale_pointers, sources, targets, cos, sin,
        *layer.strides, *layer.strides, *layer.scale_strides,
        BLOCK_SIZE=layer.block_size, HEADS=heads, HEADS_PADDED=power_of_two(heads), HEAD_DIM=head_dim,
        DIM=power_of_two(head_dim), PAIRS=pairs, INTERLEAVED=interleaved, HAS_SCALES=layer.scales is not None,
        MOST=most_of(layer), ROUND_FIRST=interpreted(), num_warps=4 if heads * head_dim <= 2048 else 8,
    )  # fmt: skip

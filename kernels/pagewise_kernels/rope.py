"""Rotary position embedding (Su et al., arXiv 2104.09864), halves turned against each other as in Llama."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.launch import check_device, launch
from pagewise_kernels.shapes import power_of_two


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    stride_x,
    stride_xh,
    stride_cos,
    stride_sin,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, HALF_PADDED)
    inside = (heads < HEADS) & (dims < HALF)[None, :]
    c = tl.load(cos + token * stride_cos + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * stride_sin + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    first_at = x + token * stride_x + heads * stride_xh + dims[None, :]
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(first_at, (first * c - second * s).to(x.dtype.element_ty), mask=inside)
    tl.store(first_at + HALF, (second * c + first * s).to(x.dtype.element_ty), mask=inside)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first 2 · half elements of each head of x [tokens, heads, head_dim] in place.

    cos, sin [tokens, half], half at most head_dim / 2; element i is turned against element i + half. Returns x.

    Raises:
        ValueError: shapes, strides or devices do not fit.
    """
    if x.dim() != 3 or cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != x.shape[0]:
        raise ValueError(
            "rope takes x [tokens, heads, head_dim] and cos and sin [tokens, half], not "
            f"{list(x.shape)}, {list(cos.shape)} and {list(sin.shape)}"
        )
    tokens, heads, head_dim = x.shape
    half = cos.shape[1]
    if not 1 <= half <= head_dim // 2 or x.stride(2) != 1 or cos.stride(1) != 1 or sin.stride(1) != 1:
        raise ValueError(f"cos and sin of {half} do not turn heads of {head_dim}, or something is not contiguous")
    check_device(x, cos, sin)
    launch(
        rope_kernel,
        (tokens,),
        x, cos, sin, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0),
        HEADS=heads, HEADS_PADDED=power_of_two(heads), HALF=half, HALF_PADDED=power_of_two(half),
        num_warps=4 if heads * half <= 4096 else 8,
    )  # fmt: skip
    return x

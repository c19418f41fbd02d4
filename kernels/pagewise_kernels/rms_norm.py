"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467): x / sqrt(mean(x²) + eps) · weight, with the residual added before."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.launch import check_device, launch
from pagewise_kernels.shapes import power_of_two

_LARGEST = 16384


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,
    weight,
    residual,
    out,
    num_rows,
    stride_x,
    stride_xh,
    stride_residual,
    stride_residual_h,
    stride_out,
    stride_out_h,
    stride_weight,
    eps,
    offset,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """ROWS rows; a row is summed up in an order that depends on its length alone."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)[None, :]
    inside = (rows < num_rows)[:, None] & (columns < SIZE)
    tokens, heads = (rows // HEADS).to(tl.int64)[:, None], (rows % HEADS)[:, None]
    values = tl.load(x + tokens * stride_x + heads * stride_xh + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + tokens * stride_residual + heads * stride_residual_h + columns
        total = (values + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(at, total, mask=inside)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    # Rounded before the weight comes, as the models do it.
    normed = (values * scale[:, None]).to(out.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + heads * stride_weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = (normed * (weights + offset)).to(out.dtype.element_ty)
    tl.store(out + tokens * stride_out + heads * stride_out_h + columns, result, mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """RMSNorm of the last dimension of x [tokens, size] or [tokens, heads, size].

    weight [size], or [heads, size] for one of each head; ``offset`` is added to it. With ``residual`` (shape of x,
    changed in place) the norm is that of x + residual, which is left there. All are contiguous in the last dimension,
    the others have any strides. Returns ``out``, by default a new tensor like x.

    Raises:
        ValueError: shapes, strides or devices do not fit.
    """
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    if x.dim() not in (2, 3) or weight.shape not in ((size,), (heads, size)) or not weight.is_contiguous():
        raise ValueError(
            "rms_norm takes x [tokens, size] or [tokens, heads, size] and a weight [size] or [heads, size], not "
            f"{list(x.shape)} and {list(weight.shape)}"
        )
    if not 1 <= size <= _LARGEST:
        raise ValueError(f"a size of {size} is not supported, 1 to {_LARGEST} are")
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    residual_or_x = x if residual is None else residual
    for tensor in (residual_or_x, out):
        if tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.stride(-1) != 1:
            raise ValueError(
                f"x, residual and out are alike and contiguous in the last dimension, not {x.dtype} {list(x.shape)} "
                f"and {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
            )
    check_device(x, weight, residual_or_x, out)
    num_rows = x.shape[0] * heads
    padded = power_of_two(size)
    rows = max(1, 2048 // padded)
    launch(
        rms_norm_kernel,
        (triton.cdiv(num_rows, rows),),
        x, weight, residual_or_x, out, num_rows,
        *_strides(x), *_strides(residual_or_x), *_strides(out), size if weight.dim() == 2 else 0,
        float(eps), float(offset),
        HEADS=heads, SIZE=size, PADDED=padded, ROWS=rows, HAS_RESIDUAL=residual is not None,
        num_warps=4 if padded * rows <= 4096 else 8,
    )  # fmt: skip
    return out


def _strides(tensor: torch.Tensor) -> tuple[int, int]:
    """From token to token, and from head to head."""
    return tensor.stride(0), tensor.stride(1) if tensor.dim() == 3 else 0

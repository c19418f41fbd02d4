"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467): x / sqrt(mean(x²) + eps) · weight, with the residual added before."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import prefetch_rows, wait_for_predecessor
from pagewise_kernels.kv_layer import FP8
from pagewise_kernels.kv_write import FP8_MOST, round_to_e4m3
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.quantised import scale_of
from pagewise_kernels.shapes import power_of_two

_LARGEST = 16384


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x, weight, residual, out, scales, num_rows,
    stride_x, stride_residual, stride_out,
    eps, offset,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ROUNDED: tl.constexpr,
    MOST: tl.constexpr, ROUND_FIRST: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """ROWS rows; a row is summed up in an order that depends on its length alone."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)[None, :]
    inside = (rows < num_rows)[:, None] & (columns < SIZE)
    tokens = rows.to(tl.int64)[:, None]
    if PDL and tl.program_id(0) == 0:  # one does it for all
        prefetch_rows(weight + tl.arange(0, 1), SIZE, PADDED)
    wait_for_predecessor(PDL)
    values = tl.load(x + tokens * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + tokens * stride_residual + columns
        total = (values + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(at, total, mask=inside)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    # Rounded before the weight comes, as the models do it.
    kind = x.dtype.element_ty
    normed = (values * scale[:, None]).to(kind).to(tl.float32)
    weights = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    result = (normed * (weights + offset)).to(kind)
    if ROUNDED:  # as ``quantise_rows`` would do it next
        wide = result.to(tl.float32)
        divisor = scale_of(wide, 1, MOST)
        tl.store(scales + rows, divisor, mask=rows < num_rows)
        result = wide / divisor[:, None]
        if ROUND_FIRST:
            result = round_to_e4m3(result)
    tl.store(out + tokens * stride_out + columns, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """RMSNorm of rows x [rows, size] with a weight [size], to which ``offset`` is added.

    With ``residual`` (shape of x, changed in place) the norm is that of x + residual, which is left there. All are
    contiguous in the last dimension. Returns ``out``, by default a new tensor like x.

    Raises:
        ValueError: shapes, strides or devices do not fit.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if out.dtype != x.dtype:
        raise ValueError(f"x and out are alike, of one type, not {x.dtype} and {out.dtype}")
    _launch(x, weight, eps, residual, out, None, offset)
    return out


def rounded_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm`` and then ``quantise_rows``, as one kernel: float8_e4m3fn [rows, size] and float32 scales [rows].

    Raises:
        ValueError: shapes, strides or devices do not fit.
    """
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _launch(x, weight, eps, residual, out, scales, 0.0)
    return out, scales


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    offset: float,
) -> None:
    """Compute the norm into ``out``, with ``scales`` rounded."""
    if (x.dim(), weight.shape, weight.stride()) != (2, x.shape[1:], (1,)):
        raise ValueError(
            f"rms_norm takes x [rows, size] and a weight [size], not {list(x.shape)}, {list(weight.shape)}"
        )
    num_rows, size = x.shape
    if not 1 <= size <= _LARGEST:
        raise ValueError(f"a size of {size} is not supported, 1 to {_LARGEST} are")
    residual_or_x = x if residual is None else residual
    if residual_or_x.dtype != x.dtype:
        raise ValueError(f"x and residual are alike, of one type, not {x.dtype} and {residual_or_x.dtype}")
    for tensor in (residual_or_x, out):
        if tensor.shape != x.shape or tensor.stride(-1) != 1:
            raise ValueError(
                f"x, residual and out are alike and contiguous in the last dimension, not {list(x.shape)} "
                f"and {list(tensor.shape)} with strides {tensor.stride()}"
            )
    check_device(x, weight, residual_or_x, out)
    padded = power_of_two(size)
    rows = max(1, 2048 // padded)
    launch(
        rms_norm_kernel,
        (triton.cdiv(num_rows, rows),),
        x, weight, residual_or_x, out, x if scales is None else scales, num_rows,
        x.stride(0), residual_or_x.stride(0), out.stride(0), float(eps), float(offset),
        SIZE=size, PADDED=padded, ROWS=rows, HAS_RESIDUAL=residual is not None, ROUNDED=scales is not None,
        MOST=FP8_MOST, ROUND_FIRST=interpreted(), num_warps=4 if padded * rows <= 4096 else 8,
    )  # fmt: skip

"""RMSNorm and SiLU·mul on the CPU: what ``pagewise_kernels.rms_norm`` and ``silu_mul`` compute on a GPU."""

import torch

from pagewise_kernels.cpu.library import empty, load_library, parallel_regions, threads
from pagewise_kernels.shapes import check_contiguous, check_tensors

TYPES = (torch.float32, torch.bfloat16)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return weight · x / sqrt(mean(x²) + eps) for x [rows, size] and weight [size], both float32 or bfloat16.

    With ``residual`` [rows, size], contiguous, x is added to it in place first, and its sum is normalised.

    Raises:
        ValueError: shapes or strides do not fit. TypeError: types do not.
    """
    rows_of_x, types = ("rows", "size"), (x.dtype,)
    check_tensors(
        "rms_norm", x=(x, rows_of_x, TYPES), weight=(weight, ("size",), types), residual=(residual, rows_of_x, types)
    )  # fmt: skip
    check_contiguous("rms_norm", residual=residual)
    check_cpu(x, weight, residual)
    rows, size = x.shape
    out = empty((rows, size), x.dtype)
    load_library().pagewise_rms_norm(
        x.data_ptr(), x.stride(0), residual.data_ptr() if residual is not None else None, weight.data_ptr(),
        out.data_ptr(), rows, size, eps, x.dtype == torch.bfloat16, threads(), parallel_regions(),
    )  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up [rows, size] for gate_up [rows, 2 · size], gate first, float32 or bfloat16.

    Raises:
        ValueError: shapes or strides do not fit. TypeError: types do not.
    """
    rows, size = gate_up.shape[0], gate_up.shape[-1] // 2
    check_tensors("silu_mul", {"2 * size": 2 * size}, gate_up=(gate_up, ("rows", "2 * size"), TYPES))
    check_cpu(gate_up)
    out = empty((rows, size), gate_up.dtype)
    load_library().pagewise_silu_mul(
        gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, size, gate_up.dtype == torch.bfloat16,
        threads(), parallel_regions(),
    )  # fmt: skip
    return out


def check_cpu(*tensors: torch.Tensor | None) -> None:
    """Raise ValueError if a tensor does not lie on the CPU; None is left out."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cpu":
            raise ValueError(f"the CPU operations take tensors on the CPU, not on {tensor.device}")

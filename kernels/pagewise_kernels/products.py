"""The common part of linear layers: checks of operands, and the types that tensor cores compute in."""

import functools
from typing import Any

import torch
import triton.language as tl

from pagewise_kernels.kv_layer import FP8
from pagewise_kernels.launch import interpreted

FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_TYPES = {**FLOATS, FP8: tl.float8e4nv, torch.int8: tl.int8}


@functools.cache
def compute_options(dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of a kernel that multiplies matrices of ``dtype``; the interpreter has float32 alone."""
    return {
        "COMPUTE": tl.float32 if interpreted() else _TYPES[dtype],
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def check_product(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Check the operands of a linear layer: x [rows, in], weight [out, in] and bias [out], of any types.

    Raises:
        ValueError: shapes or strides do not fit. TypeError: the bias is not of floats.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(
            f"{name} takes x [rows, in] and weight [out, in] with contiguous rows, not {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    if bias is None:
        return
    if bias.shape != weight.shape[:1] or not bias.is_contiguous():
        raise ValueError(f"bias is [{len(weight)}], contiguous, with a value of each output, not {list(bias.shape)}")
    if bias.dtype not in FLOATS:
        raise TypeError(f"result and bias are float16, bfloat16 or float32, not {bias.dtype}")


def check_types(x: torch.Tensor, weight: torch.Tensor, result: torch.dtype, *, quantised: bool) -> None:
    """Check that x is of the type of a weight in eight bits if it is ``quantised``, else of floats, as the ``result``.

    Raises:
        TypeError: it is not.
    """
    if weight.dtype in FLOATS or (x.dtype != weight.dtype if quantised else x.dtype not in FLOATS):
        raise TypeError(
            f"x is of the weight's type with scales, or of floats without, not {x.dtype} and {weight.dtype}"
        )
    if result not in FLOATS:
        raise TypeError(f"the result is float16, bfloat16 or float32, not {result}")

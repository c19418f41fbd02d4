"""What attention refuses, and the words it says."""

from dataclasses import dataclass

import torch

from pagewise_kernels.launch import check_device
from pagewise_kernels.shapes import power_of_two

_TYPES = {torch.float32, torch.float16, torch.bfloat16}
FP8 = torch.float8_e4m3fn


@dataclass(slots=True, frozen=True)
class Scales:
    """Scales of FP8 KV, one per token and head: ``keys`` and ``values`` float32 [num_blocks, block_size, kv_heads]."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True, frozen=True)
class Shape:
    """``group``: query heads per KV head. ``dim``: the head size rounded up to a power of two."""

    kv_heads: int
    group: int
    block_size: int
    head_dim: int
    dim: int


def check_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, scales: Scales | None
) -> Shape:
    """The shape of an attention problem.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: types do not.
    """
    if q.dim() != 3 or keys.dim() != 4 or keys.shape != values.shape or q.shape[2] != keys.shape[3]:
        raise ValueError(
            "attention takes q [queries, heads, head_dim] and keys and values [num_blocks, block_size, kv_heads, "
            f"head_dim], not {list(q.shape)}, {list(keys.shape)} and {list(values.shape)}"
        )
    heads, head_dim = q.shape[1], q.shape[2]
    block_size, kv_heads = keys.shape[1], keys.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    if not 1 <= head_dim <= 256:
        raise ValueError(f"a head size of {head_dim} is not supported, 1 to 256 are")
    if q.stride(2) != 1 or keys.stride(3) != 1 or values.stride(3) != 1:
        raise ValueError("the elements of a head lie next to each other in q, keys and values")
    if keys.stride() != values.stride():
        raise ValueError(f"keys and values have equal strides, not {keys.stride()} and {values.stride()}")
    if tables.dim() != 2 or tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise TypeError(f"block tables are int32 [rows, blocks], not {tables.dtype} {list(tables.shape)}")
    if q.dtype not in _TYPES:
        raise TypeError(f"q is float32, float16 or bfloat16, not {q.dtype}")
    if keys.dtype != values.dtype or keys.dtype not in (q.dtype, FP8):
        raise TypeError(f"keys and values are {q.dtype} like q or float8_e4m3fn, not {keys.dtype} and {values.dtype}")
    if (keys.dtype == FP8) != (scales is not None):
        raise TypeError("float8 KV comes with scales, and no other KV does")
    if keys.dtype == FP8:
        check_fp8(keys.device)
    given = [q, keys, values, tables]
    if scales is not None:
        for scale in (scales.keys, scales.values):
            if scale.shape != keys.shape[:3] or scale.dtype != torch.float32 or scale.stride() != scales.keys.stride():
                raise ValueError(
                    f"scales are float32 {list(keys.shape[:3])} of equal strides, not {scale.dtype} {list(scale.shape)}"
                )
            given.append(scale)
    check_device(*given)
    return Shape(kv_heads, heads // kv_heads, block_size, head_dim, max(16, power_of_two(head_dim)))


def check_fp8(device: torch.device) -> None:
    """Raises ValueError if the GPU knows no float8_e4m3fn: it came with compute capability 8.9."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    if capability < (8, 9):
        raise ValueError(f"float8 KV needs compute capability 8.9, {device} has {capability}")


def check_out(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Where the result goes: ``out``, or a new tensor like q.

    Raises:
        ValueError: ``out`` does not look like q.
    """
    if out is None:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device or out.stride(2) != 1:
        raise ValueError(f"out is {q.dtype} {list(q.shape)} on {q.device} like q, not {out.dtype} {list(out.shape)}")
    return out

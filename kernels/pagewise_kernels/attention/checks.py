"""The checks of the arguments of attention. ``KVLayer`` checks the KV, once."""

import functools
from dataclasses import dataclass

import torch

from pagewise_kernels.attention.config import LARGEST_TILE
from pagewise_kernels.kv_layer import FP8, INT4, INT8, KVLayer
from pagewise_kernels.launch import check_device
from pagewise_kernels.shapes import power_of_two

MAX_HEAD_DIM = 512
_TYPES = {torch.float32, torch.float16, torch.bfloat16}


@dataclass(slots=True, frozen=True)
class Shape:
    """``group``: query heads per KV head. ``dim``: the head size rounded up to a power of two."""

    kv_heads: int
    group: int
    block_size: int
    head_dim: int
    dim: int


@functools.cache
def _shape(heads: int, kv_heads: int, block_size: int, head_dim: int) -> Shape:
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"a head size of {head_dim} is not supported, 1 to {MAX_HEAD_DIM} are")
    return Shape(kv_heads, heads // kv_heads, block_size, head_dim, max(16, power_of_two(head_dim)))


def check_attention(q: torch.Tensor, layer: KVLayer, tables: torch.Tensor, sinks: torch.Tensor | None = None) -> Shape:
    """Return the shape of an attention problem.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: types do not.
    """
    if q.dim() != 3 or q.shape[2] != layer.head_dim or q.stride(2) != 1:
        raise ValueError(
            f"attention takes q [queries, heads, {layer.head_dim}] in which the elements of a head lie next to each "
            f"other, not {list(q.shape)} with strides {q.stride()}"
        )
    if tables.dim() != 2 or tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise TypeError(f"block tables are int32 [rows, blocks], not {tables.dtype} {list(tables.shape)}")
    if q.dtype not in _TYPES or layer.dtype not in (q.dtype, FP8, INT8, INT4):
        raise TypeError(
            "q is float32, float16 or bfloat16, and keys and values are like q or in fewer bits, not "
            f"{q.dtype} and {layer.dtype}"
        )
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.dtype not in _TYPES or not sinks.is_contiguous()):
        raise ValueError(f"sinks are contiguous floats, one for each of {q.shape[1]} heads, not {list(sinks.shape)}")
    check_device(q, layer.keys, tables, sinks)
    return _shape(q.shape[1], layer.kv_heads, layer.block_size, layer.head_dim)


def check_chunk(attention_chunk: int | None) -> None:
    """Raise ValueError if attention chunks of so many tokens do not begin with a tile."""
    if attention_chunk is not None and (attention_chunk < 1 or attention_chunk % LARGEST_TILE):
        raise ValueError(f"attention chunks are multiples of {LARGEST_TILE} tokens, not of {attention_chunk}")


def check_out(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor for the result: ``out``, or a new tensor like q.

    Raises:
        ValueError: ``out`` does not look like q.
    """
    if out is None:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device or out.stride(2) != 1:
        raise ValueError(f"out is {q.dtype} {list(q.shape)} on {q.device} like q, not {out.dtype} {list(out.shape)}")
    return out

"""Launches the kernels of attention, with the arguments that decode and prefill have in common."""

from typing import NamedTuple

import torch
import triton.language as tl

from pagewise_kernels.attention.checks import Shape
from pagewise_kernels.attention.config import TileConfig
from pagewise_kernels.attention.decode_kernel import decode_attention_kernel
from pagewise_kernels.attention.kernel import attention_kernel
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.shapes import power_of_two

COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Parts(NamedTuple):
    """The buffers of partial results.

    ``values`` float32 [n, heads, head_dim]: values times weights; ``highs`` [n, heads]: log2 of the unit of weights;
    ``totals`` [n, heads]: sums of weights. The parts of query i are ``first[i]`` and the ``number[i] - 1`` after it.
    ``arrivals`` int32 [queries, kv_heads]: zeros.
    """

    values: torch.Tensor
    highs: torch.Tensor
    totals: torch.Tensor
    first: torch.Tensor
    number: torch.Tensor
    arrivals: torch.Tensor


def registers(config: TileConfig) -> int:
    """The registers of a thread with which ``config.programs`` fit on a multiprocessor, in multiples of eight."""
    return min(255, 65536 // (config.programs * config.num_warps * 32) // 8 * 8)


def parts_at_once(size: int, num_warps: int) -> int:
    """How many parts of ``size`` values the last program reads together: they take 64 registers of each thread."""
    return max(1, min(16, num_warps * 32 * 64 // size))


def run_prefill(
    q: torch.Tensor, layer: KVLayer, tables: torch.Tensor, out: torch.Tensor, shape: Shape, config: TileConfig, *,
    positions: torch.Tensor, units: torch.Tensor, num_units: torch.Tensor, programs: int, scale: float | None,
    softcap: float | None, window: int | None, split: int, strict: bool, sinks: torch.Tensor | None = None,
    ring: bool = False,
) -> None:  # fmt: skip
    """Run ``units`` int32 [n, UNIT_FIELDS], of which ``num_units`` int32 [1] count, on ``programs`` programs.

    ``positions`` int32 [queries]: the last context token that each query sees. ``split``: see ``attention_kernel``.
    ``strict``: products and sums are not fused. ``ring``: see ``decode_attention``.

    Raises:
        ValueError: ``scale`` is not positive, or the plan is on another device than q.
    """
    check_device(q, positions)  # by a handle an address of the host would go to the device as it is
    launch(
        attention_kernel,
        (programs,),
        q, *layer.pointers, *layer.scale_pointers, out, tables, positions, units, num_units,
        q if sinks is None else sinks,
        *q.stride()[:2], *layer.strides, *layer.strides, *layer.scale_strides, *out.stride()[:2],
        tables.stride(0),
        _positive(scale, shape), float(softcap or 1.0), int(window or 0),
        SPLIT=split, HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None, RING=_ring(tables, ring),
        **_options(q, layer, shape, config, softcap, strict),
    )  # fmt: skip


def run_decode(
    q: torch.Tensor, layer: KVLayer, tables: torch.Tensor, out: torch.Tensor, shape: Shape, config: TileConfig, *,
    units: torch.Tensor, programs: int, parts: Parts, order: torch.Tensor | None, scale: float | None,
    softcap: float | None, has_window: bool, strict: bool, sinks: torch.Tensor | None = None, ring: bool = False,
) -> None:  # fmt: skip
    """Run ``units`` int32 [n, DECODE_FIELDS] of ``plan_decode_kernel`` on ``programs`` programs.

    ``parts``: where partial results go, which are merged in the same launch. ``order`` int32: the queries of units with
    several of them are entries of it. ``strict``: parts are merged in order, products and sums are not fused.
    ``ring``: see ``decode_attention``.

    Raises:
        ValueError: ``scale`` is not positive, or the plan is on another device than q.
    """
    check_device(q, units)  # by a handle an address of the host would go to the device as it is
    # Where tensor cores read keys and values from registers, eight bits are loaded there in pairs. These sum up even
    # dimensions before odd ones, and chunks do not.
    even = all(size % 2 == 0 for size in (*layer.strides, q.shape[2]))
    # Half of the dimensions are the inner size of a product, which tensor cores want to be 16 at least.
    pairs = layer.scales is not None and config.rows < 64 and even and shape.dim >= 32 and not strict
    rows = power_of_two(shape.group)
    launch(
        decode_attention_kernel,
        (programs,),
        q, *layer.pointers, *layer.scale_pointers, out, parts.values, parts.highs, parts.totals, tables, units,
        parts.first, parts.number, parts.arrivals, units if order is None else order,
        q if sinks is None else sinks,
        *q.stride()[:2], *layer.strides, *layer.scale_strides, *out.stride()[:2], tables.stride(0),
        _positive(scale, shape), float(softcap or 1.0),
        ROWS=rows, HAS_WINDOW=has_window, PAIRS=pairs, HAS_ORDER=order is not None,
        HAS_SINKS=sinks is not None, RING=_ring(tables, ring),
        PARTS=1 if strict else parts_at_once(rows * shape.dim, config.num_warps),
        **_options(q, layer, shape, config, softcap, strict),
        maxnreg=registers(config),
    )  # fmt: skip


def _ring(tables: torch.Tensor, ring: bool) -> int:
    width = tables.shape[1]
    if ring and width & (width - 1):
        raise ValueError(f"block tables that are rings have a power of two of entries, not {width}")
    return width if ring else 0


def _positive(scale: float | None, shape: Shape) -> float:
    scale = shape.head_dim**-0.5 if scale is None else scale
    if scale <= 0:
        raise ValueError(f"the scale of attention is positive, not {scale}")
    return float(scale)


def _options(
    q: torch.Tensor, layer: KVLayer, shape: Shape, config: TileConfig, softcap: float | None, strict: bool
) -> dict[str, object]:
    """Return the constants and options that both kernels are compiled with.

    KV in eight bits becomes float16, which holds all of its values; float8 in one instruction for two of them. KV in
    four bits becomes numbers in the type of the queries.
    """
    if layer.scales is not None and q.dtype != torch.float32:
        compute = tl.float16
    else:  # the interpreter computes with numpy, which has no bfloat16
        compute = tl.float32 if interpreted() else COMPUTE[q.dtype]
    return {
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "BLOCK_SIZE": shape.block_size,
        "HEAD_DIM": shape.head_dim,
        "DIM": shape.dim,
        "M": config.rows,
        "TILE": config.tile,
        "HAS_SOFTCAP": bool(softcap),
        "HAS_SCALES": layer.scales is not None,
        "COMPUTE": compute,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": not strict,
    }

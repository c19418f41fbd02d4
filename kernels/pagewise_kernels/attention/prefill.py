"""Prefill attention: chunks of queries at any positions over their paged contexts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagewise_kernels.attention.checks import Scales, check_attention, check_out
from pagewise_kernels.attention.config import DETERMINISTIC_SPLIT, TileConfig, prefill_config
from pagewise_kernels.attention.kernel import UNIT_FIELDS
from pagewise_kernels.attention.run import run_attention
from pagewise_kernels.shapes import power_of_two


class Chunk(NamedTuple):
    """``size`` queries from batch row ``first`` on, at context positions ``start`` on, of block table ``table``."""

    first: int
    start: int
    size: int
    table: int


class PrefillPlan:
    """How the chunks of a step are shared out among programs; used by all its layers of one kind.

    Args:
        chunks: what is computed; their queries do not overlap. heads, kv_heads, head_dim: of the model. kv_dtype: of
            the KV pool. window: sliding window of the layers that use this plan, in tokens; None: they see everything.
        upload: copies the plan to the device. The default reads memory that is not pinned, so CUDA copies a plan of
            more than 64 KiB (about 14,000 tokens) only after all work that was issued before.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        deterministic: bool = False,
        upload: Callable[[npt.NDArray[np.int32]], torch.Tensor] | None = None,
    ) -> None:
        group = heads // kv_heads
        longest = max((chunk.size for chunk in chunks), default=0)
        self.window = window
        self.deterministic = deterministic
        self.config: TileConfig = prefill_config(
            longest, group, max(16, power_of_two(head_dim)), kv_dtype.itemsize, device, deterministic
        )
        units = _units(chunks, self.config.rows // group, self.config.tile, window)
        self.num_units = len(units)
        num_queries = max((chunk.first + chunk.size for chunk in chunks), default=0)
        positions = np.zeros(num_queries, np.int32)
        for chunk in chunks:
            positions[chunk.first : chunk.first + chunk.size] = np.arange(chunk.start, chunk.start + chunk.size)
        # One copy to the device for all of it.
        packed = np.concatenate([np.array([len(units)], np.int32), units.ravel(), positions])
        on_device = torch.from_numpy(packed).to(device) if upload is None else upload(packed)
        end = 1 + units.size
        self.unit_count, self.units, self.positions = on_device[:1], on_device[1:end], on_device[end:]


def _units(chunks: Sequence[Chunk], queries: int, tile: int, window: int | None) -> npt.NDArray[np.int32]:
    """Units of ``queries`` neighbouring queries [n, UNIT_FIELDS], those with the most context first."""
    found = [np.zeros((0, UNIT_FIELDS), np.int32)]
    for chunk in chunks:
        begin = np.arange(0, chunk.size, queries)
        count = np.minimum(queries, chunk.size - begin)
        low = np.zeros_like(begin)
        if window is not None:
            low = np.maximum(chunk.start + begin - window + 1, 0) // tile * tile
        stop = chunk.start + begin + count
        table, direct = np.full_like(begin, chunk.table), np.full_like(begin, -1)
        found.append(np.stack([chunk.first + begin, count, table, low, stop, direct], axis=1).astype(np.int32))
    units = np.concatenate(found)
    return np.ascontiguousarray(units[np.argsort(units[:, 3] - units[:, 4], kind="stable")])


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    plan: PrefillPlan,
    *,
    out: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Causal attention of the chunks of ``plan``, whose own K and V are in the pool already.

    q [tokens, heads, head_dim]; keys, values [num_blocks, block_size, kv_heads, head_dim], any strides but the last;
    tables int32 [rows, blocks]. ``scale``: head_dim ** -0.5 by default. Returns ``out`` [tokens, heads, head_dim], of
    which only the chunks' rows are written.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    shape = check_attention(q, keys, values, tables, scales)
    out = check_out(q, out)
    if len(plan.positions) > q.shape[0]:
        raise ValueError(f"the plan has queries up to row {len(plan.positions)}, q has {q.shape[0]}")
    run_attention(
        q, keys, values, tables, out, shape, plan.config,
        positions=plan.positions, units=plan.units, num_units=plan.unit_count,
        programs=plan.num_units * shape.kv_heads, parts=None,
        scale=scale, softcap=softcap, window=plan.window, scales=scales,
        split=DETERMINISTIC_SPLIT if plan.deterministic else 0, strict=plan.deterministic,
    )  # fmt: skip
    return out

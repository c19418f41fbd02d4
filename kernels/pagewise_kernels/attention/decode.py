"""Decode attention: one query per sequence over its paged context."""

import torch

from pagewise_kernels.attention.checks import Scales, check_attention, check_out
from pagewise_kernels.attention.config import (
    DETERMINISTIC_SPLIT,
    TileConfig,
    decode_config,
    decode_programs,
)
from pagewise_kernels.attention.kernel import UNIT_FIELDS, reduce_kernel
from pagewise_kernels.attention.plan_kernel import plan_decode_kernel
from pagewise_kernels.attention.run import run_attention
from pagewise_kernels.launch import launch
from pagewise_kernels.shapes import power_of_two

NO_WINDOW = 2**30


class DecodePlan:
    """How decodes are shared out among programs, and the scratch they need; allocated once, planned anew each step.

    Args:
        max_queries: most sequences of a step. heads, kv_heads, head_dim: of the model. kv_dtype: of the KV pool.
        window: sliding window of the layers that use this plan, in tokens; None: they see everything.
        max_context: longest context in tokens; needed with ``deterministic``, where parts do not depend on the batch.

    Raises:
        ValueError: ``deterministic`` without ``max_context``.
    """

    def __init__(
        self,
        *,
        max_queries: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        deterministic: bool = False,
        max_context: int | None = None,
    ) -> None:
        self.window = window
        self.deterministic = deterministic
        self.config: TileConfig = decode_config(
            heads // kv_heads, max(16, power_of_two(head_dim)), kv_dtype.itemsize, device, deterministic
        )
        # One program for each run and KV head.
        num_runs = max(1, decode_programs(device) // kv_heads)
        self.programs = num_runs * kv_heads
        self.split_tiles = DETERMINISTIC_SPLIT // self.config.tile if deterministic else 0
        if deterministic:
            if max_context is None:
                raise ValueError("deterministic decode attention has to know max_context")
            max_units = max_queries * -(-max_context // DETERMINISTIC_SPLIT)
        else:
            max_units = num_runs + max_queries
        self.max_queries = max_queries

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._rows_in_order = torch.arange(max_queries, dtype=torch.int32, device=device)
        self.positions, self.first_parts, self.num_parts = ints(max_queries), ints(max_queries), ints(max_queries)
        self.units, self.num_units, self.first_units = ints(max_units, UNIT_FIELDS), ints(2), ints(num_runs)
        self.parts = torch.empty(max_units, heads, head_dim, dtype=torch.float32, device=device)
        self.part_highs = torch.empty(max_units, heads, dtype=torch.float32, device=device)

    def plan(self, lengths: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Share out contexts of ``lengths`` int32 [queries] tokens, the new one included; 0 is a query that pads.

        ``rows`` int32 [queries]: the row of the block tables of each query, by default they are in order.

        Raises:
            ValueError: there are more queries than room for them, or they are of another type.
        """
        rows = self._rows_in_order[: len(lengths)] if rows is None else rows
        if rows.shape != lengths.shape or rows.dtype != torch.int32:
            raise ValueError(f"rows are int32 {list(lengths.shape)} like lengths, not {rows.dtype} {list(rows.shape)}")
        if lengths.dim() != 1 or lengths.dtype != torch.int32 or len(lengths) > self.max_queries:
            raise ValueError(
                f"lengths are int32 of at most {self.max_queries} queries, not {lengths.dtype} {list(lengths.shape)}"
            )
        launch(
            plan_decode_kernel,
            (1,),
            lengths,
            rows,
            self.positions,
            self.units,
            self.num_units,
            self.first_units,
            self.first_parts,
            self.num_parts,
            len(lengths),
            len(self.first_units),
            self.window or NO_WINDOW,
            self.units.shape[0],
            TILE=self.config.tile,
            SPLIT_TILES=self.split_tiles,
            N=power_of_two(len(lengths)),
            num_warps=4,
        )


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    plan: DecodePlan,
    *,
    out: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Attention of q [queries, heads, head_dim], one query for each sequence, over its context.

    keys, values [num_blocks, block_size, kv_heads, head_dim], any strides but the last; tables int32 [rows, blocks].
    ``plan``: planned with the contexts' lengths and rows; queries of length 0 get zeros. ``scale``:
    head_dim ** -0.5 by default. Returns ``out`` [queries, heads, head_dim].

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    shape = check_attention(q, keys, values, tables, scales)
    out = check_out(q, out)
    queries = q.shape[0]
    if queries > plan.max_queries or plan.parts.shape[1:] != q.shape[1:]:
        raise ValueError(
            f"the plan is for {plan.max_queries} queries of {list(plan.parts.shape[1:])}, q is {list(q.shape)}"
        )
    run_attention(
        q, keys, values, tables, out, shape, plan.config,
        positions=plan.positions, units=plan.units, num_units=plan.num_units, programs=plan.programs,
        parts=(plan.parts, plan.part_highs, plan.first_parts),
        first_units=None if plan.deterministic else plan.first_units,
        scale=scale, softcap=softcap, window=plan.window, scales=scales, strict=plan.deterministic,
    )  # fmt: skip
    merge_parts(out, plan.parts, plan.part_highs, plan.first_parts, plan.num_parts, strict=plan.deterministic)
    return out


def merge_parts(
    out: torch.Tensor,
    parts: torch.Tensor,
    part_highs: torch.Tensor,
    first_parts: torch.Tensor,
    num_parts: torch.Tensor,
    *,
    even_one: bool = False,
    strict: bool = False,
) -> None:
    """Merge the parts of queries that have more than one into ``out`` [queries, heads, head_dim].

    parts float32 [n, heads, head_dim] and part_highs [n, heads] (log2 of the weight): those of query i are
    ``first_parts[i]`` and the ``num_parts[i] - 1`` after it. ``even_one``: a single part is not in ``out`` yet either.
    ``strict``: one after the other.
    """
    queries, heads, head_dim = out.shape
    launch(
        reduce_kernel,
        (queries, heads),
        parts,
        part_highs,
        first_parts,
        num_parts,
        out,
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        HEAD_DIM=head_dim,
        DIM=max(16, power_of_two(head_dim)),
        PARTS=1 if strict else 16,
        LEAST=1 if even_one else 2,
        num_warps=1 if strict else 4,
        enable_fp_fusion=not strict,
    )

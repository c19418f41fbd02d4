"""Decode attention: one query per sequence over its paged context."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pagewise_kernels.attention.checks import check_attention, check_chunk, check_out
from pagewise_kernels.attention.config import (
    DETERMINISTIC_SPLIT,
    TileConfig,
    decode_config,
    decode_programs,
)
from pagewise_kernels.attention.decode_kernel import DECODE_FIELDS
from pagewise_kernels.attention.plan_kernel import plan_decode_kernel
from pagewise_kernels.attention.run import Parts, run_decode
from pagewise_kernels.attention.sharing import no_shared, shared_table, views
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.shapes import power_of_two

NO_WINDOW = 2**30
LEAST_SHARED = 256 if not interpreted() else 16
"""Context tokens that are worth reading once for several queries: each of them has a part more to store and merge."""


class DecodePlan:
    """How decodes are shared out among programs, and their scratch; allocated once, planned anew each step.

    Args:
        max_queries: most sequences of a step. heads, kv_heads, head_dim: of the model. kv_dtype: of the KV pool.
        window: sliding window of the layers that use this plan, in tokens; None: they see everything.
        max_context: longest context in tokens; needed with ``deterministic``, where parts do not depend on the batch.
        config: tiles and programs, by default from ``decode_config``. rotated: of plans for latents (``latents``).
        attention_chunk: a query sees the tokens of its own chunk of so many tokens; None: it sees everything.

    ``can_share``: whether queries may read a shared prefix together (``share``): a tile has room for several of them,
    there are no windows or attention chunks, and parts may depend on the batch.

    Raises:
        ValueError: ``deterministic`` without ``max_context``; attention chunks do not begin with a tile.
    """

    def __init__(
        self, *, max_queries: int, heads: int, kv_heads: int, head_dim: int, kv_dtype: torch.dtype,
        device: torch.device, window: int | None = None, deterministic: bool = False, max_context: int | None = None,
        config: TileConfig | None = None, attention_chunk: int | None = None, rotated: int = 0,
    ) -> None:  # fmt: skip
        check_chunk(attention_chunk)
        self.window, self._attention_chunk = window, attention_chunk
        self.deterministic = deterministic
        self.config: TileConfig = config or decode_config(
            heads // kv_heads, max(16, power_of_two(head_dim)), kv_dtype, device, deterministic, rotated
        )
        # One program for each run and KV head.
        num_runs = max(1, decode_programs(device, self.config) // kv_heads)
        self.programs = num_runs * kv_heads
        self.split_tiles = DETERMINISTIC_SPLIT // self.config.tile if deterministic else 0
        self._at_once = self.config.rows // (heads // kv_heads)
        unlimited = window is None and attention_chunk is None
        self.can_share = self._at_once > 1 and unlimited and not deterministic and not rotated
        if deterministic:
            if max_context is None:
                raise ValueError("deterministic decode attention has to know max_context")
            max_units = max_parts = max_queries * -(-max_context // DETERMINISTIC_SPLIT)
        else:
            # A run of work ends in the middle of one query, or of one shared stretch, which are fewer than the queries.
            max_units = num_runs + max_queries * (2 if self.can_share else 1)
            max_parts = num_runs * self._at_once + 2 * max_queries if self.can_share else max_units
        self.max_queries, self._num_runs = max_queries, num_runs

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._rows_in_order = torch.arange(max_queries, dtype=torch.int32, device=device)
        self.first_parts, self.num_parts = ints(max_queries), ints(max_queries)
        self.units = ints(num_runs + max_units, DECODE_FIELDS)
        self.parts = Parts(
            torch.empty(max_parts, heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(max_parts, heads, dtype=torch.float32, device=device),
            torch.empty(max_parts, heads, dtype=torch.float32, device=device),
            self.first_parts,
            self.num_parts,
            ints(max_queries, kv_heads),
        )
        self._slot_counts = ints(2 * max_queries)
        self._shared = torch.from_numpy(no_shared(max_queries)).to(device)
        self._is_sharing = False
        self._queries_sharing = 0

    def share(
        self,
        prefixes: npt.NDArray[np.int64],
        members: npt.NDArray[np.int64],
        upload: Callable[[npt.NDArray[np.int32]], torch.Tensor] = torch.from_numpy,
    ) -> None:
        """Let queries of the following steps read shared prefixes together, until this is called anew.

        ``prefixes`` [n, 3] (begin, count, tokens): the queries members[begin : begin + count] have equal block tables
        for the first ``tokens`` tokens, and longer contexts than that. No query is in two prefixes. Prefixes shorter
        than LEAST_SHARED tokens are not shared, and a plan without ``can_share`` shares none. ``upload`` brings an
        array to the device. Without prefixes, nothing is copied unless there were some before.

        Raises:
            ValueError: a query is in two prefixes, or is none.
        """
        if not self.can_share or (not len(prefixes) and not self._is_sharing):
            return
        table = shared_table(
            prefixes, members, self.max_queries, at_once=self._at_once, tile=self.config.tile, least=LEAST_SHARED
        )
        self._is_sharing = bool(table[0])
        sharing = np.flatnonzero(table[1 : 1 + self.max_queries] >= 0)
        self._queries_sharing = int(sharing[-1]) + 1 if len(sharing) else 0
        self._shared.copy_(upload(table))

    def plan(self, lengths: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Share out contexts of ``lengths`` int32 [queries] tokens, the new one included; 0 is a query that pads,
        whose result is zeros; -1 is no decode, and its result is not written.

        ``rows`` int32 [queries]: the row of the block tables of each query, by default they are in order.

        Raises:
            ValueError: there are more queries than room for them, or fewer than share prefixes; they are of another
                type, or on another device than the plan.
        """
        rows = self._rows_in_order[: len(lengths)] if rows is None else rows
        if rows.shape != lengths.shape or rows.dtype != torch.int32:
            raise ValueError(f"rows are int32 {list(lengths.shape)} like lengths, not {rows.dtype} {list(rows.shape)}")
        if lengths.dim() != 1 or lengths.dtype != torch.int32 or len(lengths) > self.max_queries:
            raise ValueError(
                f"lengths are int32 of at most {self.max_queries} queries, not {lengths.dtype} {list(lengths.shape)}"
            )
        count = len(lengths)
        if count < self._queries_sharing:
            raise ValueError(f"query {self._queries_sharing - 1} shares a prefix, and there are only {count} queries")
        check_device(self.units, lengths, rows)
        launch(
            plan_decode_kernel, (1,),
            lengths, rows, self.units, self.first_parts, self.num_parts, *views(self._shared, self.max_queries),
            self._slot_counts, self.parts.arrivals, count, self._num_runs, self.window or NO_WINDOW,
            self.units.shape[0] - self._num_runs, self.parts.arrivals.shape[1],
            TILE=self.config.tile, SPLIT_TILES=self.split_tiles, SHARING=self.can_share,
            N=power_of_two(count + count // 2 if self.can_share else count), RUNS=power_of_two(self._num_runs),
            ATTENTION_CHUNK=self._attention_chunk or 0,
            num_warps=4,
        )  # fmt: skip

    @property
    def order(self) -> torch.Tensor | None:
        """The queries of units with several of them; None where there are no such units."""
        return views(self._shared, self.max_queries).order if self.can_share else None


def decode_attention(
    q: torch.Tensor, layer: KVLayer, tables: torch.Tensor, plan: DecodePlan, *, out: torch.Tensor | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, ring: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention of q [queries, heads, head_dim], one query for each sequence, over its context.

    tables int32 [rows, blocks]. ``plan``: planned with the contexts' lengths and rows; queries of length 0 get zeros.
    ``scale``: head_dim ** -0.5 by default. ``sinks`` [heads]: a logit of each query head that takes part in its softmax
    without a value. ``ring``: block i of a context is entry i % blocks of its table, and ``blocks`` is a power of two;
    so a table needs entries only for the blocks that queries see. Returns ``out`` [queries, heads, head_dim].

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    shape = check_attention(q, layer, tables, sinks)
    out = check_out(q, out)
    queries = q.shape[0]
    if queries > plan.max_queries or plan.parts.values.shape[1:] != q.shape[1:]:
        raise ValueError(
            f"the plan is for {plan.max_queries} queries of {list(plan.parts.values.shape[1:])}, q is {list(q.shape)}"
        )
    run_decode(
        q, layer, tables, out, shape, plan.config,
        units=plan.units, programs=plan.programs, parts=plan.parts, order=plan.order,
        scale=scale, softcap=softcap, has_window=plan.window is not None, strict=plan.deterministic,
        sinks=sinks, ring=ring,
    )  # fmt: skip
    return out

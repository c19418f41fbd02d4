"""The attention kernel: query rows of one KV head against a stretch of a paged context.

Its work comes in *units*: some neighbouring queries of the batch, the block table they look through, the stretch of
context they see here, and which part of their result that is. Decode attention is units of one query, split along the
context so that all multiprocessors have something to read, and with units of several sequences over a prefix that they
share (after Hydragen, Juravsky et al., arXiv 2402.05099); prefill is units of many queries and the whole context.

Split along the context as in Flash-Decoding; what is done with a stretch of it is in ``tiles``.
"""

import triton
import triton.language as tl

from pagewise_kernels.attention.merging import merge_if_last
from pagewise_kernels.attention.tiles import attend_stretch, finish, merge
from pagewise_kernels.dependent_launch import wait_for_predecessor

UNIT_FIELDS = 6
"""first query, number of queries, row of the block tables, first and last context token (exclusive), part or -1."""


@triton.jit
def unmasked_tiles(row_positions, valid, start, stop, window, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """From where to where all rows see everything; the tiles of ``start`` to ``stop`` before and after need masks."""
    nearest = tl.min(tl.where(valid, row_positions, 2147483647), 0)
    outer = tl.minimum(nearest + 1, stop)
    outer = tl.maximum(start + (outer - start) // TILE * TILE, start)
    inner = start
    if HAS_WINDOW:
        oldest = tl.max(row_positions, 0) - window + 1
        inner = start + tl.maximum((oldest - start + TILE - 1) // TILE, 0) * TILE
        inner = tl.minimum(inner, tl.maximum(start + (stop - start + TILE - 1) // TILE * TILE, start))
        outer = tl.maximum(outer, inner)
    return inner, outer


@triton.jit
def attention_kernel(
    q,
    keys,
    values,
    k_scales,
    v_scales,
    out,
    parts,
    part_highs,
    tables,
    positions,
    units,
    num_units,
    first_parts,
    num_parts,
    arrivals,
    order,
    first_units,
    stride_qn,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_sb,
    stride_st,
    stride_sh,
    stride_on,
    stride_oh,
    stride_tables,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_RUNS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Units times KV heads, shared out among the programs of a fixed grid.

    With ``HAS_RUNS`` each program takes one run of neighbouring units for one KV head; else they take turns.

    Rows of a tile are (query, query head of the KV head): M >= queries of a unit * GROUP. With ``HAS_ORDER`` units of
    several queries are those of entries of ``order``. ``PARTS``: how many parts of a query's result the program merges
    at once that has stored the last of them; with 0 there are no parts. ``SPLIT``: finish and merge after every so many
    context tokens, in the order in which parts are merged one by one (0: never).
    """
    rows = tl.arange(0, M)
    dims = tl.arange(0, DIM)
    program = tl.program_id(0)
    wait_for_predecessor(PDL)
    number = tl.load(num_units)
    if HAS_RUNS:
        run = program // KV_HEADS
        used = tl.load(num_units + 1)
        first_item = tl.load(first_units + run, mask=run < used, other=0)
        next_item = tl.load(first_units + run + 1, mask=run + 1 < used, other=0)
        num_items = tl.where(run < used, tl.where(run + 1 < used, next_item, number), 0)
        step = 1
    else:
        first_item = program
        num_items = number * KV_HEADS
        step = tl.num_programs(0)
    for item in range(first_item, num_items, step):
        if HAS_RUNS:
            unit = units + item * 6
            head = program % KV_HEADS
        else:
            unit = units + (item // KV_HEADS) * 6
            head = item % KV_HEADS
        first_query = tl.load(unit)
        num_queries = tl.load(unit + 1)
        table = tables + tl.load(unit + 2).to(tl.int64) * stride_tables
        start = tl.load(unit + 3)
        stop = tl.load(unit + 4)
        part = tl.load(unit + 5)
        queries = first_query + rows // GROUP
        valid = rows < num_queries * GROUP
        if HAS_ORDER and num_queries > 1:
            queries = tl.load(order + queries, mask=valid, other=0)
        row_positions = tl.load(positions + queries, mask=valid, other=-1)
        q_at = queries.to(tl.int64) * stride_qn + (head * GROUP + rows % GROUP) * stride_qh
        if HEAD_DIM == DIM:
            tile_q = tl.load(q + q_at[:, None] + dims[None, :], mask=valid[:, None], other=0.0).to(COMPUTE)
        else:
            in_head = valid[:, None] & (dims < HEAD_DIM)[None, :]
            tile_q = tl.load(q + q_at[:, None] + dims[None, :], mask=in_head, other=0.0).to(COMPUTE)
        inner, outer = unmasked_tiles(row_positions, valid, start, stop, window, TILE, HAS_WINDOW)
        acc = tl.zeros([M, DIM], tl.float32)
        high = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        k_here, v_here = keys + head * stride_kh, values + head * stride_vh
        ks_here, vs_here = k_scales + head * stride_sh, v_scales + head * stride_sh
        if SPLIT > 0:
            all_acc, all_high, all_total = acc, high, total
            for low in range(start // SPLIT * SPLIT, stop, SPLIT):
                acc = tl.zeros([M, DIM], tl.float32)
                high = tl.full([M], float("-inf"), tl.float32)
                total = tl.zeros([M], tl.float32)
                acc, high, total = attend_stretch(
                    acc, high, total, tile_q, row_positions, k_here, v_here, ks_here, vs_here, table,
                    tl.maximum(low, start), inner, outer, stop, tl.minimum(low + SPLIT, stop),
                    stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, scale, softcap, window,
                    BLOCK_SIZE, HEAD_DIM, DIM, TILE, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, COMPUTE, PRECISION,
                )  # fmt: skip
                acc, high = finish(acc, high, total)
                all_acc, all_high, all_total = merge(all_acc, all_high, all_total, acc, high)
            acc, high, total = all_acc, all_high, all_total
        else:
            acc, high, total = attend_stretch(
                acc, high, total, tile_q, row_positions, k_here, v_here, ks_here, vs_here, table,
                start, inner, outer, stop, stop,
                stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, scale, softcap, window,
                BLOCK_SIZE, HEAD_DIM, DIM, TILE, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, COMPUTE, PRECISION,
            )  # fmt: skip
        acc, high = finish(acc, high, total)
        in_head = valid[:, None] & (dims < HEAD_DIM)[None, :]
        if PARTS > 0 and part >= 0:
            place = (tl.load(first_parts + queries, mask=valid, other=0) + part).to(tl.int64)
            place = place * (KV_HEADS * GROUP) + head * GROUP + rows % GROUP
            tl.store(parts + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_head)
            tl.store(part_highs + place, high, mask=valid)
            tl.debug_barrier()  # all threads have stored: see merge_if_last
            for member in range(num_queries):
                query = first_query
                if HAS_ORDER and num_queries > 1:
                    query = tl.load(order + first_query + member)
                merge_if_last(
                    parts, part_highs, first_parts, num_parts, arrivals, out, query, head, stride_on, stride_oh,
                    KV_HEADS, GROUP, ROWS, HEAD_DIM, DIM, PARTS,
                )  # fmt: skip
        else:
            o_at = queries.to(tl.int64) * stride_on + (head * GROUP + rows % GROUP) * stride_oh
            tl.store(out + o_at[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=in_head)

"""The kernel of prefill attention: query rows of one KV head against a paged context.

Its work comes in *units*: some neighbouring queries of the batch, their block table, and the stretch of context that
they see. ``tiles`` has the work on a tile, as for decodes (``decode_kernel``).
"""

import triton
import triton.language as tl

from pagewise_kernels.attention.tiles import attend_stretch, finish, merge, prepared_queries, row_offsets
from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.kv_int4 import dimensions

UNIT_FIELDS = 5
"""first query, number of queries, row of the block tables, first and last context token (exclusive)."""


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
    q, keys, values, k_scales, v_scales, out, tables, positions, units, num_units, sinks,
    stride_qn, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_sb, stride_st,
    stride_sh, stride_on, stride_oh, stride_tables,
    scale, softcap, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    RING: tl.constexpr = 0, PDL: tl.constexpr = False,
):  # fmt: skip
    """Units times KV heads, which the programs of a fixed grid take in turns.

    Rows of a tile are (query, query head of the KV head): M >= queries of a unit * GROUP. ``SPLIT``: sums begin
    anew and are merged after every so many context tokens, in the order in which parts of decodes are merged one by one
    (0: never). ``HAS_SINKS``: ``sinks`` [heads] has a sink of each query head. ``RING``: see ``block_ids``.
    """
    rows = tl.arange(0, M)
    dims = dimensions(keys, DIM)
    program = tl.program_id(0)
    wait_for_predecessor(PDL)
    for item in range(program, tl.load(num_units) * KV_HEADS, tl.num_programs(0)):
        unit = units + (item // KV_HEADS) * 5
        head = item % KV_HEADS
        first_query = tl.load(unit)
        num_queries = tl.load(unit + 1)
        table = tables + tl.load(unit + 2).to(tl.int64) * stride_tables
        start = tl.load(unit + 3)
        stop = tl.load(unit + 4)
        queries = first_query + rows // GROUP
        valid = rows < num_queries * GROUP
        row_positions = tl.load(positions + queries, mask=valid, other=-1)
        q_at = row_offsets(queries, rows, head, stride_qn, stride_qh, GROUP)
        if HEAD_DIM == DIM:
            tile_q = tl.load(q + q_at[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
        else:
            in_head = valid[:, None] & (dims < HEAD_DIM)[None, :]
            tile_q = tl.load(q + q_at[:, None] + dims[None, :], mask=in_head, other=0.0)
        tile_q, factor = prepared_queries(tile_q, scale, HAS_SCALES, COMPUTE)
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
                    stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, factor, softcap, window,
                    BLOCK_SIZE, HEAD_DIM, DIM, TILE, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, COMPUTE, PRECISION, RING,
                )  # fmt: skip
                all_acc, all_high, all_total = merge(all_acc, all_high, all_total, acc, high, total)
            acc, high, total = all_acc, all_high, all_total
        else:
            acc, high, total = attend_stretch(
                acc, high, total, tile_q, row_positions, k_here, v_here, ks_here, vs_here, table,
                start, inner, outer, stop, stop,
                stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, factor, softcap, window,
                BLOCK_SIZE, HEAD_DIM, DIM, TILE, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, COMPUTE, PRECISION, RING,
            )  # fmt: skip
        in_head = valid[:, None] & (dims < HEAD_DIM)[None, :]
        o_at = row_offsets(queries, rows, head, stride_on, stride_oh, GROUP)
        heads = head * GROUP + rows % GROUP
        result = finish(acc, high, total, sinks, heads, valid, softcap, HAS_SOFTCAP, HAS_SINKS)
        tl.store(out + o_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=in_head)

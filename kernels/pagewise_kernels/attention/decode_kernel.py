"""The kernel of decode attention: one query of a sequence, or some that share a prefix, against a stretch of context.

Its work comes in *units*, which ``plan_decode_kernel`` makes: contexts are split so that all multiprocessors have
something to read, as in Flash-Decoding, and a prefix that several sequences share is read by units of them (after
Hydragen, Juravsky et al., arXiv 2402.05099). All rows of a unit see the same tokens, so the kernel needs no positions.

The loop over tiles has two buffers, and the other programs of the multiprocessor hide the latency of memory: three fit
on Hopper (``config``). A program of a small batch gets a context of a single tile, so the code before and behind the
loop is as short as possible.
"""

import triton
import triton.language as tl

from pagewise_kernels.attention.merging import merge_if_last
from pagewise_kernels.attention.tiles import (
    block_ids,
    finish,
    prepared_queries,
    row_offsets,
    scales_of_tile,
    token_offsets,
    weigh,
)
from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.kv_int4 import dimensions, load_int4
from pagewise_kernels.launch import called_by_kernels, interpreted

DECODE_FIELDS = 9
"""Of a unit: first query; number of queries; row of the block tables; first and last context token (exclusive); which
part of the result of its queries, -1 for all of it; how many parts its first query has, and where they begin; the next
unit of the same program, or -1."""
_INTERPRETED = tl.constexpr(interpreted())
_SPLIT = tl.constexpr("""{
    .reg .b32 bytes;
    .reg .b16 low, high;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {low, high}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
"""Pairs (a, b), (c, d), bytes a, b, c, d of a register from the lowest on, become (a, c) and (b, d) in float16."""
_SPLIT_INT8 = tl.constexpr("""{
    .reg .b32 biased, first, second, bias;
    xor.b32 biased, $2, 0x80808080;
    prmt.b32 first, biased, 0x64646464, 0x4240;
    prmt.b32 second, biased, 0x64646464, 0x4341;
    mov.b32 bias, 0x64806480;
    sub.rn.f16x2 $0, first, bias;
    sub.rn.f16x2 $1, second, bias;
}""")
"""The same of int8, to which 128 is added: then bytes b, 0x64 are 1024 + b in float16."""


@called_by_kernels
def unpack_pairs(pairs, COMPUTE: tl.constexpr, IS_INT8: tl.constexpr):
    """The first and the second values in ``COMPUTE`` of pairs of float8_e4m3fn or int8, which are int16 of any shape.

    Matrix products want values of neighbouring tokens in one register, and KV has neighbouring dimensions next to each
    other. Only elements of 16 bits are transposed when they are loaded from shared memory (``ldmatrix``). So
    values are loaded as pairs, and each half of the dimensions becomes a matrix of its own: three instructions for four
    values, or five of int8. Triton would load each byte by itself, and convert it to bfloat16 with three further
    instructions.
    """
    if tl.float16 == COMPUTE and not _INTERPRETED:
        first, second = tl.inline_asm_elementwise(
            _SPLIT_INT8 if IS_INT8 else _SPLIT, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif IS_INT8:
        bits = pairs.to(tl.uint16, bitcast=True)
        first = (bits & 0xFF).to(tl.uint8).to(tl.int8, bitcast=True).to(COMPUTE)
        second = (bits >> 8).to(tl.uint8).to(tl.int8, bitcast=True).to(COMPUTE)
    else:  # the interpreter knows no machine code, and float32 is not multiplied by such products
        bits = pairs.to(tl.uint16, bitcast=True)
        first = (bits & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(COMPUTE)
        second = (bits >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(COMPUTE)
    return first, second


@triton.jit
def attend_context(
    q, keys, values, k_scales, v_scales, table, start, stop,
    stride_b, stride_t, stride_sb, stride_st, factor, softcap,
    M: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr, PAIRS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Sums acc [M, DIM], high [M] (log2) and total [M] of context tokens ``start`` to ``stop``.

    ``start`` is a multiple of TILE unless HAS_WINDOW. ``PAIRS``: eight bits are read two elements at a time.
    """
    high = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    IS_INT8: tl.constexpr = keys.dtype.element_ty == tl.int8
    IS_INT4: tl.constexpr = keys.dtype.element_ty == tl.int32
    EACH: tl.constexpr = 2 if PAIRS else 1
    ZERO: tl.constexpr = 0 if PAIRS else 0.0
    acc = tl.zeros([M, DIM // EACH], tl.float32)
    second_acc = acc
    if PAIRS:
        keys, values = keys.to(tl.pointer_type(tl.int16)), values.to(tl.pointer_type(tl.int16))
        first_q, second_q = tl.split(tl.reshape(q, [M, DIM // 2, 2]))
    columns = tl.arange(0, DIM // EACH)
    in_head = columns < HEAD_DIM // EACH
    first_tile = start // TILE * TILE if HAS_WINDOW else start
    for tile in range(first_tile, stop, TILE):
        tokens = tile + tl.arange(0, TILE)
        seen = tokens < stop
        if HAS_WINDOW:
            seen = seen & (tokens >= start)
        blocks = block_ids(table, tile, stop, BLOCK_SIZE, TILE, True, RING)
        tokens_at = token_offsets(blocks, tile, stride_b, stride_t, BLOCK_SIZE, TILE)
        at = (tokens_at // EACH)[:, None] + columns[None, :]
        # Keys of tokens that are not there are some memory of the pool: their scores are masked. Values would be
        # multiplied by a weight of 0, which takes numbers.
        if IS_INT4:
            k = load_int4(keys + tokens_at, seen, HEAD_DIM, DIM, False, COMPUTE)
            v = load_int4(values + tokens_at, seen, HEAD_DIM, DIM, True, COMPUTE)
        elif HEAD_DIM == DIM:
            k = tl.load(keys + at)
            v = tl.load(values + at, mask=seen[:, None], other=ZERO)
        else:
            k = tl.load(keys + at, mask=in_head[None, :], other=ZERO)
            v = tl.load(values + at, mask=seen[:, None] & in_head[None, :], other=ZERO)
        if PAIRS:
            first, second = unpack_pairs(tl.trans(k), COMPUTE, IS_INT8)
            scores = tl.dot(first_q, first, input_precision=PRECISION)
            scores = tl.dot(second_q, second, scores, input_precision=PRECISION)
        else:
            scores = tl.dot(q, tl.trans(k).to(COMPUTE), input_precision=PRECISION)
        k_scale, v_scale = None, None
        if HAS_SCALES:
            k_scale = scales_of_tile(k_scales, blocks, tile, seen, stride_sb, stride_st, BLOCK_SIZE, TILE, False)
            v_scale = scales_of_tile(v_scales, blocks, tile, seen, stride_sb, stride_st, BLOCK_SIZE, TILE, True)
        # There is no tile of which nothing is seen.
        weights, shrink, high, total = weigh(
            scores, high, total, k_scale, v_scale, seen[None, :], factor, softcap, True, False, HAS_SOFTCAP, HAS_SCALES
        )
        weights = weights.to(COMPUTE)
        if PAIRS:
            first, second = unpack_pairs(v, COMPUTE, IS_INT8)
            acc = tl.dot(weights, first, acc * shrink[:, None], input_precision=PRECISION)
            second_acc = tl.dot(weights, second, second_acc * shrink[:, None], input_precision=PRECISION)
        else:
            acc = tl.dot(weights, v.to(COMPUTE), acc * shrink[:, None], input_precision=PRECISION)
    if PAIRS:
        acc = tl.reshape(tl.join(acc, second_acc), [M, DIM])
    return acc, high, total


@triton.jit
def fields_of(units, unit):
    """The fields of a unit."""
    at = units + unit * 9
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7), tl.load(at + 8),
    )  # fmt: skip


@triton.jit
def decode_attention_kernel(
    q, keys, values, k_scales, v_scales, out, parts, part_highs, part_totals, tables, units, first_parts, num_parts,
    arrivals, order, sinks,
    stride_qn, stride_qh, stride_b, stride_t, stride_h, stride_sb, stride_st, stride_sh, stride_on, stride_oh,
    stride_tables,
    scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr, HAS_ORDER: tl.constexpr,
    HAS_SINKS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, RING: tl.constexpr = 0,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Program i takes unit i // KV_HEADS, and the units that follow it, for KV head i % KV_HEADS.

    Rows of a tile are (query, query head of the KV head): M >= queries of a unit * GROUP. With ``HAS_ORDER`` the
    queries of a unit with several of them are entries of ``order``. ``PARTS``: how many parts of a query's result are
    merged at once, by the program that has stored the last part. A program without work gets a unit of 0 queries.
    ``HAS_SINKS``: ``sinks`` [heads] has a sink of each query head. ``RING``: see ``block_ids``.
    """
    rows = tl.arange(0, M)
    dims = dimensions(keys, DIM)
    program = tl.program_id(0)
    head = program % KV_HEADS
    unit = program // KV_HEADS
    k_here, v_here = keys + head * stride_h, values + head * stride_h
    ks_here, vs_here = k_scales + head * stride_sh, v_scales + head * stride_sh
    wait_for_predecessor(PDL)
    first_query, num_queries, row, start, stop, part, count, first_part, next_unit = fields_of(units, unit)
    while unit >= 0:
        table = tables + row.to(tl.int64) * stride_tables
        valid = rows < num_queries * GROUP
        queries = first_query + rows // GROUP
        if HAS_ORDER and num_queries > 1:
            queries = tl.load(order + queries, mask=valid, other=0)
        in_head = valid[:, None] & (dims < HEAD_DIM)[None, :]
        q_at = row_offsets(queries, rows, head, stride_qn, stride_qh, GROUP)
        tile_q = tl.load(q + q_at[:, None] + dims[None, :], mask=in_head, other=0.0)
        tile_q, factor = prepared_queries(tile_q, scale, HAS_SCALES, COMPUTE)
        acc, high, total = attend_context(
            tile_q, k_here, v_here, ks_here, vs_here, table, start, stop,
            stride_b, stride_t, stride_sb, stride_st, factor, softcap,
            M, BLOCK_SIZE, HEAD_DIM, DIM, TILE, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, PAIRS, COMPUTE, PRECISION,
            RING,
        )  # fmt: skip
        if part >= 0:
            place = tl.zeros([M], tl.int64) + first_part + part
            if HAS_ORDER and num_queries > 1:
                place = tl.load(first_parts + queries, mask=valid, other=0).to(tl.int64) + part
            place = place * (KV_HEADS * GROUP) + head * GROUP + rows % GROUP
            tl.store(parts + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_head)
            tl.store(part_highs + place, high, mask=valid)
            tl.store(part_totals + place, total, mask=valid)
            tl.debug_barrier()  # all threads have stored: see merge_if_last
            for member in range(num_queries):
                query = first_query
                if HAS_ORDER and num_queries > 1:
                    query = tl.load(order + first_query + member)
                    count = tl.load(num_parts + query)
                    first_part = tl.load(first_parts + query)
                merge_if_last(
                    parts, part_highs, part_totals, first_part, count, arrivals, out, query, head, sinks, softcap,
                    stride_on, stride_oh, KV_HEADS, GROUP, ROWS, HEAD_DIM, DIM, PARTS, HAS_SOFTCAP, HAS_SINKS,
                )  # fmt: skip
        else:
            o_at = row_offsets(queries, rows, head, stride_on, stride_oh, GROUP)
            heads = head * GROUP + rows % GROUP
            result = finish(acc, high, total, sinks, heads, valid, softcap, HAS_SOFTCAP, HAS_SINKS)
            tl.store(out + o_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=in_head)
        unit = next_unit
        if unit >= 0:
            first_query, num_queries, row, start, stop, part, count, first_part, next_unit = fields_of(units, unit)

"""The attention kernel: query rows of one KV head against a stretch of a paged context.

Its work comes in *units*: some neighbouring queries of the batch, the block table they look through, the stretch of
context they see here, and which part of their result that is. Decode attention is units of one query, split along the
context so that all multiprocessors have something to read; prefill is units of many queries and the whole context;
cascade attention has units of many sequences over the prefix they share, and more units for what follows it.

Online softmax after Milakov and Gimelshein (arXiv 1805.02867), tiled as in FlashAttention-2 (Dao, arXiv 2307.08691),
split along the context as in Flash-Decoding.
"""

import triton
import triton.language as tl

UNIT_FIELDS = 6
"""first query, number of queries, row of the block tables, first and last context token (exclusive), part or -1."""


@triton.jit
def attend_tiles(
    acc,
    high,
    total,
    q,
    row_positions,
    keys,
    values,
    k_scales,
    v_scales,
    table,
    start,
    stop,
    end,
    stride_kb,
    stride_kt,
    stride_vb,
    stride_vt,
    stride_sb,
    stride_st,
    scale,
    softcap,
    window,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take context tokens ``start`` to ``stop`` (whole tiles) into acc [M, DIM], high [M] (log2) and total [M].

    ``MASKED``: some row does not see some of them, or they reach over ``end``.
    """
    dims = tl.arange(0, DIM)
    for tile in range(start, stop, TILE):
        tokens = tile + tl.arange(0, TILE)
        if MASKED:
            there = tokens < end
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)
        offsets = tokens % BLOCK_SIZE
        k_at = keys + (blocks * stride_kb + offsets * stride_kt)[None, :] + dims[:, None]
        v_at = values + (blocks * stride_vb + offsets * stride_vt)[:, None] + dims[None, :]
        if MASKED and HEAD_DIM != DIM:
            k = tl.load(k_at, mask=there[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            k = tl.load(k_at, mask=there[None, :], other=0.0)
            v = tl.load(v_at, mask=there[:, None], other=0.0)
        elif HEAD_DIM != DIM:
            k = tl.load(k_at, mask=(dims < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        scores = tl.dot(q, k.to(COMPUTE), input_precision=PRECISION)
        if HAS_SCALES:
            scaled_at = blocks * stride_sb + offsets * stride_st
            if MASKED:
                k_scale = tl.load(k_scales + scaled_at, mask=there, other=0.0)
                v_scale = tl.load(v_scales + scaled_at, mask=there, other=0.0)
            else:
                k_scale = tl.load(k_scales + scaled_at)
                v_scale = tl.load(v_scales + scaled_at)
            scores = scores * k_scale[None, :]
        if HAS_SOFTCAP:
            # tanh by exp2, so that the interpreter and every device compute it alike
            grown = tl.exp2(scores * (scale * 2.8853900817779268 / softcap))
            scores = (softcap * 1.4426950408889634) * (1.0 - 2.0 / (grown + 1.0))
        else:
            scores = scores * (scale * 1.4426950408889634)
        if MASKED:
            seen = (tokens[None, :] <= row_positions[:, None]) & there[None, :]
            if HAS_WINDOW:
                seen = seen & (tokens[None, :] > row_positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_high = tl.maximum(high, tl.max(scores, 1))
        # A row that has seen nothing yet stays at zero instead of becoming inf - inf.
        base = tl.where(new_high == float("-inf"), 0.0, new_high) if MASKED else new_high
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(high - base)
        total = total * shrink + tl.sum(weights, 1)
        if HAS_SCALES:
            weights = weights * v_scale[None, :]
        acc = tl.dot(weights.to(COMPUTE), v.to(COMPUTE), acc * shrink[:, None], input_precision=PRECISION)
        high = new_high
    return acc, high, total


@triton.jit
def attend_stretch(
    acc, high, total, q, row_positions, keys, values, k_scales, v_scales, table, low, inner, outer, end, until,
    stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, scale, softcap, window,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Context tokens ``low`` to ``until``: with masks up to ``inner`` and from ``outer`` on, without in between."""
    if HAS_WINDOW:
        acc, high, total = attend_tiles(
            acc, high, total, q, row_positions, keys, values, k_scales, v_scales, table, low, tl.minimum(inner, until),
            end, stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, scale, softcap, window,
            BLOCK_SIZE, HEAD_DIM, DIM, TILE, True, True, HAS_SOFTCAP, HAS_SCALES, COMPUTE, PRECISION,
        )  # fmt: skip
    acc, high, total = attend_tiles(
        acc, high, total, q, row_positions, keys, values, k_scales, v_scales, table, tl.maximum(inner, low),
        tl.minimum(outer, until), end, stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, scale, softcap,
        window, BLOCK_SIZE, HEAD_DIM, DIM, TILE, False, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, COMPUTE, PRECISION,
    )  # fmt: skip
    return attend_tiles(
        acc, high, total, q, row_positions, keys, values, k_scales, v_scales, table, tl.maximum(outer, low), until,
        end, stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, scale, softcap, window,
        BLOCK_SIZE, HEAD_DIM, DIM, TILE, True, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, COMPUTE, PRECISION,
    )  # fmt: skip


@triton.jit
def merge(acc, high, total, part, part_high):
    """Add a finished part (normalised, with the log2 of its weight) to a weighted sum of parts."""
    new_high = tl.maximum(high, part_high)
    base = tl.where(new_high == float("-inf"), 0.0, new_high)
    mine, its = tl.exp2(high - base), tl.exp2(part_high - base)
    return acc * mine[:, None] + part * its[:, None], new_high, total * mine + its


@triton.jit
def finish(acc, high, total):
    """A part from its sums: normalised, with the log2 of its weight."""
    nothing = total == 0.0
    safe = tl.where(nothing, 1.0, total)
    return acc / safe[:, None], tl.where(nothing, float("-inf"), high + tl.log2(safe))


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
    M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_RUNS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Units times KV heads, shared out among the programs of a fixed grid.

    With ``HAS_RUNS`` each program takes one run of neighbouring units for one KV head; else they take turns.

    Rows of a tile are (query, query head of the KV head): M >= queries of a unit * GROUP. With ``HAS_ORDER`` a unit's
    queries are entries of ``order``, where those that share a context are neighbours. ``SPLIT``: finish and merge
    after every so many context tokens, in the order in which ``reduce_kernel`` merges parts (0: never).
    """
    rows = tl.arange(0, M)
    dims = tl.arange(0, DIM)
    program = tl.program_id(0)
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
        if HAS_ORDER:
            queries = tl.load(order + queries, mask=valid, other=0)
        row_positions = tl.load(positions + queries, mask=valid, other=-1)
        q_at = queries.to(tl.int64) * stride_qn + (head * GROUP + rows % GROUP) * stride_qh
        if HEAD_DIM == DIM:
            tile_q = tl.load(q + q_at[:, None] + dims[None, :], mask=valid[:, None], other=0.0).to(COMPUTE)
        else:
            in_head = valid[:, None] & (dims < HEAD_DIM)[None, :]
            tile_q = tl.load(q + q_at[:, None] + dims[None, :], mask=in_head, other=0.0).to(COMPUTE)
        # All rows see everything from ``inner`` to ``outer``; the tiles before and after need masks.
        nearest = tl.min(tl.where(valid, row_positions, 2147483647), 0)
        outer = tl.minimum(nearest + 1, stop)
        outer = tl.maximum(start + (outer - start) // TILE * TILE, start)
        inner = start
        if HAS_WINDOW:
            oldest = tl.max(row_positions, 0) - window + 1
            inner = start + tl.maximum((oldest - start + TILE - 1) // TILE, 0) * TILE
            inner = tl.minimum(inner, tl.maximum(start + (stop - start + TILE - 1) // TILE * TILE, start))
            outer = tl.maximum(outer, inner)
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
        if HAS_PARTS and part >= 0:
            heads = KV_HEADS * GROUP
            place = (tl.load(first_parts + queries, mask=valid, other=0) + part).to(tl.int64)
            place = place * heads + head * GROUP + rows % GROUP
            tl.store(parts + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=in_head)
            tl.store(part_highs + place, high, mask=valid)
        else:
            o_at = queries.to(tl.int64) * stride_on + (head * GROUP + rows % GROUP) * stride_oh
            tl.store(out + o_at[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=in_head)


@triton.jit
def reduce_kernel(
    parts,
    part_highs,
    first_parts,
    num_parts,
    out,
    stride_on,
    stride_oh,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Merge the parts of one query and head, ``PARTS`` at a time, if there are at least ``LEAST``.

    A query without any pads the batch. It gets zeros: what lies in uninitialised memory should not go on from here.
    """
    query, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(num_parts + query)
    if count == 0:
        dims = tl.arange(0, DIM)
        at = out + query.to(tl.int64) * stride_on + head * stride_oh + dims
        tl.store(at, tl.zeros([DIM], out.dtype.element_ty), mask=dims < HEAD_DIM)
    if count >= LEAST:
        first = tl.load(first_parts + query).to(tl.int64)
        dims = tl.arange(0, DIM)
        some = tl.arange(0, PARTS)
        acc = tl.zeros([1, DIM], tl.float32)
        high = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        for start in range(0, count, PARTS):
            here = start + some < count
            place = (first + start + some) * HEADS + head
            highs = tl.load(part_highs + place, mask=here, other=float("-inf"))
            in_head = here[:, None] & (dims < HEAD_DIM)[None, :]
            tile = tl.load(parts + place[:, None] * HEAD_DIM + dims[None, :], mask=in_head, other=0.0)
            if PARTS == 1:
                acc, high, total = merge(acc, high, total, tile, highs)
            else:
                new_high = tl.maximum(high, tl.max(highs, 0))
                base = tl.where(new_high == float("-inf"), 0.0, new_high)
                mine, its = tl.exp2(high - base), tl.exp2(highs - base)
                acc = acc * mine[:, None] + tl.sum(tile * its[:, None], 0)[None, :]
                total = total * mine + tl.sum(its, 0)
                high = new_high
        acc, high = finish(acc, high, total)
        o_at = out + query.to(tl.int64) * stride_on + head * stride_oh + dims[None, :]
        tl.store(o_at, acc.to(out.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])

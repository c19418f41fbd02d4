"""A stretch of a paged context, tile by tile: the loops in which attention spends its time.

Online softmax after Milakov and Gimelshein (arXiv 1805.02867), tiled as in FlashAttention-2 (Dao, arXiv 2307.08691).
"""

import triton
import triton.language as tl

from pagewise_kernels.kv_int4 import load_int4


@triton.jit
def block_ids(
    table, tile, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, RING: tl.constexpr = 0
):
    """Ids of the blocks that hold TILE tokens from ``tile`` on, a multiple of TILE: one for each block of a tile.

    Where no block begins at the edge of a tile, because its size is no power of two, one for each token. ``RING``: the
    number of entries of the table, a power of two, if it is a ring: then block i is entry i % RING; 0: it is entry i.
    """
    if BLOCK_SIZE & (BLOCK_SIZE - 1) == 0:
        first = tile // BLOCK_SIZE + tl.arange(0, TILE // BLOCK_SIZE if TILE > BLOCK_SIZE else 1)
        begin = first * BLOCK_SIZE
    else:
        begin = tile + tl.arange(0, TILE)
        first = begin // BLOCK_SIZE
    if RING > 0:
        first = first & (RING - 1)
    if MASKED:
        ids = tl.load(table + first, mask=begin < end, other=0)
    else:
        ids = tl.load(table + first)
    return ids.to(tl.int64)


@triton.jit
def token_offsets(blocks, tile, stride_block, stride_token, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Where the TILE tokens from ``tile`` on lie, from the ids of their blocks."""
    places = tl.arange(0, TILE)
    if BLOCK_SIZE & (BLOCK_SIZE - 1) != 0:
        inside = (tile + places) % BLOCK_SIZE
    elif BLOCK_SIZE >= TILE:
        inside = tile % BLOCK_SIZE + places
    else:
        # Before the multiplication by the stride, by which the compiler knows the alignment of addresses: Triton 3.6
        # forgets it after a reshape, and would copy two bytes at a time.
        blocks = tl.reshape(tl.broadcast_to(blocks[:, None], [TILE // BLOCK_SIZE, BLOCK_SIZE]), [TILE])
        inside = places % BLOCK_SIZE
    return blocks * stride_block + inside * stride_token


@triton.jit
def row_offsets(queries, rows, head, stride_query, stride_head, GROUP: tl.constexpr):
    """Where the rows (query, query head of KV head ``head``) of a tile lie in queries or results."""
    return queries.to(tl.int64) * stride_query + (head * GROUP + rows % GROUP) * stride_head


@triton.jit
def prepared_queries(q, scale, HAS_SCALES: tl.constexpr, COMPUTE: tl.constexpr):
    """Queries [M, DIM] as they are multiplied, and the factor that makes logarithms (log2) of weights of the products.

    Next to float8 keys, which become float16, rows are divided by the power of two below their greatest element: so all
    of bfloat16 fits into float16, and only elements 2**-14 below the greatest are rounded. The factor, which is [M]
    then, includes this power.
    """
    factor = scale * 1.4426950408889634
    if HAS_SCALES:
        wide = q.to(tl.float32)
        exponent = tl.max(tl.abs(wide), 1).to(tl.uint32, bitcast=True) & 0x7F800000
        unit = tl.where(exponent == 0, 1.0, exponent.to(tl.float32, bitcast=True))
        q = wide / unit[:, None]
        factor = unit * factor
    return q.to(COMPUTE), factor


@triton.jit
def weigh(
    scores, high, total, k_scale, v_scale, seen, factor, softcap,
    MASKED: tl.constexpr, SEES_NONE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Weights [M, TILE] of a tile, the factor [M] of former sums, and the new high and total [M].

    ``scores`` [M, TILE]: products of queries and keys; ``k_scale``, ``v_scale`` [TILE] of float8 KV. ``seen``, with
    ``MASKED``: the tokens that count. ``SEES_NONE``: there may be rows that have seen no token yet.

    Scales never multiply an element of K or V. The scale of a key multiplies its score. The scale of a value multiplies
    the weight of the value, in the sum but not in the total. So that weights fit into float16 with scales of any size,
    its power of two is added to the exponent before the maximum is taken: ``high`` is the maximum of both together.
    """
    if HAS_SCALES:
        scores = scores * k_scale[None, :]
    if HAS_SOFTCAP:
        # tanh x = 1 - 2 / (exp 2x + 1), by exp2, so that the interpreter and every device compute it alike. The 1,
        # which all scores have in common, cancels out in the softmax.
        if HAS_SCALES:
            scores = scores * (factor * (2.0 / softcap))[:, None]
        else:
            scores = scores * (factor * (2.0 / softcap))
        scores = -1.0 / (tl.exp2(scores) + 1.0)
        factor = softcap * 2.8853900817779268
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    # The exponent of a weight is ``factor`` times its score, less the maximum: one fused multiply-add.
    if HAS_SCALES:
        bits = v_scale.to(tl.uint32, bitcast=True) & 0x7F800000
        power = ((bits >> 23).to(tl.int32) - 127).to(tl.float32)
        part_of_power = (0x7F000000 - bits).to(tl.float32, bitcast=True)
        if HAS_SOFTCAP:
            scores = tl.fma(scores, factor, power[None, :])
        else:
            scores = tl.fma(scores, factor[:, None], power[None, :])
        new_high = tl.maximum(high, tl.max(scores, 1))
    else:
        new_high = tl.maximum(high, tl.max(scores, 1) * factor)
    # A row that has seen nothing yet stays at zero instead of becoming inf - inf.
    base = tl.where(new_high == float("-inf"), 0.0, new_high) if SEES_NONE else new_high
    shrink = tl.exp2(high - base)
    if HAS_SCALES:
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights * part_of_power[None, :], 1)
        weights = weights * (v_scale * part_of_power)[None, :]
    else:
        weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
        total = total * shrink + tl.sum(weights, 1)
    return weights, shrink, new_high, total


@triton.jit
def scales_of_tile(
    scales, blocks, tile, seen, stride_sb, stride_st,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scales [TILE] of float8 keys or values; with ``MASKED`` 0 for tokens that are not there."""
    at = scales + token_offsets(blocks, tile, stride_sb, stride_st, BLOCK_SIZE, TILE)
    return tl.load(at, mask=seen, other=0.0) if MASKED else tl.load(at)


@triton.jit
def attend_tiles(
    acc, high, total, q, row_positions, keys, values, k_scales, v_scales, table, start, stop, end,
    stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st,
    factor, softcap, window,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Take context tokens ``start`` to ``stop`` (whole tiles) into acc [M, DIM], high [M] (log2) and total [M].

    ``start`` is a multiple of TILE. ``MASKED``: some row does not see some of them, or they reach over ``end``.
    """
    dims = tl.arange(0, DIM)
    for tile in range(start, stop, TILE):
        tokens = tile + tl.arange(0, TILE)
        there = tokens < end
        blocks = block_ids(table, tile, end, BLOCK_SIZE, TILE, MASKED, RING)
        k_tokens = keys + token_offsets(blocks, tile, stride_kb, stride_kt, BLOCK_SIZE, TILE)
        v_tokens = values + token_offsets(blocks, tile, stride_vb, stride_vt, BLOCK_SIZE, TILE)
        k_at, v_at = k_tokens[None, :] + dims[:, None], v_tokens[:, None] + dims[None, :]
        if keys.dtype.element_ty == tl.int32:
            k = tl.trans(load_int4(k_tokens, there, HEAD_DIM, DIM, MASKED, COMPUTE))
            v = load_int4(v_tokens, there, HEAD_DIM, DIM, MASKED, COMPUTE)
        elif MASKED and HEAD_DIM != DIM:
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
        k_scale, v_scale, seen = None, None, None
        if HAS_SCALES:
            k_scale = scales_of_tile(k_scales, blocks, tile, there, stride_sb, stride_st, BLOCK_SIZE, TILE, MASKED)
            v_scale = scales_of_tile(v_scales, blocks, tile, there, stride_sb, stride_st, BLOCK_SIZE, TILE, MASKED)
        if MASKED:
            seen = (tokens[None, :] <= row_positions[:, None]) & there[None, :]
            if HAS_WINDOW:
                seen = seen & (tokens[None, :] > row_positions[:, None] - window)
        weights, shrink, high, total = weigh(
            scores, high, total, k_scale, v_scale, seen, factor, softcap, MASKED, MASKED, HAS_SOFTCAP, HAS_SCALES
        )
        acc = tl.dot(weights.to(COMPUTE), v.to(COMPUTE), acc * shrink[:, None], input_precision=PRECISION)
    return acc, high, total


@triton.jit
def attend_stretch(
    acc, high, total, q, row_positions, keys, values, k_scales, v_scales, table, low, inner, outer, end, until,
    stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, factor, softcap, window,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """Context tokens ``low`` to ``until``: with masks up to ``inner`` and from ``outer`` on, without in between."""
    if HAS_WINDOW:
        acc, high, total = attend_tiles(
            acc, high, total, q, row_positions, keys, values, k_scales, v_scales, table, low, tl.minimum(inner, until),
            end, stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, factor, softcap, window,
            BLOCK_SIZE, HEAD_DIM, DIM, TILE, True, True, HAS_SOFTCAP, HAS_SCALES, COMPUTE, PRECISION, RING,
        )  # fmt: skip
    acc, high, total = attend_tiles(
        acc, high, total, q, row_positions, keys, values, k_scales, v_scales, table, tl.maximum(inner, low),
        tl.minimum(outer, until), end, stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, factor,
        softcap, window, BLOCK_SIZE, HEAD_DIM, DIM, TILE, False, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, COMPUTE,
        PRECISION, RING,
    )  # fmt: skip
    return attend_tiles(
        acc, high, total, q, row_positions, keys, values, k_scales, v_scales, table, tl.maximum(outer, low), until,
        end, stride_kb, stride_kt, stride_vb, stride_vt, stride_sb, stride_st, factor, softcap, window,
        BLOCK_SIZE, HEAD_DIM, DIM, TILE, True, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, COMPUTE, PRECISION, RING,
    )  # fmt: skip


@triton.jit
def merge(acc, high, total, part, part_high, part_total):
    """Add the sums of a part to the sums of earlier parts. Every row of it has seen a token, unless it is the first."""
    new_high = tl.maximum(high, part_high)
    base = tl.where(new_high == float("-inf"), 0.0, new_high)
    mine, its = tl.exp2(high - base), tl.exp2(part_high - base)
    return acc * mine[:, None] + part * its[:, None], new_high, total * mine + part_total * its


@triton.jit
def finish(acc, high, total, sinks, heads, there, softcap, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The result of sums over a whole context; zeros where it is empty.

    ``HAS_SINKS``: the query head ``heads`` [M] of each row that is ``there`` [M] has a sink, a logit that weighs like
    the score of a token without a value. It is counted here, because only here all parts of a context are together.
    """
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=there, other=0.0).to(tl.float32)
        if HAS_SOFTCAP:
            sink -= softcap  # as ``weigh`` leaves the 1 out
        # The bound keeps it finite: relative to a sink of 2**126, the context has no weight in any type of results.
        total += tl.exp2(tl.minimum(sink * 1.4426950408889634 - high, 126.0))
    return acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]

"""A stretch of a paged context, tile by tile: the loop in which attention spends its time.

Online softmax after Milakov and Gimelshein (arXiv 1805.02867), tiled as in FlashAttention-2 (Dao, arXiv 2307.08691).
"""

import triton
import triton.language as tl


@triton.jit
def block_ids(table, tile, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Ids of the blocks that hold TILE tokens from ``tile`` on, a multiple of TILE: one for each block of a tile.

    Where no block begins at the edge of a tile, because its size is no power of two, one for each token.
    """
    if BLOCK_SIZE & (BLOCK_SIZE - 1) == 0:
        first = tile // BLOCK_SIZE + tl.arange(0, TILE // BLOCK_SIZE if TILE > BLOCK_SIZE else 1)
        begin = first * BLOCK_SIZE
    else:
        begin = tile + tl.arange(0, TILE)
        first = begin // BLOCK_SIZE
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
        # Before the multiplication by the stride, which tells the compiler how addresses are aligned: Triton 3.6 has
        # forgotten it after a reshape, and would copy two bytes at a time.
        blocks = tl.reshape(tl.broadcast_to(blocks[:, None], [TILE // BLOCK_SIZE, BLOCK_SIZE]), [TILE])
        inside = places % BLOCK_SIZE
    return blocks * stride_block + inside * stride_token


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

    ``start`` is a multiple of TILE. ``MASKED``: some row does not see some of them, or they reach over ``end``.
    """
    dims = tl.arange(0, DIM)
    for tile in range(start, stop, TILE):
        tokens = tile + tl.arange(0, TILE)
        there = tokens < end
        blocks = block_ids(table, tile, end, BLOCK_SIZE, TILE, MASKED)
        k_at = keys + token_offsets(blocks, tile, stride_kb, stride_kt, BLOCK_SIZE, TILE)[None, :] + dims[:, None]
        v_at = values + token_offsets(blocks, tile, stride_vb, stride_vt, BLOCK_SIZE, TILE)[:, None] + dims[None, :]
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
        # The exponent of a weight is ``factor`` times its score, less the maximum: one fused multiply-add.
        factor = scale * 1.4426950408889634
        if HAS_SCALES:
            scaled_at = token_offsets(blocks, tile, stride_sb, stride_st, BLOCK_SIZE, TILE)
            if MASKED:
                k_scale = tl.load(k_scales + scaled_at, mask=there, other=0.0)
                v_scale = tl.load(v_scales + scaled_at, mask=there, other=0.0)
            else:
                k_scale = tl.load(k_scales + scaled_at)
                v_scale = tl.load(v_scales + scaled_at)
            if HAS_SOFTCAP:
                scores = scores * (k_scale * (scale * 2.8853900817779268 / softcap))[None, :]
            else:
                # Each token has a scale of its own, which the maximum needs: all factors go into this product.
                scores = scores * (k_scale * factor)[None, :]
        elif HAS_SOFTCAP:
            scores = scores * (scale * 2.8853900817779268 / softcap)
        if HAS_SOFTCAP:
            # tanh x = 1 - 2 / (exp 2x + 1), by exp2, so that the interpreter and every device compute it alike. The 1,
            # which all scores have in common, cancels out in the softmax.
            scores = -1.0 / (tl.exp2(scores) + 1.0)
            factor = softcap * 2.8853900817779268
        if MASKED:
            seen = (tokens[None, :] <= row_positions[:, None]) & there[None, :]
            if HAS_WINDOW:
                seen = seen & (tokens[None, :] > row_positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        if HAS_SCALES and not HAS_SOFTCAP:
            new_high = tl.maximum(high, tl.max(scores, 1))
        else:
            new_high = tl.maximum(high, tl.max(scores, 1) * factor)
        # A row that has seen nothing yet stays at zero instead of becoming inf - inf.
        base = tl.where(new_high == float("-inf"), 0.0, new_high) if MASKED else new_high
        if HAS_SCALES and not HAS_SOFTCAP:
            weights = tl.exp2(scores - base[:, None])
        else:
            weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
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

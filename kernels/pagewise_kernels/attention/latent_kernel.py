"""The kernels of attention to latents (multi-head latent attention, MLA): one vector per token for all query heads.

A vector is the part of a key that is rotated, and then the latent, which is the rest of the key and also the value. So
a tile of latents is loaded once for both products. The query heads are cut into groups that fit into a tile, and each
group computes as if it had a KV head of its own (``KV_HEADS``), which has the same address for all of them. Work comes
in the units of ``decode_kernel`` and ``kernel``, and parts of decodes are merged as theirs are.
"""

import triton
import triton.language as tl

from pagewise_kernels.attention.decode_kernel import fields_of
from pagewise_kernels.attention.kernel import unmasked_tiles
from pagewise_kernels.attention.merging import merge_if_last
from pagewise_kernels.attention.tiles import block_ids, finish, row_offsets, token_offsets, weigh
from pagewise_kernels.dependent_launch import wait_for_predecessor


@triton.jit
def load_rows(at, there, SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Rows of SIZE elements from the pointers ``at`` [n] on, as [n, PADDED]; with MASKED, zeros where not ``there``."""
    columns = tl.arange(0, PADDED)
    pointers = at[:, None] + columns[None, :]
    if MASKED and SIZE != PADDED:
        rows = tl.load(pointers, mask=there[:, None] & (columns < SIZE)[None, :], other=0.0)
    elif MASKED:
        rows = tl.load(pointers, mask=there[:, None], other=0.0)
    elif SIZE != PADDED:
        rows = tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def unknown_zero(at):
    """Zero, which the compiler does not know, from a number at ``at`` that is not negative.

    Addresses that depend on it are computed where it is read, and not kept in registers all through the loops before.
    """
    return tl.minimum(tl.load(at, volatile=True), 0)


@triton.jit
def attend_latents(
    acc, high, total, q, rotated_q, row_positions, keys, table, start, stop, end, stride_b, stride_t, factor,
    BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr,
    ROTATED_DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take context tokens ``start`` to ``stop`` into acc [M, DIM], high [M] (log2) and total [M].

    ``start`` is a multiple of TILE. ``MASKED``: they reach over ``end``, or with ``CAUSAL`` some row does not see some
    of them. Without ``CAUSAL`` all rows see all of them.
    """
    for tile in range(start, stop, TILE):
        tokens = tile + tl.arange(0, TILE)
        there = tokens < end
        blocks = block_ids(table, tile, end, BLOCK_SIZE, TILE, MASKED)
        at = keys + token_offsets(blocks, tile, stride_b, stride_t, BLOCK_SIZE, TILE)
        rotated = load_rows(at, there, ROTATED, ROTATED_DIM, MASKED).to(COMPUTE)
        latents = load_rows(at + ROTATED, there, LATENT, DIM, MASKED).to(COMPUTE)
        scores = tl.dot(rotated_q, tl.trans(rotated), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(latents), scores, input_precision=PRECISION)
        seen = None
        if MASKED and CAUSAL:
            seen = (tokens[None, :] <= row_positions[:, None]) & there[None, :]
        elif MASKED:
            seen = there[None, :]
        weights, shrink, high, total = weigh(
            scores, high, total, None, None, seen, factor, 1.0, MASKED, MASKED and CAUSAL, False, False
        )
        acc = tl.dot(weights.to(COMPUTE), latents, acc * shrink[:, None], input_precision=PRECISION)
    return acc, high, total


@triton.jit
def latent_decode_attention_kernel(
    q, keys, out, parts, part_highs, part_totals, tables, units, arrivals,
    stride_qn, stride_qh, stride_b, stride_t, stride_on, stride_oh, stride_tables, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, DIM: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_DIM: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Program i takes unit i // KV_HEADS, and the units that follow it, for the query heads of group i % KV_HEADS.

    A unit has one query, or none in a program without work. See ``decode_attention_kernel``.
    """
    dims = tl.arange(0, DIM)
    program = tl.program_id(0)
    head, unit = program % KV_HEADS, program // KV_HEADS
    wait_for_predecessor(PDL)
    query, num_queries, row, start, stop, part, count, first_part, next_unit = fields_of(units, unit)
    while unit >= 0:
        table = tables + row.to(tl.int64) * stride_tables
        rows = tl.arange(0, M) + tl.minimum(start, 0)
        heads = head * GROUP + rows
        valid = rows < num_queries * GROUP
        q_at = q + query.to(tl.int64) * stride_qn + heads * stride_qh
        rotated_q = load_rows(q_at, valid, ROTATED, ROTATED_DIM, True).to(COMPUTE)
        tile_q = load_rows(q_at + ROTATED, valid, LATENT, DIM, True).to(COMPUTE)
        acc = tl.zeros([M, DIM], tl.float32)
        high = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        factor = scale * 1.4426950408889634
        outer = stop // TILE * TILE
        acc, high, total = attend_latents(
            acc, high, total, tile_q, rotated_q, None, keys, table, start, outer, stop, stride_b, stride_t, factor,
            BLOCK_SIZE, LATENT, DIM, ROTATED, ROTATED_DIM, TILE, False, False, COMPUTE, PRECISION,
        )  # fmt: skip
        acc, high, total = attend_latents(
            acc, high, total, tile_q, rotated_q, None, keys, table, outer, stop, stop, stride_b, stride_t, factor,
            BLOCK_SIZE, LATENT, DIM, ROTATED, ROTATED_DIM, TILE, True, False, COMPUTE, PRECISION,
        )  # fmt: skip
        rows = tl.arange(0, M) + unknown_zero(units + unit * 9 + 3)  # where it starts, see fields_of
        heads, valid = head * GROUP + rows, rows < num_queries * GROUP
        in_head = valid[:, None] & (dims < LATENT)[None, :]
        if part >= 0:
            place = (first_part + part).to(tl.int64) * (KV_HEADS * GROUP) + heads
            tl.store(parts + place[:, None] * LATENT + dims[None, :], acc, mask=in_head)
            tl.store(part_highs + place, high, mask=valid)
            tl.store(part_totals + place, total, mask=valid)
            tl.debug_barrier()  # all threads have stored: see merge_if_last
            merge_if_last(
                parts, part_highs, part_totals, first_part, count, arrivals, out, query, head, None, 1.0,
                stride_on, stride_oh, KV_HEADS, GROUP, ROWS, LATENT, DIM, PARTS, False, False,
            )  # fmt: skip
        else:
            o_at = query.to(tl.int64) * stride_on + heads * stride_oh
            result = finish(acc, high, total, None, None, None, 1.0, False, False)
            tl.store(out + o_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=in_head)
        unit = next_unit
        if unit >= 0:
            query, num_queries, row, start, stop, part, count, first_part, next_unit = fields_of(units, unit)


@triton.jit
def latent_prefill_attention_kernel(
    q, keys, out, tables, positions, units, num_units,
    stride_qn, stride_qh, stride_b, stride_t, stride_on, stride_oh, stride_tables, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, DIM: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_DIM: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Units times groups of query heads, which the programs of a fixed grid take in turns: see ``attention_kernel``."""
    dims = tl.arange(0, DIM)
    program = tl.program_id(0)
    wait_for_predecessor(PDL)
    for item in range(program, tl.load(num_units) * KV_HEADS, tl.num_programs(0)):
        unit = units + (item // KV_HEADS) * 5
        head = item % KV_HEADS
        first_query, num_queries = tl.load(unit), tl.load(unit + 1)
        table = tables + tl.load(unit + 2).to(tl.int64) * stride_tables
        start, stop = tl.load(unit + 3), tl.load(unit + 4)
        rows = tl.arange(0, M)
        queries = first_query + rows // GROUP
        valid = rows < num_queries * GROUP
        row_positions = tl.load(positions + queries, mask=valid, other=-1)
        q_at = q + row_offsets(queries, rows, head, stride_qn, stride_qh, GROUP)
        rotated_q = load_rows(q_at, valid, ROTATED, ROTATED_DIM, True).to(COMPUTE)
        tile_q = load_rows(q_at + ROTATED, valid, LATENT, DIM, True).to(COMPUTE)
        _, outer = unmasked_tiles(row_positions, valid, start, stop, 0, TILE, False)
        acc = tl.zeros([M, DIM], tl.float32)
        high = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        factor = scale * 1.4426950408889634
        acc, high, total = attend_latents(
            acc, high, total, tile_q, rotated_q, row_positions, keys, table, start, outer, stop, stride_b, stride_t,
            factor, BLOCK_SIZE, LATENT, DIM, ROTATED, ROTATED_DIM, TILE, False, True, COMPUTE, PRECISION,
        )  # fmt: skip
        acc, high, total = attend_latents(
            acc, high, total, tile_q, rotated_q, row_positions, keys, table, outer, stop, stop, stride_b, stride_t,
            factor, BLOCK_SIZE, LATENT, DIM, ROTATED, ROTATED_DIM, TILE, True, True, COMPUTE, PRECISION,
        )  # fmt: skip
        rows = tl.arange(0, M) + unknown_zero(unit + 3)
        queries, valid = first_query + rows // GROUP, rows < num_queries * GROUP
        in_head = valid[:, None] & (dims < LATENT)[None, :]
        o_at = row_offsets(queries, rows, head, stride_on, stride_oh, GROUP)
        result = finish(acc, high, total, None, None, None, 1.0, False, False)
        tl.store(out + o_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=in_head)

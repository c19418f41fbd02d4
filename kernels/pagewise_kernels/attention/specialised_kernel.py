"""Prefill attention for Hopper by specialised warps: four load K and V, and two groups of four compute.

The scheme is that of FlashAttention 3 (Shah et al., arXiv 2407.08608). Each consumer has 64 of the 128 (query, head)
rows of a unit. It issues the scores of a tile before the weighted values of the tile before, and weighs the former
while the tensor cores still compute the latter; and while one consumer weighs, the other one multiplies.

Triton's own language cannot say which warps do which work on Hopper, so this is written in Gluon, which has no
interpreter. ``tests/kernels/gluon_threads.py`` runs this source on threads instead, and an executor compares the
results with PyTorch's on its device before it uses them.

A barrier flips its phase when all of its arrivals have come. Tile number ``count`` of a program, counted over all of
its items, is in buffer ``count % STAGES``, as the tile number ``count // STAGES`` there. A consumer waits for that
phase of ``full``, and the producer for the phase before it of ``empty``, which counts as complete at first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""From Triton 3.9 on it has the former name, and the latter one raises."""
_ROWS = gl.constexpr(64)
"""Rows of a consumer: the rows of a product of four warps."""
_PIECE = gl.constexpr(16)
"""Tokens of a piece of a block. Tiles are copied piece by piece, which takes as few registers for large blocks."""
_LOADERS = gl.constexpr(128)
"""Threads of the producer, each of which arrives when its copies have."""


@gluon.jit
def item_of(turn):
    """The item of a program in a turn. Items come in descending order of work, so turns alternate in direction."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    place = program if turn % 2 == 0 else programs - 1 - program
    return turn * programs + place


@gluon.jit
def copy_tile(
    tile, pool, ids, begin, stop, stride_piece, stride_token,
    PIECES: gl.constexpr, DIM: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Begin to copy the tokens from ``begin`` on, which lie in the pieces ``ids`` [PIECES] of the pool. Zeros replace
    the tokens from ``stop`` on: their weights are zero, but zero times the content of the pool may be NaN."""
    line: gl.constexpr = gl.SliceLayout(0, COPIED)
    pieces = gl.expand_dims(gl.expand_dims(gl.arange(0, PIECES, gl.SliceLayout(1, gl.SliceLayout(2, COPIED))), 1), 2)
    places = gl.expand_dims(gl.arange(0, _PIECE, gl.SliceLayout(1, line)), 1)
    dims = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, line)), 0)
    firsts = gl.expand_dims(gl.expand_dims(ids.to(gl.int64) * stride_piece, 1), 2)
    at = firsts + gl.expand_dims(places * stride_token + dims, 0)
    there, at = gl.broadcast(begin + pieces * _PIECE + gl.expand_dims(places, 0) < stop, at)
    copy_async(tile.reshape([PIECES, _PIECE, DIM]), pool + at, mask=there)


@gluon.jit
def load_tiles(
    keys, values, tables, units, num_units, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_tables,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_STRIDE: gl.constexpr, DIM: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer: K and V of all tiles of all items of a program. Their strides are equal, and are given twice:
    offsets that both share would have to be kept over a wait, for which there are no registers."""
    PIECES: gl.constexpr = TILE // _PIECE
    OF_BLOCK: gl.constexpr = BLOCK_SIZE // _PIECE
    # A thread copies 16 bytes, and the threads of a row lie beside each other.
    COPIED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // DIM, DIM // 8], [1, 4, 1], [2, 1, 0])
    numbers = gl.arange(0, PIECES, gl.SliceLayout(1, gl.SliceLayout(2, COPIED)))
    items = gl.load(num_units) * KV_HEADS
    count = 0
    turn = 0
    item = item_of(turn)
    while item < items:
        unit = units + (item // KV_HEADS) * 5
        head = item % KV_HEADS
        table = tables + gl.load(unit + 2).to(gl.int64) * stride_tables
        stop = gl.load(unit + 4)
        for begin in range(0, stop, TILE):
            piece = begin // _PIECE + numbers
            ids = gl.load(table + piece // OF_BLOCK, mask=piece * _PIECE < stop, other=0)
            ids = ids * BLOCK_STRIDE + piece % OF_BLOCK
            stage, phase = count % STAGES, (count // STAGES + 1) % 2
            mbarrier.wait(k_empty.index(stage), phase)
            copy_tile(
                k_tiles.index(stage), keys + head * stride_kh, ids, begin, stop, stride_kp, stride_kt,
                PIECES, DIM, COPIED,
            )  # fmt: skip
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(v_empty.index(stage), phase)
            copy_tile(
                v_tiles.index(stage), values + head * stride_vh, ids, begin, stop, stride_vp, stride_vt,
                PIECES, DIM, COPIED,
            )  # fmt: skip
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            count += 1
        turn += 1
        item = item_of(turn)


@gluon.jit
def weigh(scores, high, total, positions, places, begin, unmasked, factor, TILE: gl.constexpr):
    """Weights of a tile, the factor of former sums, the new high and total: as ``tiles.weigh`` computes them.
    Rows see the first token of a context in their first tile, so ``high`` is finite."""
    if begin + TILE > unmasked:
        seen = gl.expand_dims(begin + places, 0) <= gl.expand_dims(positions, 1)
        scores = gl.where(seen, scores, float("-inf"))
    new_high = gl.maximum(high, gl.max(scores, 1) * factor)
    shrink = gl.exp2(high - new_high)
    weights = gl.exp2(scores * factor - gl.expand_dims(new_high, 1))
    return weights, shrink, new_high, total * shrink + gl.sum(weights, 1)


@gluon.jit
def attend(
    q, out, units, num_units, q_rows, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    stride_qn, stride_qh, stride_on, stride_oh, factor,
    FIRST: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer: the rows from ``FIRST`` on of all items of a program."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROW_OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    q_lines = FIRST + gl.arange(0, _ROWS, gl.SliceLayout(1, LINES))
    q_dims = gl.arange(0, DIM, gl.SliceLayout(0, LINES))
    rows = FIRST + gl.arange(0, _ROWS, gl.SliceLayout(1, SCORES))
    places = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    out_rows = FIRST + gl.arange(0, _ROWS, ROW_OF_SUMS)
    out_dims = gl.arange(0, DIM, gl.SliceLayout(0, SUMS))
    none = gl.full([_ROWS, TILE], 0.0, gl.float32, SCORES)
    items = gl.load(num_units) * KV_HEADS
    count = 0
    turn = 0
    item = item_of(turn)
    while item < items:
        unit = units + (item // KV_HEADS) * 5
        head = item % KV_HEADS
        first_query = gl.load(unit)
        num_queries = gl.load(unit + 1)
        stop = gl.load(unit + 4)
        at = (first_query + q_lines // GROUP).to(gl.int64) * stride_qn + (head * GROUP + q_lines % GROUP) * stride_qh
        there = gl.expand_dims(q_lines < num_queries * GROUP, 1)
        q_rows.store(gl.load(q + (gl.expand_dims(at, 1) + gl.expand_dims(q_dims, 0)), mask=there, other=0.0))
        fence_async_shared()  # by the writing threads, before the barrier behind which the tensor cores read
        # The queries of a unit are neighbours, the last of which is the last token that the unit sees.
        positions = stop - num_queries + rows // GROUP
        unmasked = stop - num_queries + FIRST // GROUP + 1
        high = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.full([_ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.full([_ROWS, DIM], 0.0, gl.float32, SUMS)

        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), count // STAGES % 2)
        fence_async_shared()
        scores = warpgroup_mma(q_rows, k_tiles.index(stage).permute((1, 0)), none, use_acc=False)
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, shrink, high, total = weigh(scores, high, total, positions, places, 0, unmasked, factor, TILE)
        weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
        count += 1
        mbarrier.wait(k_full.index(count % STAGES), count // STAGES % 2, pred=stop > TILE)
        for begin in range(TILE, stop, TILE):
            stage, before = count % STAGES, (count - 1) % STAGES
            mbarrier.wait(v_full.index(before), (count - 1) // STAGES % 2)
            fence_async_shared()
            later = warpgroup_mma(q_rows, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            sums = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[later])
            mbarrier.arrive(k_empty.index(stage), count=1)
            new, shrink, high, total = weigh(scores, high, total, positions, places, begin, unmasked, factor, TILE)
            new = gl.convert_layout(new.to(dtype), WEIGHTS)
            # The exponentials stay in front of the second wait by two means: for the compiler the wait takes the new
            # weights along, and for the assembler the wait for the next keys ends a basic block.
            count += 1
            mbarrier.wait(k_full.index(count % STAGES), count // STAGES % 2, pred=begin + TILE < stop)
            acc, weights = warpgroup_mma_wait(0, deps=[sums, new])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, ROW_OF_SUMS), 1)
        before = (count - 1) % STAGES
        mbarrier.wait(v_full.index(before), (count - 1) // STAGES % 2)
        fence_async_shared()
        acc = warpgroup_mma(weights, v_tiles.index(before), acc)
        mbarrier.arrive(v_empty.index(before), count=1)

        acc = acc * gl.expand_dims(gl.convert_layout(1.0 / total, ROW_OF_SUMS), 1)
        at = (first_query + out_rows // GROUP).to(gl.int64) * stride_on + (head * GROUP + out_rows % GROUP) * stride_oh
        there = gl.expand_dims(out_rows < num_queries * GROUP, 1)
        gl.store(out + (gl.expand_dims(at, 1) + gl.expand_dims(out_dims, 0)), acc.to(dtype), mask=there)
        turn += 1
        item = item_of(turn)


@gluon.jit
def specialised_prefill_kernel(
    q, keys, values, out, tables, units, num_units,
    stride_qn, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_on, stride_oh,
    stride_tables, factor,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_STRIDE: gl.constexpr,
    DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Units times KV heads, as in ``attention_kernel``, without windows, caps, scales and parts.

    ``factor``: the scale of the scores times log2 e. BLOCK_SIZE is a power of two from 16 on. ``stride_kp`` and
    ``stride_vp`` are from one piece of 16 tokens to the next, and BLOCK_STRIDE is that of blocks, in such pieces.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], SHARED)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], SHARED)
    q_low = gl.allocate_shared_memory(dtype, [_ROWS, DIM], SHARED)
    q_high = gl.allocate_shared_memory(dtype, [_ROWS, DIM], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=_LOADERS)
        mbarrier.init(v_full.index(stage), count=_LOADERS)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (attend, (q, out, units, num_units, q_low, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                      stride_qn, stride_qh, stride_on, stride_oh, factor, 0, KV_HEADS, GROUP, DIM, TILE, STAGES)),
            (attend, (q, out, units, num_units, q_high, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                      stride_qn, stride_qh, stride_on, stride_oh, factor, _ROWS, KV_HEADS, GROUP, DIM, TILE, STAGES)),
            (load_tiles, (keys, values, tables, units, num_units, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                          stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_tables,
                          KV_HEADS, BLOCK_SIZE, BLOCK_STRIDE, DIM, TILE, STAGES)),
        ],
        [4, 4],
        # Registers of a thread of the second consumer and of the producer; the first consumer gets the rest.
        [240, 24],
    )  # fmt: skip

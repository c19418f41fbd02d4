"""Shares the contexts of a decode batch out among programs, on the device, so that it can be part of a CUDA graph."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_queries"], do_not_specialize_on_alignment=["lengths", "rows"])
def plan_decode_kernel(
    lengths,
    rows,
    positions,
    units,
    num_units,
    first_units,
    first_parts,
    num_parts,
    num_queries,
    num_runs,
    window,
    max_units,
    TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    N: tl.constexpr,
):
    """One program: units of one query each for ``attention_kernel``.

    ``lengths`` [num_queries]: context tokens, 0 for none; ``rows`` [num_queries]: of the block tables. The tiles of all
    contexts, one after the other, are cut into ``num_runs`` runs of equal length, whose first units go into
    ``first_units``; where a run crosses from one context to the next, it is two units. Or, if SPLIT_TILES is not 0,
    each context is cut after every SPLIT_TILES of its own, so that its parts never depend on the batch. ``num_units``
    gets the number of units, and that of runs with any. ``window``: tokens that count, a large number for all of them.
    """
    queries = tl.arange(0, N)
    there = queries < num_queries
    length = tl.load(lengths + queries, mask=there, other=0)
    row = tl.load(rows + queries, mask=there, other=0)
    tl.store(positions + queries, length - 1, mask=there)
    first_tile = tl.maximum(length - window, 0) // TILE
    if SPLIT_TILES > 0:
        first_tile = first_tile // SPLIT_TILES * SPLIT_TILES
    tiles = (length + TILE - 1) // TILE - first_tile
    total = tl.sum(tiles, 0)
    if SPLIT_TILES > 0:
        size = SPLIT_TILES
        begin = tiles * 0
    else:
        size = tl.maximum((total + num_runs - 1) // num_runs, 1)
        begin = tl.cumsum(tiles, 0) - tiles
    first_run = begin // size
    count = tl.where(tiles > 0, (begin + tiles - 1) // size - first_run + 1, 0)
    first = tl.cumsum(count, 0) - count
    tl.store(first_parts + queries, first, mask=there)
    tl.store(num_parts + queries, count, mask=there)
    tl.store(num_units, tl.minimum(tl.sum(count, 0), max_units))
    tl.store(num_units + 1, (total + size - 1) // size)
    for part in range(tl.max(count, 0)):
        unit = first + part
        valid = (part < count) & (unit < max_units)
        run = first_run + part
        low = tl.maximum(run * size, begin)
        high = tl.minimum((run + 1) * size, begin + tiles)
        start = (first_tile + low - begin) * TILE
        at = units + unit * 6
        tl.store(at, queries, mask=valid)
        tl.store(at + 1, tl.full([N], 1, tl.int32), mask=valid)
        tl.store(at + 2, row, mask=valid)
        tl.store(at + 3, start, mask=valid)
        tl.store(at + 4, tl.minimum(start + (high - low) * TILE, length), mask=valid)
        tl.store(at + 5, tl.where(count > 1, part, -1), mask=valid)
        if SPLIT_TILES == 0:
            tl.store(first_units + run, unit, mask=valid & (low == run * size))

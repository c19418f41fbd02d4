"""Shares the contexts of a decode batch out among programs, on the device, so that it can be part of a CUDA graph."""

import triton
import triton.language as tl


@triton.jit
def plan_decode_kernel(
    lengths,
    rows,
    positions,
    units,
    num_units,
    first_parts,
    num_parts,
    num_queries,
    target,
    window,
    max_units,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    N: tl.constexpr,
):
    """One program: units of one query each for ``attention_kernel``.

    ``lengths`` [num_queries]: context tokens, 0 for none; ``rows`` [num_queries]: of the block tables. A part gets the
    tiles that make about ``target`` units in all, at least MIN_TILES; or exactly SPLIT_TILES if that is not 0, so that
    parts never depend on the batch. ``window``: tokens that count, a large number for all of them. At most
    ``max_units`` are written.
    """
    queries = tl.arange(0, N)
    length = tl.load(lengths + queries, mask=queries < num_queries, other=0)
    row = tl.load(rows + queries, mask=queries < num_queries, other=0)
    tl.store(positions + queries, length - 1, mask=queries < num_queries)
    first_tile = tl.maximum(length - window, 0) // TILE
    if SPLIT_TILES > 0:
        first_tile = first_tile // SPLIT_TILES * SPLIT_TILES
    tiles = (length + TILE - 1) // TILE - first_tile
    if SPLIT_TILES > 0:
        size = SPLIT_TILES
    else:
        size = tl.maximum((tl.sum(tiles, 0) + target - 1) // target, MIN_TILES)
    count = (tiles + size - 1) // size
    after = tl.cumsum(count, 0)
    first = after - count
    tl.store(first_parts + queries, first, mask=queries < num_queries)
    tl.store(num_parts + queries, count, mask=queries < num_queries)
    tl.store(num_units, tl.minimum(tl.sum(count, 0), max_units))
    for part in range(tl.max(count, 0)):
        unit = first + part
        valid = (part < count) & (unit < max_units)
        start = (first_tile + part * size) * TILE
        at = units + unit * 6
        tl.store(at, queries, mask=valid)
        tl.store(at + 1, tl.full([N], 1, tl.int32), mask=valid)
        tl.store(at + 2, row, mask=valid)
        tl.store(at + 3, start, mask=valid)
        tl.store(at + 4, tl.minimum(start + size * TILE, length), mask=valid)
        tl.store(at + 5, tl.where(count > 1, part, -1), mask=valid)

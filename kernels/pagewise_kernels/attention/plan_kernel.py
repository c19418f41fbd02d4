"""Shares the contexts of a decode batch out among programs, on the device, so that it can be part of a CUDA graph."""

import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor


@triton.jit(do_not_specialize=["num_queries"], do_not_specialize_on_alignment=["lengths", "rows"])
def plan_decode_kernel(
    lengths, rows, units, first_parts, num_parts, num_items, item_of, order, item_firsts, item_sizes, item_tokens,
    slot_counts, arrivals, num_queries, num_runs, window, max_units, kv_heads,
    TILE: tl.constexpr, SPLIT_TILES: tl.constexpr, SHARING: tl.constexpr, N: tl.constexpr, RUNS: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr = 0, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program: units for ``decode_attention_kernel``, whose programs take ``num_runs`` runs of them per KV head.

    ``lengths`` [num_queries]: context tokens, 0 for none, -1 for no decode; ``rows`` [num_queries]: of the block
    tables. The tiles of all contexts, one after the other, are cut into ``num_runs`` runs of equal length; where a run
    crosses from one context to the next, it is two units. Or, if SPLIT_TILES is not 0, each context is cut after every
    SPLIT_TILES of its own, so that its parts never depend on the batch, and runs take units in turns. ``window``:
    tokens that count, a large number for all of them. With ATTENTION_CHUNK, whole tiles, the tokens of the last chunk
    of so many count.

    The first unit of run i is unit i, so that a program finds its work with one access to memory; the others lie behind
    the first units of all runs (or in order, with SPLIT_TILES), and each has the index of the next. A run without work
    has a unit of 0 queries. RUNS: ``num_runs`` rounded up to a power of two.

    With ``SHARING`` there are also ``num_items`` [1] shared stretches: the first ``item_tokens`` (whole tiles) of the
    contexts of ``item_sizes`` queries, which begin at ``item_firsts`` in ``order``. They are cut like contexts, which
    begin behind them: the context of query i behind stretch ``item_of[i]``, unless that is -1.

    Each query has parts from ``first_parts`` on, ``num_parts`` of them: the parts of its stretch, then its own. A query
    without context, which pads the batch, gets a unit without tokens, whose result is zeros: later layers should not
    read uninitialised memory. A query of length -1 gets no unit: it is no decode, and prefill attention writes its
    result.

    ``arrivals`` [queries, kv_heads] of these queries become 0. They are already, unless units did not fit into
    ``max_units`` in an earlier step: then its parts never were complete, and later steps would merge theirs too early.
    """
    slots = tl.arange(0, N)  # queries, and behind them the shared stretches
    wait_for_predecessor(PDL)
    is_query = slots < num_queries
    length = tl.load(lengths + slots, mask=is_query, other=-1)
    there = length >= 0
    row = tl.load(rows + slots, mask=is_query, other=0)
    first_token = tl.maximum(length - window, 0)
    if ATTENTION_CHUNK > 0:
        first_token = tl.maximum(length - 1, 0) // ATTENTION_CHUNK * ATTENTION_CHUNK
    first_tile = first_token // TILE
    first_query = slots
    size_of = tl.full([N], 1, tl.int32)
    if SHARING:
        item = slots - num_queries
        is_item = (item >= 0) & (item < tl.load(num_items))
        there = there | is_item
        first_query = tl.where(is_item, tl.load(item_firsts + item, mask=is_item, other=0), slots)
        size_of = tl.load(item_sizes + item, mask=is_item, other=1)
        length = tl.where(is_item, tl.load(item_tokens + item, mask=is_item, other=0), length)
        leader = tl.load(order + first_query, mask=is_item, other=0)
        row = tl.where(is_item, tl.load(rows + leader, mask=is_item, other=0), row)
        stretch = tl.load(item_of + slots, mask=is_query, other=-1)
        first_tile = tl.load(item_tokens + stretch, mask=stretch >= 0, other=0) // TILE
    if SPLIT_TILES > 0:
        first_tile = first_tile // SPLIT_TILES * SPLIT_TILES
    tiles = tl.where(there, tl.maximum((length + TILE - 1) // TILE - first_tile, 1), 0)
    total = tl.sum(tiles, 0)
    if SPLIT_TILES > 0:
        size = SPLIT_TILES
        begin = tiles * 0
    else:
        size = tl.maximum((total + num_runs - 1) // num_runs, 1)
        begin = tl.cumsum(tiles, 0) - tiles
    first_run = begin // size
    count = tl.where(there, (begin + tiles - 1) // size - first_run + 1, 0)
    first = tl.cumsum(count, 0) - count
    before = slots * 0
    if SHARING:
        # By way of memory each query learns of how many parts its stretch consists.
        tl.store(slot_counts + slots, count, mask=there)
        tl.debug_barrier()
        before = tl.load(slot_counts + num_queries + stretch, mask=stretch >= 0, other=0)
    parts = tl.where(is_query, before + count, 0)
    first_part = tl.cumsum(parts, 0) - parts
    tl.store(first_parts + slots, first_part, mask=is_query)
    tl.store(num_parts + slots, parts, mask=is_query)
    for head in range(kv_heads):
        tl.store(arrivals + slots * kv_heads + head, 0, mask=is_query)
    num_units = tl.minimum(tl.sum(count, 0), max_units)
    runs = tl.arange(0, RUNS)
    idle = (runs >= (num_units if SPLIT_TILES > 0 else (total + size - 1) // size)) & (runs < num_runs)
    for field in tl.static_range(9):
        tl.store(units + runs * 9 + field, -1 if field == 5 or field == 8 else 0, mask=idle)
    for part in range(tl.max(count, 0)):
        number = first + part
        run = first_run + part
        low = tl.maximum(run * size, begin)
        end = begin + tiles
        high = tl.minimum((run + 1) * size, end)
        start = (first_tile + low - begin) * TILE
        if SPLIT_TILES > 0:
            unit, next_unit = number, number + num_runs
            goes_on = next_unit < num_units
        else:
            unit = tl.where(low == run * size, run, num_runs + number)
            next_unit = num_runs + number + 1
            goes_on = (high == end) & (end < tl.minimum((run + 1) * size, total))
        valid = (part < count) & (number < max_units)
        at = units + unit * 9
        tl.store(at, first_query, mask=valid)
        tl.store(at + 1, size_of, mask=valid)
        tl.store(at + 2, row, mask=valid)
        tl.store(at + 3, start if SHARING else tl.maximum(start, first_token), mask=valid)
        tl.store(at + 4, tl.minimum(start + (high - low) * TILE, length), mask=valid)
        tl.store(at + 5, tl.where(parts == 1, -1, before + part), mask=valid)
        tl.store(at + 6, parts, mask=valid)
        tl.store(at + 7, first_part, mask=valid)
        tl.store(at + 8, tl.where(goes_on, next_unit, -1), mask=valid)

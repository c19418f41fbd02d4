"""Merges the parts of a query's attention in the program that finishes the last of them, so that it takes no launch."""

import triton
import triton.language as tl

from pagewise_kernels.attention.tiles import finish


@triton.jit
def merge_if_last(
    parts, part_highs, part_totals, first, count, arrivals, out, query, head, sinks, softcap,
    stride_on, stride_oh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    AT_ONCE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Count a part of ``query`` and KV head ``head`` that this program has stored; merge all parts if it is the last.

    The query has ``count`` parts from index ``first`` on.
    ``arrivals`` int32 [queries, KV_HEADS]: parts that have been stored, 0 before and after a launch. ``AT_ONCE``: parts
    that are read together. With 1 they are merged one after the other, in the order of the context, by any program.
    ``ROWS``: query heads that are merged at once, a power of two. ``sinks``: see ``finish``.

    Why nothing stale is read: the caller has a barrier between its stores and this call, so all threads' stores come
    before the atomic, which one thread executes as a release and an acquire for the whole device. The last program's
    acquire covers every release before it in the chain of additions, thus all parts. Triton hands the
    atomic's result to the other threads through shared memory behind a barrier, so their loads come after the acquire.
    These loads go to the L2 cache (.cg): a line of a former launch may linger in the L1 cache of this multiprocessor.

    The last program sets the counter back to 0. No other program reads it later in this launch, and the next launch on
    this stream, or the next replay of its graph, waits until this one has ended, if it begins earlier at all.
    """
    arrival = arrivals + query * KV_HEADS + head
    if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == count - 1:
        tl.store(arrival, 0)
        dims = tl.arange(0, DIM)
        for some_rows in range(0, GROUP, ROWS):
            rows = some_rows + tl.arange(0, ROWS)
            in_head = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
            acc = tl.zeros([ROWS, DIM], tl.float32)
            high = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            EACH: tl.constexpr = KV_HEADS * GROUP
            place = first.to(tl.int64) * EACH + head * GROUP + rows
            at = parts + place[:, None] * HEAD_DIM + dims[None, :]
            highs_at, totals_at = part_highs + place, part_totals + place
            for start in range(0, count, AT_ONCE):
                # The maximum first, and then all parts by it: nothing waits for one part before the next is read.
                new_high = high
                for some in tl.static_range(AT_ONCE):
                    here = (rows < GROUP) & (start + some < count)
                    its = tl.load(highs_at + some * EACH, mask=here, other=float("-inf"), cache_modifier=".cg")
                    new_high = tl.maximum(new_high, its)
                base = tl.where(new_high == float("-inf"), 0.0, new_high)  # rows that are none
                shrink = tl.exp2(high - base)
                acc, total, high = acc * shrink[:, None], total * shrink, new_high
                for some in tl.static_range(AT_ONCE):
                    here = (rows < GROUP) & (start + some < count)
                    its = tl.load(highs_at + some * EACH, mask=here, other=float("-inf"), cache_modifier=".cg")
                    part_total = tl.load(totals_at + some * EACH, mask=here, other=0.0, cache_modifier=".cg")
                    there = in_head & (start + some < count)
                    part = tl.load(at + some * (EACH * HEAD_DIM), mask=there, other=0.0, cache_modifier=".cg")
                    weight = tl.exp2(its - base)
                    acc += part * weight[:, None]
                    total += part_total * weight
                at += AT_ONCE * EACH * HEAD_DIM
                highs_at += AT_ONCE * EACH
                totals_at += AT_ONCE * EACH
            heads = head * GROUP + rows
            result = finish(acc, high, total, sinks, heads, rows < GROUP, softcap, HAS_SOFTCAP, HAS_SINKS)
            o_at = query.to(tl.int64) * stride_on + heads * stride_oh
            tl.store(out + o_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=in_head)

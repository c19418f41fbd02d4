"""Merges the parts of a query's attention in the program that finishes the last of them, so that it takes no launch."""

import triton
import triton.language as tl

from pagewise_kernels.attention.tiles import finish, merge


@triton.jit
def merge_if_last(
    parts,
    part_highs,
    first_parts,
    num_parts,
    arrivals,
    out,
    query,
    head,
    stride_on,
    stride_oh,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Count a part of ``query`` and KV head ``head`` that this program has stored; merge all parts if it is the last.

    ``arrivals`` int32 [queries, KV_HEADS]: parts that have been stored, 0 before and after a launch. ``AT_ONCE``: parts
    that are read together. With 1 they are merged one after the other, in the order of the context, whoever merges.
    ``ROWS``: GROUP rounded up to a power of two.

    Why nothing stale is read: the caller has a barrier between its stores and this call, so all threads' stores come
    before the atomic, which one thread executes as a release and an acquire for the whole device. The last program's
    acquire sees what every release before it in the chain of additions has covered, thus all parts. Triton hands the
    atomic's result to the other threads through shared memory behind a barrier, so their loads come after the acquire.
    These loads go to the L2 cache (.cg): a line of a former launch may linger in the L1 cache of this multiprocessor.

    The last program sets the counter back to 0. Nobody else looks at it any more in this launch, and the next launch on
    this stream, or the next replay of its graph, waits until this one has ended, if it begins earlier at all.
    """
    arrival = arrivals + query * KV_HEADS + head
    count = tl.load(num_parts + query)
    if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == count - 1:
        tl.store(arrival, 0)
        first = tl.load(first_parts + query).to(tl.int64)
        rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
        in_head = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        acc = tl.zeros([ROWS, DIM], tl.float32)
        high = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, count, AT_ONCE):
            if AT_ONCE == 1:
                place = (first + start) * (KV_HEADS * GROUP) + head * GROUP + rows
                highs = tl.load(part_highs + place, mask=rows < GROUP, other=float("-inf"), cache_modifier=".cg")
                at = parts + place[:, None] * HEAD_DIM + dims[None, :]
                part = tl.load(at, mask=in_head, other=0.0, cache_modifier=".cg")
                acc, high, total = merge(acc, high, total, part, highs)
            else:
                some = start + tl.arange(0, AT_ONCE)
                place = ((first + some) * (KV_HEADS * GROUP))[:, None] + (head * GROUP + rows)[None, :]
                here = (some < count)[:, None] & (rows < GROUP)[None, :]
                highs = tl.load(part_highs + place, mask=here, other=float("-inf"), cache_modifier=".cg")
                at = parts + place[:, :, None] * HEAD_DIM + dims[None, None, :]
                mask = here[:, :, None] & (dims < HEAD_DIM)[None, None, :]
                some_parts = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
                new_high = tl.maximum(high, tl.max(highs, 0))
                base = tl.where(new_high == float("-inf"), 0.0, new_high)
                mine, its = tl.exp2(high - base), tl.exp2(highs - base[None, :])
                acc = acc * mine[:, None] + tl.sum(some_parts * its[:, :, None], 0)
                total = total * mine + tl.sum(its, 0)
                high = new_high
        acc, high = finish(acc, high, total)
        o_at = query.to(tl.int64) * stride_on + (head * GROUP + rows) * stride_oh
        tl.store(out + o_at[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=in_head)

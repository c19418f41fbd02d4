"""The experts of a mixture (Shazeer and others, arXiv 1701.06538): each token's rows meet the weights of its experts.

    out = Σ over the experts e of a token of    weight_e · down_e · (silu(gate_e · x) · (up_e · x))

Nothing waits for the host, so all of it may be part of a CUDA graph. Pairs of a token and an expert are sorted by
expert on the device and cut into tiles of one expert each, as in MegaBlocks (arXiv 2211.15841) and in vLLM's fused_moe.
The grid has a program for each possible tile; a program without a tile ends at once. As in ``skinny_linear``, operands
are swapped: a tile of the weight is the left one, so a few tokens per expert cost no more than a narrow right one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import check_device, interpreted, is_hopper, launch
from pagewise_kernels.products import FLOATS, compute_options
from pagewise_kernels.shapes import power_of_two

_FEW_IDS, _MANY_IDS = 128, 1024
"""Pairs that a program of the sort looks at together: as many as a small decode step has, or more."""


@triton.jit
def choose_experts_kernel(
    logits, weights, chosen,
    stride_logits,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, NORMALISE: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: token. ``PADDED``, ``SLOTS``: EXPERTS and TOP_K up to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    experts, slots = tl.arange(0, PADDED), tl.arange(0, SLOTS)
    wait_for_predecessor(PDL)
    read = tl.load(logits + token * stride_logits + experts, mask=experts < EXPERTS, other=-float("inf")).to(tl.float32)
    left = tl.where(read == read, read, -float("inf"))  # NaN is not chosen before numbers
    shares = tl.exp(read - tl.max(left, 0))
    whole = tl.sum(shares, 0)
    found, values = tl.zeros([SLOTS], tl.int32), tl.zeros([SLOTS], tl.float32)
    for slot in tl.static_range(TOP_K):
        best = tl.argmax(left, 0)  # the first of equal ones, so always an existing expert
        value = tl.sum(tl.where(experts == best, shares, 0.0), 0)
        found = tl.where(slots == slot, best, found)
        values = tl.where(slots == slot, value, values)
        left = tl.where(experts == best, -float("inf"), left)
    values = values / (tl.sum(values, 0) if NORMALISE else whole)
    at = token * TOP_K + slots
    tl.store(chosen + at, found, mask=slots < TOP_K)
    tl.store(weights + at, values.to(weights.dtype.element_ty), mask=slots < TOP_K)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "num_counters"])
def sort_by_expert_kernel(
    chosen, order, tiles, counters, num_pairs, num_tiles, num_counters,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: expert. It counts the pairs of all experts, and finds its own, in their order.

    ``order`` int32 [pairs]: pairs by expert. ``tiles`` int32 [tiles, 3]: expert, -1 for a tile that is not used, and
    the stretch of ``order`` that it has. ``counters`` int32: all become 0.
    """
    expert = tl.program_id(0)
    experts, ids = tl.arange(0, PADDED), tl.arange(0, AT_ONCE)
    wait_for_predecessor(PDL)
    for start in range(expert * AT_ONCE, num_counters, EXPERTS * AT_ONCE):
        tl.store(counters + start + ids, 0, mask=start + ids < num_counters)
    counts = tl.zeros([PADDED], tl.int32)
    for start in range(0, num_pairs, AT_ONCE):
        there = start + ids < num_pairs
        found = tl.load(chosen + start + ids, mask=there, other=PADDED - 1)
        counts += tl.histogram(found, PADDED)  # which has a place behind the last expert
    counts = tl.where(experts < EXPERTS, counts, 0)
    tile_counts = (counts + ROWS - 1) // ROWS
    begin = tl.sum(tl.where(experts < expert, counts, 0), 0)
    end = begin + tl.sum(tl.where(experts == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(experts < expert, tile_counts, 0), 0)
    used = tl.sum(tile_counts, 0)
    for start in range(begin, end, ROWS):
        entry = tiles + 3 * (first_tile + (start - begin) // ROWS)
        tl.store(entry, expert)
        tl.store(entry + 1, start)
        tl.store(entry + 2, tl.minimum(start + ROWS, end))
    for start in range(used + expert * AT_ONCE, num_tiles, EXPERTS * AT_ONCE):
        tl.store(tiles + 3 * (start + ids), -1, mask=start + ids < num_tiles)
    for start in range(0, num_pairs, AT_ONCE):
        there = start + ids < num_pairs
        own = (tl.load(chosen + start + ids, mask=there, other=PADDED - 1) == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(own, 0) - 1, start + ids, mask=own > 0)
        begin += tl.sum(own, 0)


@triton.jit
def _product(
    weight_rows, x_rows, size_in,
    INNER: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """weight · xᵀ in float32, of pointers to rows of ``size_in`` inputs each; ``WHOLE``: a multiple of ``INNER``."""
    inner = tl.arange(0, INNER)
    acc = tl.zeros([weight_rows.shape[0], x_rows.shape[0]], tl.float32)
    for start in range(0, size_in, INNER):
        if WHOLE:
            w = tl.load(weight_rows[:, None] + (start + inner)[None, :])
            a = tl.load(x_rows[None, :] + (start + inner)[:, None])
        else:
            left = start + inner < size_in
            w = tl.load(weight_rows[:, None] + (start + inner)[None, :], mask=left[None, :], other=0.0)
            a = tl.load(x_rows[None, :] + (start + inner)[:, None], mask=left[:, None], other=0.0)
        acc = tl.dot(w.to(COMPUTE), a.to(COMPUTE), acc, input_precision=PRECISION)
    return acc


@triton.jit
def expert_gate_up_kernel(
    x, gate_up, tiles, order, activated,
    stride_x, stride_expert,
    size_in, size_out,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, WHOLE: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: tile of columns; tile of pairs. silu(gate) · up of each pair, in the order of ``order``.

    Rows of gate and up take turns in a tile of the weight, so that 32 of each fill the 64 that ``wgmma`` takes.
    """
    entry = tiles + 3 * tl.program_id(1)
    both = tl.arange(0, 2 * COLUMNS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    read = tl.minimum(tl.program_id(0) * COLUMNS + both // 2, size_out - 1) + both % 2 * size_out
    wait_for_predecessor(PDL)
    expert = tl.load(entry)
    if expert >= 0:
        at = tl.load(entry + 1) + tl.arange(0, ROWS)
        there = at < tl.load(entry + 2)
        # Rows behind the end compute the first token, and store nothing: no load of the loop needs a mask.
        tokens = tl.load(order + at, mask=there, other=0) // TOP_K
        weight_rows = gate_up + expert.to(tl.int64) * stride_expert + read * size_in
        x_rows = x + tokens.to(tl.int64) * stride_x
        acc = _product(weight_rows, x_rows, size_in, INNER, WHOLE, COMPUTE, PRECISION)
        gate, up = tl.split(tl.permute(tl.reshape(acc, [COLUMNS, 2, ROWS]), [0, 2, 1]))
        kind = activated.dtype.element_ty  # rounded in between, as a linear layer and ``silu_mul`` do it
        gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
        to = activated + at.to(tl.int64)[None, :] * size_out + columns[:, None]
        tl.store(to, gate.to(kind), mask=there[None, :] & (columns < size_out)[:, None])


@triton.jit
def store_sums(
    acc, pairs, there, columns, column_there, weights, parts, counters, out, size_out, TOP_K: tl.constexpr
):  # fmt: skip
    """Store the outputs ``acc`` [columns, pairs] of experts times their weights, and the sums of complete tokens.

    ``parts`` [pairs, size_out]. ``counters`` int32 [tokens, tiles of columns], 0 before: how many parts there are. The
    program that brings a token its last one adds up all of them, in the order in which the token chose its experts.
    """
    kind = out.dtype.element_ty
    acc = acc.to(kind).to(tl.float32) * tl.load(weights + pairs, mask=there, other=0.0).to(tl.float32)[None, :]
    to = parts + pairs.to(tl.int64)[None, :] * size_out + columns[:, None]
    tl.store(to, acc.to(kind), mask=there[None, :] & column_there)
    # ``attention/merging.py`` explains why the last program reads no stale data.
    tl.debug_barrier()
    tokens = pairs // TOP_K
    counter = counters + tokens.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    last = there & (tl.atomic_add(counter, 1, mask=there, sem="acq_rel", scope="gpu") == TOP_K - 1)
    if tl.max(last.to(tl.int32), 0) > 0:
        total = tl.zeros(acc.shape, tl.float32)
        finished = last[None, :] & column_there
        for slot in range(TOP_K):
            rows = parts + (tokens * TOP_K + slot).to(tl.int64)[None, :] * size_out
            part = tl.load(rows + columns[:, None], mask=finished, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        to = out + tokens.to(tl.int64)[None, :] * size_out + columns[:, None]
        tl.store(to, total.to(kind), mask=finished)


@triton.jit
def expert_down_kernel(
    activated, down, weights, tiles, order, parts, counters, out,
    stride_expert,
    size_in, size_out,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, WHOLE: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: tile of columns; tile of pairs. Each pair's part of its token's result, and the sums of all parts."""
    entry = tiles + 3 * tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    read, column_there = tl.minimum(columns, size_out - 1), (columns < size_out)[:, None]
    wait_for_predecessor(PDL)
    expert = tl.load(entry)
    if expert >= 0:
        at = tl.load(entry + 1) + tl.arange(0, ROWS)
        there = at < tl.load(entry + 2)
        pairs = tl.load(order + at, mask=there, other=0)
        x_rows = activated + tl.where(there, at, 0).to(tl.int64) * size_in
        weight_rows = down + expert.to(tl.int64) * stride_expert + read * size_in
        acc = _product(weight_rows, x_rows, size_in, INNER, WHOLE, COMPUTE, PRECISION)
        store_sums(acc, pairs, there, columns, column_there, weights, parts, counters, out, size_out, TOP_K)


def choose_experts(
    logits: torch.Tensor, top_k: int, *, normalise: bool, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [tokens, top_k] and numbers int32 [tokens, top_k] of the experts with the largest logits.

    ``logits`` [tokens, experts]. Weights are a softmax over all experts, or over the chosen ones (``normalise``), of
    type ``dtype``, by default of the logits' type. Of equal experts the first is chosen.

    Raises:
        ValueError: shapes, strides or devices do not fit.
    """
    if logits.dim() != 2 or not 1 <= top_k <= logits.shape[1] or logits.stride(1) != 1:
        raise ValueError(f"{top_k} experts cannot be chosen by logits {list(logits.shape)} [tokens, experts]")
    check_device(logits)
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=logits.dtype if dtype is None else dtype, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    launch(
        choose_experts_kernel, (tokens,), logits, weights, chosen, logits.stride(0), EXPERTS=experts,
        PADDED=power_of_two(experts), TOP_K=top_k, SLOTS=power_of_two(top_k), NORMALISE=normalise, num_warps=1,
    )  # fmt: skip
    return weights, chosen


class _Tile(NamedTuple):
    """``rows``: pairs. ``weights``: rows of the weight; a half of each are gate and up. ``inner``: bytes of inputs in a
    turn of the loop, of which ``stages`` are in shared memory."""

    rows: int
    weights: int
    inner: int
    num_warps: int
    stages: int


_TILES = (_Tile(16, 64, 256, 4, 5), _Tile(64, 128, 128, 8, 4), _Tile(128, 256, 128, 8, 4))
"""For ever more pairs per expert. Two programs of the first fit on a multiprocessor, so that one begins or ends while
the other one reads: 128 KiB of the weights are on their way then."""


def sum_of_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sums [tokens, hidden] of the results of each token's experts for x [tokens, hidden].

    ``gate_up`` [experts, 2 · inner, hidden], gate first, and ``down`` [experts, hidden, inner], contiguous.
    ``chosen`` int32 and ``weights``, both [tokens, k]: see ``choose_experts``. The same row may differ slightly between
    calls with different numbers of rows.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    hidden, (experts, size, inner) = x.shape[1], down.shape
    if (size, gate_up.shape) != (hidden, (experts, 2 * inner, hidden)):
        raise ValueError(f"x {list(x.shape)} does not fit {list(gate_up.shape)} and {list(down.shape)}")
    if not gate_up.is_contiguous() or not down.is_contiguous():
        raise ValueError("weights and experts are contiguous")
    check_pairs(x, chosen, weights, gate_up, down)
    if (gate_up.dtype, down.dtype) != (x.dtype, x.dtype):
        raise TypeError(f"x and weights are of one floating-point type, not {x.dtype}, {gate_up.dtype}, {down.dtype}")
    tile = _tile(chosen.numel(), experts, x)
    columns = triton.cdiv(hidden, tile.weights)
    order, tiles, activated, *sums = sorted_pairs(x, chosen, experts, tile.rows, columns, inner)
    step = tile.inner // x.dtype.itemsize
    options = {
        "TOP_K": chosen.shape[1], "ROWS": tile.rows, "INNER": step, **compute_options(x.dtype),
        "num_warps": tile.num_warps, "num_stages": tile.stages,
    }  # fmt: skip
    launch(
        expert_gate_up_kernel, (triton.cdiv(inner, tile.weights // 2), len(tiles)),
        x, gate_up, tiles, order, activated, x.stride(0), gate_up.stride(0),
        hidden, inner, COLUMNS=tile.weights // 2, WHOLE=hidden % step == 0, **options,
    )  # fmt: skip
    launch(
        expert_down_kernel, (columns, len(tiles)),
        activated, down, weights, tiles, order, *sums, down.stride(0), inner, hidden,
        COLUMNS=tile.weights, WHOLE=inner % step == 0, **options,
    )  # fmt: skip
    return sums[-1]


def check_pairs(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *of_experts: torch.Tensor) -> None:
    """Check the experts of tokens and their weights, and that the weights ``of_experts`` lie on the same device.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    if chosen.shape[:-1] != x.shape[:1] or weights.shape != chosen.shape:
        raise ValueError(f"experts {list(chosen.shape)} and weights {list(weights.shape)} do not fit {len(x)} rows")
    if x.stride(1) != 1 or not chosen.is_contiguous() or not weights.is_contiguous():
        raise ValueError("weights and experts are contiguous, and so are rows of x")
    if x.dtype not in FLOATS or chosen.dtype != torch.int32:
        raise TypeError(f"x is of floats, experts int32, not {x.dtype}, {chosen.dtype}")
    check_device(x, *of_experts, chosen, weights)


def sorted_pairs(
    x: torch.Tensor, chosen: torch.Tensor, experts: int, rows: int, columns: int, inner: int
) -> tuple[torch.Tensor, ...]:
    """Return order and tiles of ``rows`` pairs each, as ``sort_by_expert_kernel`` makes them, and memory for what is
    computed: activated values [pairs, inner]; parts, counters of parts, and sums [tokens, hidden] for ``store_sums``.

    ``chosen`` int32 [tokens, k], contiguous. ``columns``: tiles of columns of the sums.
    """
    pairs = chosen.numel()
    num_tiles = (pairs + min(pairs, experts) * (rows - 1)) // rows
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=chosen.device)
    counters = torch.empty(len(chosen), columns, dtype=torch.int32, device=chosen.device)
    launch(
        sort_by_expert_kernel, (experts,), chosen, order, tiles, counters, pairs, num_tiles, counters.numel(),
        EXPERTS=experts, PADDED=power_of_two(experts + 1), ROWS=rows,
        AT_ONCE=_FEW_IDS if pairs <= _FEW_IDS else _MANY_IDS, num_warps=4,
    )  # fmt: skip
    parts, out = x.new_empty(pairs, x.shape[1]), torch.empty_like(x, memory_format=torch.contiguous_format)
    return order, tiles, x.new_empty(pairs, inner), parts, counters, out


def _tile(pairs: int, experts: int, x: torch.Tensor) -> _Tile:
    """Return the tile of a program: as narrow as an expert's pairs are few, where only its weights count."""
    few = pairs <= 16 * experts or x.dtype == torch.float32  # whose products take too many registers in larger tiles
    tile = _TILES[0 if few else 1 if pairs <= 64 * experts else 2]
    if interpreted():
        return tile._replace(weights=32, inner=32 * x.dtype.itemsize)
    if not is_hopper(x.device):  # which has twice as much shared memory as most
        return tile._replace(stages=max(1, min(tile.stages, 96 * 1024 // ((tile.weights + tile.rows) * tile.inner))))
    return tile

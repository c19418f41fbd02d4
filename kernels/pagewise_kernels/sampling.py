"""Samples one token per row: temperature, top-k, top-p and min-p, then Gumbel-max, without a softmax or a sort.

Noise is Philox 4x32-10 (Salmon et al., SC 2011) keyed by the request's seed, with the vocabulary entry and the position
of the token as counter, so a row samples the same token in any batch and on any device. Gumbel-max after Maddison et
al. (arXiv 1411.0030).

Top-k and top-p keep the first entries in the order of value, ties by index. A search finds the end of these entries
without sorting: every pass over the row weighs the entries over each of eight pivots, and leaves an eighth of it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.shapes import check_logits, check_rows, power_of_two

_PARAMETERS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seeds": torch.int64,
}


@triton.jit
def ordered_bits(values):
    """uint32 that compare as the float32 values do."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def value_of_bits(bits):
    """The counterpart of ``ordered_bits``."""
    return tl.where(bits >= 0x80000000, bits & 0x7FFFFFFF, bits ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def gumbel_noise(seed, position, first_group, GROUPS: tl.constexpr):
    """Standard Gumbel noise of the vocabulary entries from 4 * first_group on, float32 [4 * GROUPS]."""
    counter = (first_group + tl.arange(0, GROUPS)).to(tl.uint32)
    zero = counter * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + (position >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counter, low, high, zero)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    # 23 bits and a half: never 0 and never 1, exact in float32.
    uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def load_logits(row, columns, vocab_size):
    """float32, -inf behind the end."""
    return tl.load(row + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def weigh_over(row, vocab_size, pivots, rate, highest, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of the entries at or over each of 8 pivots: 1 each, or 2 ** ((logit - highest) · rate) with MASS.

    Each thread sums up its own entries, so that nothing is exchanged before the end of the row.
    """
    sums = tl.zeros([8, BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        # A row of a matrix from the start: turned into one later, it would go through shared memory.
        logit = load_logits(row, start + tl.arange(0, BLOCK)[None, :], vocab_size)
        weight = tl.exp2((logit - highest) * rate) if MASS else tl.full([1, BLOCK], 1.0, tl.float32)
        sums += tl.where(logit >= pivots[:, None], weight, 0.0)
    return tl.sum(sums, 1)


@triton.jit
def ends_between(row, vocab_size, low, high, BLOCK: tl.constexpr):
    """The least and the greatest of the logits that are at least ``low``, and at most ``high``."""
    least = tl.full([BLOCK], float("inf"), tl.float32)
    greatest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        logit = load_logits(row, start + tl.arange(0, BLOCK), vocab_size)
        least = tl.minimum(least, tl.where(logit >= low, logit, float("inf")))
        greatest = tl.maximum(greatest, tl.where(logit <= high, logit, float("-inf")))
    return tl.min(least, 0), tl.max(greatest, 0)


@triton.jit
def find_cut(row, vocab_size, low, highest, wanted, rate, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The cut between ``low`` and ``highest`` above which the fewest of the greatest entries weigh ``wanted``.

    Returns the cut, a logit; the weight of the entries at or over it; and the weight of the entries over it. If the
    former is more than ``wanted``, only some of the entries that are equal to the cut are kept, otherwise all of them.
    """
    pivots = tl.arange(0, 8)
    # The ends of the range, as integers that compare as the logits do.
    first = ordered_bits(low).to(tl.int64)
    last = ordered_bits(highest).to(tl.int64)
    held = float("inf")
    over = 0.0
    turn = 0
    while (first < last) & (held > wanted):
        low_end, high_end = value_of_bits(first.to(tl.uint32)), value_of_bits(last.to(tl.uint32))
        if turn % 5 == 4:
            # Often a single value is left by now, above all where logits were computed in 16 bits.
            least, greatest = ends_between(row, vocab_size, low_end, high_end, BLOCK)
            first, last = ordered_bits(least).to(tl.int64), ordered_bits(greatest).to(tl.int64)
        else:
            # Eighths of the range of logits: among these entries are spread more evenly than among their bits. Eighths
            # of the bits where that may take long, because the range is wide or the search closes in on zero.
            steps = ordered_bits(low_end + (high_end - low_end) * (pivots.to(tl.float32) * 0.125)).to(tl.int64)
            by_bits = first + ((last - first) * pivots + 7) // 8
            steps = tl.where((turn < 4) & (high_end - low_end < 10000.0), steps, by_bits)
            steps = tl.where(pivots == 0, first, tl.minimum(tl.maximum(steps, first + 1), last))
            weights = weigh_over(row, vocab_size, value_of_bits(steps.to(tl.uint32)), rate, highest, MASS, BLOCK)
            best = tl.max(tl.where((pivots == 0) | (weights >= wanted), pivots, 0), 0)
            held = tl.sum(tl.where(pivots == best, weights, 0.0), 0)
            first = tl.sum(tl.where(pivots == best, steps, 0), 0)
            if best < 7:
                over = tl.sum(tl.where(pivots == best + 1, weights, 0.0), 0)
                last = tl.sum(tl.where(pivots == best + 1, steps, 0), 0) - 1
        turn += 1
    return value_of_bits(first.to(tl.uint32)), held, over


@triton.jit
def find_limit(row, vocab_size, cut, ties, BLOCK: tl.constexpr):
    """The column of the ``ties``-th entry that is equal to ``cut``, or one behind all of them if there are fewer."""
    limit = vocab_size
    seen = 0.0
    start = 0
    while (start < vocab_size) & (seen < ties):
        columns = start + tl.arange(0, BLOCK)
        at = (load_logits(row, columns, vocab_size) == cut) & (columns < vocab_size)
        tied = tl.where(at, 1.0, 0.0)
        found = seen + tl.sum(tied, 0)
        if found >= ties:
            rank = seen + tl.cumsum(tied, 0)
            limit = tl.max(tl.where(at & (rank <= ties), columns, -1), 0)
        seen = found
        start += BLOCK
    return limit


@triton.jit
def filter_kernel(
    logits, rows, temperatures, top_ks, top_ps, min_ps, cuts, limits, vocab_size,
    stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per row of logits: the entries that its filters keep. ``rows``: the index of its parameters.

    Logits over ``cuts`` are kept, and logits that are equal to the cut up to the column ``limits``.
    """
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    wait_for_predecessor(PDL)
    held = tl.load(rows + index)
    temperature = tl.load(temperatures + held)
    top_k, top_p, min_p = tl.load(top_ks + held), tl.load(top_ps + held), tl.load(min_ps + held)
    random = temperature != 0.0
    filters_k = random & (top_k > 0) & (top_k < vocab_size)
    filters_p = random & (top_p < 1.0)
    cut = float("-inf")
    limit = vocab_size
    if filters_k | filters_p | (random & (min_p > 0.0)):
        rate = 1.4426950408889634 / temperature
        lowest, highest = ends_between(row, vocab_size, -3.4028234663852886e38, float("inf"), BLOCK)
        cut = lowest
        if min_p > 0.0:
            cut = tl.maximum(lowest, highest + temperature * tl.log(min_p))
        # How many of the entries at the cut stay; 0: all of them.
        ties = 0.0
        if filters_k:
            wanted = top_k.to(tl.float32)
            cut, weight, over = find_cut(row, vocab_size, cut, highest, wanted, rate, False, BLOCK)
            if weight > wanted:
                ties = wanted - over
        if filters_p:
            low = cut
            if ties > 0.0:
                low = value_of_bits(ordered_bits(cut + 0.0) + 1)  # -0.0 and the next value, +0.0, are equal
            pivot = low + tl.zeros([8], tl.float32)
            mass = tl.max(weigh_over(row, vocab_size, pivot, rate, highest, True, BLOCK), 0)
            at_cut = tl.exp2((cut - highest) * rate)
            wanted = top_p * (mass + ties * at_cut)
            if (ties > 0.0) & (wanted > mass):  # the cut of top-p is among the ties at the end of top-k
                ties = tl.minimum(ties, tl.ceil((wanted - mass) / tl.maximum(at_cut, 1e-30)))
            else:
                cut, weight, over = find_cut(row, vocab_size, low, highest, wanted, rate, True, BLOCK)
                ties = 0.0
                if weight > wanted:
                    at_cut = tl.exp2((cut - highest) * rate)
                    ties = tl.maximum(tl.ceil((wanted - over) / tl.maximum(at_cut, 1e-30)), 1.0)
        if ties > 0.0:
            limit = find_limit(row, vocab_size, cut, ties, BLOCK)
    tl.store(cuts + index, cut)
    tl.store(limits + index, limit)


@triton.jit
def sample_kernel(
    logits, rows, temperatures, seeds, positions, cuts, limits, best_values, best_tokens, vocab_size,
    stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: row of logits, piece of the vocabulary. The best of each piece, with noise unless the row is greedy."""
    index, piece = tl.program_id(0), tl.program_id(1)
    row = logits + index.to(tl.int64) * stride
    wait_for_predecessor(PDL)
    held = tl.load(rows + index)
    temperature = tl.load(temperatures + held)
    greedy = temperature == 0.0
    columns = piece * BLOCK + tl.arange(0, BLOCK)
    logit = load_logits(row, columns, vocab_size)
    cut = tl.load(cuts + index)
    kept = (logit > cut) | ((logit == cut) & (columns <= tl.load(limits + index)))
    value = logit / tl.where(greedy, 1.0, temperature)
    if greedy == 0:
        value += gumbel_noise(tl.load(seeds + held), tl.load(positions + index), piece * (BLOCK // 4), BLOCK // 4)
    value = tl.where(kept & (columns < vocab_size), value, float("-inf"))
    best, where = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    at = index * tl.num_programs(1) + piece
    tl.store(best_values + at, best)
    tl.store(best_tokens + at, piece * BLOCK + where)


@triton.jit
def pick_kernel(best_values, best_tokens, tokens, num_pieces, PIECES: tl.constexpr, PDL: tl.constexpr = False):
    """One program per row: the best of its pieces, the first of equals."""
    index = tl.program_id(0)
    pieces = tl.arange(0, PIECES)
    wait_for_predecessor(PDL)
    values = tl.load(best_values + index * num_pieces + pieces, mask=pieces < num_pieces, other=float("-inf"))
    _, where = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(tokens + index, tl.load(best_tokens + index * num_pieces + where).to(tl.int64))


@dataclass(slots=True, frozen=True)
class SamplingTensors:
    """The sampling parameters of rows, [rows] each.

    temperature float32, 0 for the likeliest entry. top_k int32, 0 for all. top_p, min_p float32: 1 and 0 keep all.
    seeds int64: the 64 bits of an unsigned seed.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor


def sample(
    logits: torch.Tensor, parameters: SamplingTensors, rows: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token int64 [n] for each row of logits [n, vocab].

    rows int32 [n]: which of the ``parameters`` are its own. positions int64 [n]: of the token that is sampled. min_p
    applies first, then top_k, then top_p to the remaining entries, of which at least one stays.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    number, vocab_size = check_logits(logits)
    check_rows("rows", rows, number, torch.int32)
    check_rows("positions", positions, number, torch.int64)
    held = len(parameters.temperature)
    for name, dtype in _PARAMETERS.items():
        check_rows(name, getattr(parameters, name), held, dtype)
    p = parameters
    check_device(logits, rows, positions, p.temperature, p.top_k, p.top_p, p.min_p, p.seeds)
    device = logits.device
    block = 256 if interpreted() else 4096
    pieces = triton.cdiv(vocab_size, block)
    tokens = torch.empty(number, dtype=torch.int64, device=device)
    # Two allocations: in one the second would lie as the number has it, and Triton compile for each alignment.
    cuts = torch.empty(number, dtype=torch.float32, device=device)
    limits = torch.empty(number, dtype=torch.int32, device=device)
    best_values = torch.empty(number, pieces, dtype=torch.float32, device=device)
    best_tokens = torch.empty(number, pieces, dtype=torch.int32, device=device)
    launch(
        filter_kernel,
        (number,),
        logits, rows, p.temperature, p.top_k, p.top_p, p.min_p, cuts, limits, vocab_size, logits.stride(0),
        # One program walks the whole row some times, so it is as wide as registers allow. The number of registers comes
        # from the compiler; nothing was tuned on a GPU.
        BLOCK=block, num_warps=16,
    )  # fmt: skip
    launch(
        sample_kernel,
        (number, pieces),
        logits, rows, p.temperature, p.seeds, positions, cuts, limits, best_values, best_tokens, vocab_size,
        logits.stride(0),
        BLOCK=block, num_warps=8,
    )  # fmt: skip
    launch(
        pick_kernel,
        (number,),
        best_values, best_tokens, tokens, pieces,
        PIECES=power_of_two(pieces), num_warps=1,
    )  # fmt: skip
    return tokens

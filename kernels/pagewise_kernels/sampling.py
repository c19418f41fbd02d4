"""Samples one token per row: temperature, top-k, top-p and min-p, then Gumbel-max, without a softmax or a sort.

Noise is Philox 4x32-10 (Salmon et al., SC 2011) keyed by the request's seed, with the vocabulary entry and the position
of the token as counter, so a row samples the same token in any batch and on any device. Gumbel-max after Maddison et
al. (arXiv 1411.0030).

What top-k and top-p keep is a beginning of the entries sorted by value, ties by index. Where it ends is searched for in
the ordered bits of the values, three bits with every pass over the row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

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
def load_values(row, columns, vocab_size, temperature):
    """logits / temperature, -inf behind the end."""
    return tl.load(row + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def weigh(row, start, vocab_size, temperature, highest, floor, above, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Ordered bits and weights of a stretch of entries: 1 each, or exp(value - highest) with MASS.

    Entries below ``floor``, or with ordered bits not over ``above``, weigh nothing.
    """
    columns = start + tl.arange(0, BLOCK)
    value = load_values(row, columns, vocab_size, temperature)
    bits = ordered_bits(value)
    counts = (columns < vocab_size) & (value >= floor) & (bits > above)
    weight = tl.exp(value - highest) if MASS else tl.full([BLOCK], 1.0, tl.float32)
    return bits, tl.where(counts, weight, 0.0)


@triton.jit
def find_cut(row, vocab_size, temperature, highest, floor, above, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest ordered bits such that entries at or over them weigh ``wanted``, and what those over them weigh."""
    pivots = tl.arange(0, 8)
    cut = tl.full([], 0, tl.uint32)
    for digit in range(11):
        shift = 30 - 3 * digit
        steps = (pivots << shift).to(tl.uint32)
        weights = tl.zeros([8], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            bits, weight = weigh(row, start, vocab_size, temperature, highest, floor, above, MASS, BLOCK)
            at_least = bits[None, :] >= (cut + steps)[:, None]
            weights += tl.sum(tl.where(at_least, weight[None, :], 0.0), 1)
        # Of the first digit only two bits are left; the first pivot is where the search stands.
        reached = (pivots == 0) | ((weights >= wanted) & ((digit > 0) | (pivots < 4)))
        best = tl.max(tl.where(reached, pivots, 0), 0)
        cut += (best << shift).to(tl.uint32)
    over = 0.0
    for start in range(0, vocab_size, BLOCK):
        bits, weight = weigh(row, start, vocab_size, temperature, highest, floor, above, MASS, BLOCK)
        over += tl.sum(tl.where(bits > cut, weight, 0.0), 0)
    return cut, over


@triton.jit
def filter_kernel(
    logits,
    rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    cuts,
    limits,
    floors,
    vocab_size,
    stride,
    BLOCK: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
):
    """One program per row of logits: what its filters keep. ``rows``: where its parameters stand.

    Entries with ordered bits over ``cuts`` are kept, and those at it up to the column ``limits``; of all these the ones
    that are at least ``floors``.
    """
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    held = tl.load(rows + index)
    temperature = tl.load(temperatures + held)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    top_k, top_p, min_p = tl.load(top_ks + held), tl.load(top_ps + held), tl.load(min_ps + held)
    filters_k = (top_k > 0) & (top_k < vocab_size) & (greedy == 0)
    filters_p = (top_p < 1.0) & (greedy == 0)
    floor = float("-inf")
    highest = float("-inf")
    if filters_k | filters_p | ((min_p > 0.0) & (greedy == 0)):
        for start in range(0, vocab_size, BLOCK):
            value = load_values(row, start + tl.arange(0, BLOCK), vocab_size, temperature)
            highest = tl.maximum(highest, tl.max(value, 0))
        if min_p > 0.0:
            floor = highest + tl.log(min_p)
    cut = tl.full([], 0, tl.uint32)
    ties = vocab_size.to(tl.float32)
    if filters_k:
        cut, over = find_cut(
            row, vocab_size, temperature, highest, floor, cut, top_k.to(tl.float32), False, COUNT_BLOCK
        )
        ties = top_k.to(tl.float32) - over
    if filters_p:
        mass = 0.0
        at_cut = 0.0
        for start in range(0, vocab_size, BLOCK):
            bits, weight = weigh(
                row, start, vocab_size, temperature, highest, floor, tl.full([], 0, tl.uint32), True, BLOCK
            )
            mass += tl.sum(tl.where(bits > cut, weight, 0.0), 0)
            at_cut = tl.maximum(at_cut, tl.max(tl.where(bits == cut, weight, 0.0), 0))
        wanted = top_p * (mass + (ties * at_cut if filters_k else 0.0))
        if wanted > mass:  # it ends among those that tie at the end of top-k
            ties = tl.minimum(ties, tl.ceil((wanted - mass) / tl.maximum(at_cut, 1e-30)))
        else:
            cut, over = find_cut(row, vocab_size, temperature, highest, floor, cut, wanted, True, COUNT_BLOCK)
            weight = tl.exp(value_of_bits(cut) - highest)
            ties = tl.maximum(tl.ceil((wanted - over) / tl.maximum(weight, 1e-30)), 1.0)
    limit = vocab_size
    if filters_k | filters_p:
        limit = -1
        seen = 0.0
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            bits = ordered_bits(load_values(row, columns, vocab_size, temperature))
            at = (bits == cut) & (columns < vocab_size)
            tied = tl.where(at, 1.0, 0.0)
            rank = seen + tl.cumsum(tied, 0) - tied
            limit = tl.maximum(limit, tl.max(tl.where(at & (rank < ties), columns, -1), 0))
            seen += tl.sum(tied, 0)
    tl.store(cuts + index, cut.to(tl.int32, bitcast=True))
    tl.store(limits + index, limit)
    tl.store(floors + index, floor)


@triton.jit
def sample_kernel(
    logits,
    rows,
    temperatures,
    seeds,
    positions,
    cuts,
    limits,
    floors,
    best_values,
    best_tokens,
    vocab_size,
    stride,
    BLOCK: tl.constexpr,
):
    """Programs: row of logits, piece of the vocabulary. The best of each piece, with noise unless the row is greedy."""
    index, piece = tl.program_id(0), tl.program_id(1)
    row = logits + index.to(tl.int64) * stride
    held = tl.load(rows + index)
    temperature = tl.load(temperatures + held)
    greedy = temperature == 0.0
    columns = piece * BLOCK + tl.arange(0, BLOCK)
    value = load_values(row, columns, vocab_size, tl.where(greedy, 1.0, temperature))
    bits = ordered_bits(value)
    cut = tl.load(cuts + index).to(tl.uint32, bitcast=True)
    kept = (bits > cut) | ((bits == cut) & (columns <= tl.load(limits + index)))
    kept = kept & (value >= tl.load(floors + index)) & (columns < vocab_size)
    if greedy == 0:
        value += gumbel_noise(tl.load(seeds + held), tl.load(positions + index), piece * (BLOCK // 4), BLOCK // 4)
    value = tl.where(kept, value, float("-inf"))
    best, where = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    at = index * tl.num_programs(1) + piece
    tl.store(best_values + at, best)
    tl.store(best_tokens + at, piece * BLOCK + where)


@triton.jit
def pick_kernel(best_values, best_tokens, tokens, num_pieces, PIECES: tl.constexpr):
    """One program per row: the best of its pieces, the first of equals."""
    index = tl.program_id(0)
    pieces = tl.arange(0, PIECES)
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
    goes first, then top_k, then top_p of what is left, of which at least one entry stays.

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
    cuts, limits = (torch.empty(number, dtype=torch.int32, device=device) for _ in range(2))
    floors = torch.empty(number, dtype=torch.float32, device=device)
    best_values = torch.empty(number, pieces, dtype=torch.float32, device=device)
    best_tokens = torch.empty(number, pieces, dtype=torch.int32, device=device)
    launch(
        filter_kernel,
        (number,),
        logits, rows, p.temperature, p.top_k, p.top_p, p.min_p, cuts, limits, floors, vocab_size, logits.stride(0),
        # One program walks the whole row a dozen times, so it is as wide as registers allow. Chosen by what the
        # compiler says; not tuned on a GPU.
        BLOCK=2 * block, COUNT_BLOCK=block, num_warps=32,
    )  # fmt: skip
    launch(
        sample_kernel,
        (number, pieces),
        logits, rows, p.temperature, p.seeds, positions, cuts, limits, floors, best_values, best_tokens, vocab_size,
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

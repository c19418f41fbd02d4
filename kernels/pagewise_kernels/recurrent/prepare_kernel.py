"""What chunks of gated delta nets do to the state before them, computed for all chunks at once.

Within a chunk let g be the sum of the logarithms of decays up to a token: one value in a gated delta net, and one of
each key in KDA (Kimi Linear: arXiv 2510.26692). With S the state before the chunk, the row i of the deltas is

    u_i = beta_i (v_i - S^T (exp(g_i) k_i) - sum over j < i of (k_i · (exp(g_i - g_j) k_j)) u_j).

So (I + A) U = R, where A is strictly lower triangular and does not depend on S. The kernel computes T = (I + A)^-1 (the
WY form: Yang et al., arXiv 2406.06484 and 2412.06464), and decayed keys and queries. ``chunk_kernel`` does the rest.

In KDA, a product of keys has exp(g_i - g_j) of each key, and exp(-g_j) alone may overflow. So both keys are decayed to
a token between them: of 2, 4, 8, ... tokens, those in the first half and those in the second half are decayed to the
last token of the first half, and meet. Every two tokens meet once.
"""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import launch
from pagewise_kernels.products import compute_options
from pagewise_kernels.recurrent.layers import Recurrence
from pagewise_kernels.recurrent.paged_states import CHUNK, FIELDS, ChunkPlan
from pagewise_kernels.recurrent.step_kernel import TINY, softplus
from pagewise_kernels.shapes import power_of_two

_PART = 16
"""Rows of the triangles on the diagonal, which are inverted row by row."""
_KEYS = 32
"""Of a tile, which is in registers."""


@triton.jit
def rows_of(base, tokens, inside, columns, in_columns, SIZE: tl.constexpr):
    """Rows of tokens [tokens, columns] of a matrix with SIZE columns."""
    at = base + tokens.to(tl.int64)[:, None] * SIZE + columns[None, :]
    return tl.load(at, mask=inside[:, None] & in_columns[None, :], other=0.0)


@triton.jit
def _products_by_key(
    k, q, g, rows, CHUNK: tl.constexpr, KEYS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Products of keys with keys before them, and of queries with keys up to them, which have decayed by ``g``
    [tokens, keys]."""
    of_keys = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_queries = tl.where(rows[:, None] == rows[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    half = 1
    while half < CHUNK:
        between = (rows // (2 * half) * (2 * half) + half - 1)[:, None] + tl.zeros((1, KEYS), tl.int32)
        decays = tl.exp(-tl.abs(g - tl.gather(g, between, 0)))
        keys = (k * decays).to(COMPUTE)
        meet = (rows[:, None] > rows[None, :]) & ((rows[:, None] // half ^ rows[None, :] // half) == 1)
        of_keys = tl.where(meet, tl.dot(keys, tl.trans(keys), input_precision=PRECISION), of_keys)
        products = tl.dot((q * decays).to(COMPUTE), tl.trans(keys), input_precision=PRECISION)
        of_queries = tl.where(meet, products, of_queries)
        half *= 2
    return of_keys, of_queries


@triton.jit
def _inverse(lower, rows, CHUNK: tl.constexpr, PART: tl.constexpr, EXACT: tl.constexpr):
    """(I + lower)^-1, where ``lower`` [CHUNK, CHUNK] is strictly lower triangular."""
    # The triangles on the diagonal: row i of the inverse, without its one, from the rows before it.
    PARTS: tl.constexpr = CHUNK // PART
    part, within = tl.arange(0, PARTS), tl.arange(0, PART)
    own = part[:, None, None, None] == part[None, None, :, None]
    triangles = -tl.sum(tl.where(own, tl.reshape(lower, (PARTS, PART, PARTS, PART)), 0.0), 2)
    for i in range(1, PART):
        here = (within == i)[None, :, None]
        row = tl.sum(tl.where(here, triangles, 0.0), 1)
        row += tl.sum(row[:, :, None] * triangles, 1)
        triangles = tl.where(here, row[:, None, :], triangles)
    triangles += tl.where(within[:, None] == within[None, :], 1.0, 0.0)[None, :, :]
    diagonal = tl.reshape(tl.where(own, triangles[:, :, None, :], 0.0), (CHUNK, CHUNK))
    # With N = diagonal · (what lies left of the triangles), whose fourth power is 0: (I - N + N² - N³) · diagonal.
    left = tl.where(rows[:, None] // PART > rows[None, :] // PART, lower, 0.0)
    n = tl.dot(diagonal, left, input_precision=EXACT)
    square = tl.dot(n, n, input_precision=EXACT)
    series = square - n - tl.dot(n, square, input_precision=EXACT)
    return diagonal + tl.dot(series, diagonal, input_precision=EXACT)


@triton.jit
def prepare_kernel(
    convolved, projected, prepared, kept, chunks, decay_from, beta_from, rate, dt_bias, stride, beta_scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, PART: tl.constexpr, FIELDS: tl.constexpr, BY_KEY: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: head, chunk. ``KEYS``: of a tile. ``prepared`` and ``kept``: see ``prepare``."""
    head, number = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, CHUNK)
    wait_for_predecessor(PDL)
    first, stop = tl.load(chunks + number * FIELDS), tl.load(chunks + number * FIELDS + 1)
    if (first < stop) & (tl.load(chunks + number * FIELDS + 5) == 0):
        tokens = first + rows
        inside = tokens < stop
        size: tl.constexpr = HEADS * VALUE + 2 * GROUPS * KEY
        base = convolved + head // (HEADS // GROUPS) * KEY
        q_scale, k_scale = tl.full((CHUNK,), TINY, tl.float32), tl.full((CHUNK,), TINY, tl.float32)
        for start in range(0, KEY, KEYS):
            keys = start + tl.arange(0, KEYS)
            q = rows_of(base, tokens, inside, keys, keys < KEY, size).to(tl.float32)
            k = rows_of(base + GROUPS * KEY, tokens, inside, keys, keys < KEY, size).to(tl.float32)
            q_scale += tl.sum(q * q, 1)
            k_scale += tl.sum(k * k, 1)
        q_scale, k_scale = tl.rsqrt(q_scale) / tl.sqrt(KEY * 1.0), tl.rsqrt(k_scale)
        inputs = projected + tokens.to(tl.int64) * stride
        b = tl.load(inputs + tl.load(beta_from + head), mask=inside, other=0.0).to(tl.float32)
        beta = tl.where(inside, beta_scale / (1.0 + tl.exp(-b)), 0.0)
        own_rate = tl.load(rate + head)
        if not BY_KEY:
            a = tl.load(inputs + tl.load(decay_from + head), mask=inside, other=0.0).to(tl.float32)
            log_decay = tl.where(inside, own_rate * softplus(a + tl.load(dt_bias + head)), 0.0)
            g, total = tl.cumsum(log_decay, 0)[:, None], tl.sum(log_decay, 0)
        of_keys, of_queries = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
        to = prepared + ((tokens.to(tl.int64) * HEADS + head) * (3 * KEY + 2 * CHUNK))[:, None]
        for start in range(0, KEY, KEYS):
            keys = start + tl.arange(0, KEYS)
            in_key, own = keys < KEY, head * KEY + keys
            mask = inside[:, None] & in_key[None, :]
            q = rows_of(base, tokens, inside, keys, in_key, size).to(tl.float32) * q_scale[:, None]
            k = rows_of(base + GROUPS * KEY, tokens, inside, keys, in_key, size).to(tl.float32) * k_scale[:, None]
            if BY_KEY:
                at = inputs[:, None] + tl.load(decay_from + own, mask=in_key, other=0)[None, :]
                a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                dt = softplus(a + tl.load(dt_bias + own, mask=in_key, other=0.0)[None, :])
                log_decay = tl.where(inside[:, None], own_rate * dt, 0.0)
                g, total = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)[None, :]
                some_keys, some_queries = _products_by_key(k, q, g, rows, CHUNK, KEYS, COMPUTE, PRECISION)
                of_keys += some_keys
                of_queries += some_queries
            else:
                others = tl.trans(k.to(COMPUTE))
                of_keys = tl.dot(k.to(COMPUTE), others, of_keys, input_precision=PRECISION)
                of_queries = tl.dot(q.to(COMPUTE), others, of_queries, input_precision=PRECISION)
            since = tl.exp(g)
            tl.store(to + keys[None, :], (k * since).to(prepared.dtype.element_ty), mask=mask)
            tl.store(to + KEY + keys[None, :], (q * since).to(prepared.dtype.element_ty), mask=mask)
            tl.store(to + 2 * KEY + keys[None, :], (k * tl.exp(total - g)).to(prepared.dtype.element_ty), mask=mask)
            kept_at = kept + number * (HEADS * KEY) + own[None, :]
            tl.store(kept_at, tl.exp(total) + tl.zeros((1, KEYS), tl.float32), mask=in_key[None, :])
        if not BY_KEY:
            up_to = rows[:, None] >= rows[None, :]
            decays = tl.where(up_to, tl.exp(tl.where(up_to, g - tl.trans(g), 0.0)), 0.0)
            of_keys = tl.where(rows[:, None] > rows[None, :], of_keys * decays, 0.0)
            of_queries *= decays
        to += 3 * KEY + rows[None, :]
        tl.store(to + CHUNK, of_queries.to(prepared.dtype.element_ty), mask=inside[:, None])
        inverse = _inverse(beta[:, None] * of_keys, rows, CHUNK, PART, EXACT) * beta[None, :]
        tl.store(to, inverse.to(prepared.dtype.element_ty), mask=inside[:, None])


def prepare(
    layer: Recurrence, convolved: torch.Tensor, projected: torch.Tensor, plan: ChunkPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``prepared`` [tokens, heads, 3 · key + 2 · CHUNK] and ``kept`` [chunks, heads, key] of a gated delta net.

    A row of ``prepared`` has its key and its query, decayed since the chunk began; its key, decayed until the chunk
    ends; its rows of T, whose columns are multiplied by their betas, and of the weights of deltas in the result. Rows
    of tokens that are alone, or padding, have any content. ``kept``: how much of a state is left behind a chunk.
    """
    prepared = convolved.new_empty(len(convolved), layer.heads, 3 * layer.key + 2 * CHUNK)
    kept = convolved.new_empty(len(plan.chunks), layer.heads, layer.key, dtype=torch.float32)
    launch(
        prepare_kernel, (layer.heads, len(plan.chunks)), convolved, projected, prepared, kept, plan.chunks,
        layer.decay_from, layer.beta_from, layer.rate, layer.dt_bias, projected.stride(0), float(layer.beta_scale),
        **chunk_options(layer, convolved.dtype), KEYS=min(_KEYS, max(16, power_of_two(layer.key))), BY_KEY=layer.by_key,
        PART=_PART, EXACT="tf32x3", num_warps=8 if layer.by_key else 4, num_stages=1,
    )  # fmt: skip
    return prepared, kept


def chunk_options(layer: Recurrence, dtype: torch.dtype) -> dict[str, object]:
    """Return constants of the kernels of chunks: the shape of a layer, and how they multiply inputs of ``dtype``."""
    return {
        "HEADS": layer.heads, "GROUPS": layer.groups, "KEY": layer.key, "VALUE": layer.value,
        "CHUNK": CHUNK, "FIELDS": FIELDS, **compute_options(dtype),
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }  # fmt: skip

"""Several tokens of each of some sequences, in chunks, as products of matrices.

Within a chunk let g be the sum of the logarithms of decays up to a token, and S the state before the chunk. In the
gated delta rule the row i of the deltas is

    u_i = beta_i (v_i - exp(g_i) S^T k_i - sum over j < i of exp(g_i - g_j) (k_i · k_j) u_j).

So (I + A) U = R, where A is strictly lower triangular and does not depend on S. A first kernel computes T = (I + A)^-1
of all chunks at once (the WY form: Yang et al., arXiv 2406.06484 and 2412.06464). A second one goes through the chunks
of a sequence, with a part of the state of a head in registers:

    U = T R, outputs = exp(g) Q S + (Q K^T below the diagonal, decayed) U, S = exp(g_last) S + (decayed K)^T U.

Mamba-2 is the same with U = dt X, keys B and queries C, without T.
"""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import launch
from pagewise_kernels.products import compute_options
from pagewise_kernels.recurrent.layers import Recurrence
from pagewise_kernels.recurrent.paged_states import CHUNK, FIELDS, BlockStates, ChunkPlan, matrix_at
from pagewise_kernels.recurrent.step_kernel import TINY, softplus
from pagewise_kernels.shapes import power_of_two

_PART = 16
"""Rows of the triangles on the diagonal, which are inverted row by row."""


@triton.jit
def _rows(base, tokens, inside, columns, in_columns, SIZE: tl.constexpr):
    """Rows of tokens [tokens, columns] of a matrix with SIZE columns."""
    at = base + tokens.to(tl.int64)[:, None] * SIZE + columns[None, :]
    return tl.load(at, mask=inside[:, None] & in_columns[None, :], other=0.0)


@triton.jit
def _of_length_one(x):
    """Rows in float32, each over its length."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + TINY)[:, None]


@triton.jit
def inverse_kernel(
    convolved, projected, inverses, chunks, decay_from, beta_from, rate, dt_bias, stride, beta_scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PADDED: tl.constexpr,
    CHUNK: tl.constexpr, PART: tl.constexpr, FIELDS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: head, chunk. ``inverses`` [tokens, heads, CHUNK] gets a row of T for each token."""
    head = tl.program_id(0)
    keys, rows = tl.arange(0, KEY_PADDED), tl.arange(0, CHUNK)
    wait_for_predecessor(PDL)
    chunk = chunks + tl.program_id(1) * FIELDS
    first, stop = tl.load(chunk), tl.load(chunk + 1)
    if (first < stop) & (tl.load(chunk + 5) == 0):
        tokens = first + rows
        inside = tokens < stop
        base = convolved + GROUPS * KEY + head // (HEADS // GROUPS) * KEY
        k = _rows(base, tokens, inside, keys, keys < KEY, HEADS * VALUE + 2 * GROUPS * KEY)
        k = _of_length_one(k).to(COMPUTE)
        inputs = projected + tokens.to(tl.int64) * stride
        a = tl.load(inputs + tl.load(decay_from + head), mask=inside, other=0.0).to(tl.float32)
        b = tl.load(inputs + tl.load(beta_from + head), mask=inside, other=0.0).to(tl.float32)
        log_decay = tl.where(inside, tl.load(rate + head) * softplus(a + tl.load(dt_bias + head)), 0.0)
        beta = tl.where(inside, beta_scale / (1.0 + tl.exp(-b)), 0.0)
        g = tl.cumsum(log_decay, 0)
        below = rows[:, None] > rows[None, :]
        decays = tl.exp(tl.where(below, g[:, None] - g[None, :], 0.0))
        products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        lower = tl.where(below, beta[:, None] * products * decays, 0.0)
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
        inverse = diagonal + tl.dot(series, diagonal, input_precision=EXACT)
        at = inverses + (tokens.to(tl.int64)[:, None] * HEADS + head) * CHUNK + rows[None, :]
        tl.store(at, inverse.to(inverses.dtype.element_ty), mask=inside[:, None])


@triton.jit
def chunk_kernel(
    convolved, projected, inverses, out, states, tables, firsts, chunks, decay_from, beta_from, rate, dt_bias, skip,
    stride, start, beta_scale, least, most,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, FIELDS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr, IS_DELTA: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: head, BLOCK of its values, sequence with several tokens."""
    head = tl.program_id(0)
    keys, values = tl.arange(0, KEY_PADDED), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows, in_key, in_value = tl.arange(0, CHUNK), keys < KEY, values < VALUE
    wait_for_predecessor(PDL)
    sequence = firsts + tl.program_id(2)
    first, last = tl.load(sequence), tl.load(sequence + 1)
    alone, read = 1, 0
    if first < last:
        alone, read = tl.load(chunks + first * FIELDS + 5), tl.load(chunks + first * FIELDS + 2)
    if alone == 0:
        size: tl.constexpr = HEADS * VALUE + 2 * GROUPS * KEY
        first_key: tl.constexpr = GROUPS * KEY if IS_DELTA else HEADS * VALUE
        first_query: tl.constexpr = 0 if IS_DELTA else HEADS * VALUE + GROUPS * KEY
        first_value: tl.constexpr = 2 * GROUPS * KEY if IS_DELTA else 0
        group = head // (HEADS // GROUPS)
        of_head = start + head * KEY * VALUE
        own_rate, own_bias = tl.load(rate + head), tl.load(dt_bias + head)
        decay_at, beta_at = tl.load(decay_from + head), tl.load(beta_from + head)
        state = tl.zeros((KEY_PADDED, BLOCK), tl.float32)
        if read >= 0:
            pages = tables + read.to(tl.int64) * PAGES  # type: ignore[attr-defined]
            if IS_DELTA:
                at = matrix_at(pages, of_head, keys, in_key, values, in_value, VALUE, PAGE, WHOLE_ROWS)
            else:
                at = tl.trans(matrix_at(pages, of_head, values, in_value, keys, in_key, KEY, PAGE, WHOLE_ROWS))
            state = tl.load(states + at, mask=in_key[:, None] & in_value[None, :], other=0.0).to(tl.float32)
        for number in range(first, last):
            begin, stop = tl.load(chunks + number * FIELDS), tl.load(chunks + number * FIELDS + 1)
            tokens = begin + rows
            inside = tokens < stop
            k = _rows(convolved + first_key + group * KEY, tokens, inside, keys, in_key, size)
            q = _rows(convolved + first_query + group * KEY, tokens, inside, keys, in_key, size)
            v = _rows(convolved + first_value + head * VALUE, tokens, inside, values, in_value, size).to(tl.float32)
            inputs = projected + tokens.to(tl.int64) * stride
            a = tl.load(inputs + decay_at, mask=inside, other=0.0).to(tl.float32)
            dt = tl.minimum(tl.maximum(softplus(a + own_bias), least), most)
            g = tl.cumsum(tl.where(inside, own_rate * dt, 0.0), 0)
            total = tl.sum(tl.where(inside, own_rate * dt, 0.0), 0)
            since = tl.exp(g)[:, None]
            if IS_DELTA:
                k = _of_length_one(k).to(COMPUTE)
                q = (_of_length_one(q) / tl.sqrt(KEY * 1.0)).to(COMPUTE)
                b = tl.load(inputs + beta_at, mask=inside, other=0.0).to(tl.float32)
                beta = tl.where(inside, beta_scale / (1.0 + tl.exp(-b)), 0.0)[:, None]
                known = tl.dot(k, state.to(COMPUTE), input_precision=PRECISION)
                t = _rows(inverses + head * CHUNK, tokens, inside, rows, rows < CHUNK, HEADS * CHUNK)
                u = tl.dot(t.to(COMPUTE), (beta * (v - since * known)).to(COMPUTE), input_precision=PRECISION)
            else:
                k, q = k.to(COMPUTE), q.to(COMPUTE)
                u = tl.where(inside, dt, 0.0)[:, None] * v
            u = u.to(COMPUTE)
            below = rows[:, None] >= rows[None, :]
            weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weights = tl.where(below, weights * tl.exp(tl.where(below, g[:, None] - g[None, :], 0.0)), 0.0)
            result = since * tl.dot(q, state.to(COMPUTE), input_precision=PRECISION)
            result = tl.dot(weights.to(COMPUTE), u, result, input_precision=PRECISION)
            if not IS_DELTA:
                result += tl.load(skip + head) * v
            rest = (k.to(tl.float32) * tl.exp(total - g)[:, None]).to(COMPUTE)
            state = tl.dot(tl.trans(rest), u, state * tl.exp(total), input_precision=PRECISION)
            result_at = out + (tokens.to(tl.int64)[:, None] * HEADS + head) * VALUE + values[None, :]
            tl.store(result_at, result.to(out.dtype.element_ty), mask=inside[:, None] & in_value[None, :])
            written = tl.load(chunks + number * FIELDS + 3)
            if written >= 0:
                into = tables + written.to(tl.int64) * PAGES
                if IS_DELTA:
                    there = matrix_at(into, of_head, keys, in_key, values, in_value, VALUE, PAGE, WHOLE_ROWS)
                else:
                    there = tl.trans(matrix_at(into, of_head, values, in_value, keys, in_key, KEY, PAGE, WHOLE_ROWS))
                mask = in_key[:, None] & in_value[None, :]
                tl.store(states + there, state.to(states.dtype.element_ty), mask=mask)


def compute_chunks(
    layer: Recurrence, convolved: torch.Tensor, projected: torch.Tensor, plan: ChunkPlan, states: BlockStates,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute the results ``out`` [tokens, heads · value] of sequences with several tokens, and update their states."""
    wide = convolved.dtype == torch.float32
    shape = {
        "HEADS": layer.heads, "GROUPS": layer.groups, "KEY": layer.key, "VALUE": layer.value,
        "KEY_PADDED": max(16, power_of_two(layer.key)), "CHUNK": CHUNK, "FIELDS": FIELDS,
        **compute_options(convolved.dtype) | {"PRECISION": "tf32x3" if wide else "tf32"},
    }  # fmt: skip
    inverses = convolved
    if layer.is_delta:
        inverses = convolved.new_empty(len(convolved), layer.heads, CHUNK)
        launch(
            inverse_kernel, (layer.heads, len(plan.chunks)), convolved, projected, inverses, plan.chunks,
            layer.decay_from, layer.beta_from, layer.rate, layer.dt_bias, projected.stride(0), float(layer.beta_scale),
            **shape, PART=_PART, EXACT="tf32x3", num_warps=4,
        )  # fmt: skip
    block = min(max(16, power_of_two(layer.value)), 16 if wide else 32)
    launch(
        chunk_kernel, (layer.heads, triton.cdiv(layer.value, block), len(plan.firsts) - 1),
        convolved, projected, inverses, out, states.values, states.tables, plan.firsts, plan.chunks, layer.decay_from,
        layer.beta_from, layer.rate, layer.dt_bias, layer.rate if layer.skip is None else layer.skip,
        projected.stride(0), states.start, float(layer.beta_scale), *map(float, layer.limits), **shape, BLOCK=block,
        PAGE=states.page, PAGES=states.pages,
        WHOLE_ROWS=states.has_whole_rows(layer.value if layer.is_delta else layer.key), IS_DELTA=layer.is_delta,
        num_warps=4 if layer.is_delta else 8, num_stages=1,
    )  # fmt: skip

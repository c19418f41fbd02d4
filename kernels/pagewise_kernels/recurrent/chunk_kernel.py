"""Several tokens of each of some sequences, in chunks, as products of matrices.

A program goes through the chunks of a sequence, with a part of the state S of a head in registers. In gated delta nets,
``prepare_kernel`` has computed T, and k and q as they are decayed, for all chunks before:

    U = T (beta (V - K S)), outputs = Q S + (Q K^T up to the diagonal) U, S = kept S + (K decayed to the end)^T U.

Mamba-2 is the same with U = dt X, keys B and queries C, without T.
"""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import launch
from pagewise_kernels.recurrent.layers import Recurrence
from pagewise_kernels.recurrent.paged_states import BlockStates, ChunkPlan, matrix_at
from pagewise_kernels.recurrent.prepare_kernel import chunk_options, prepare, rows_of
from pagewise_kernels.recurrent.step_kernel import softplus
from pagewise_kernels.shapes import power_of_two


@triton.jit
def _state_at(
    pages, first, keys, in_key, values, in_value,
    KEY: tl.constexpr, VALUE: tl.constexpr, PAGE: tl.constexpr, WHOLE_ROWS: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    """Where the elements [keys, values] of a state lie, whose rows Mamba-2 has for values."""
    if IS_DELTA:
        return matrix_at(pages, first, keys, in_key, values, in_value, VALUE, PAGE, WHOLE_ROWS)
    return tl.trans(matrix_at(pages, first, values, in_value, keys, in_key, KEY, PAGE, WHOLE_ROWS))


@triton.jit
def chunk_kernel(
    convolved, projected, prepared, kept, out, states, tables, firsts, chunks, decay_from, rate, dt_bias, skip,
    stride, start, least, most,
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
        first_value: tl.constexpr = 2 * GROUPS * KEY if IS_DELTA else 0
        of_head, value = start + head * KEY * VALUE, first_value + head * VALUE
        group, inputs = HEADS * VALUE + head // (HEADS // GROUPS) * KEY, projected + tl.load(decay_from + head)
        own_rate, own_bias = tl.load(rate + head), tl.load(dt_bias + head)
        of_state = in_key[:, None] & in_value[None, :]
        state = tl.zeros((KEY_PADDED, BLOCK), tl.float32)
        if read >= 0:
            pages = tables + read.to(tl.int64) * PAGES  # type: ignore[attr-defined]
            at = _state_at(
                pages, of_head, keys, in_key, values, in_value, KEY, VALUE, PAGE, WHOLE_ROWS, IS_DELTA
            )  # fmt: skip
            state = tl.load(states + at, mask=of_state, other=0.0).to(tl.float32)
        for number in range(first, last):
            begin, stop = tl.load(chunks + number * FIELDS), tl.load(chunks + number * FIELDS + 1)
            tokens = begin + rows
            inside = tokens < stop
            if IS_DELTA:
                width: tl.constexpr = 3 * KEY + 2 * CHUNK
                row, in_row = prepared + head * width, rows < CHUNK
                k = rows_of(row, tokens, inside, keys, in_key, HEADS * width).to(COMPUTE)
                t = rows_of(row + 3 * KEY, tokens, inside, rows, in_row, HEADS * width).to(COMPUTE)
                v = rows_of(convolved + value, tokens, inside, values, in_value, size).to(tl.float32)
                before = state.to(COMPUTE)
                u = v - tl.dot(k, before, input_precision=PRECISION)
                u = tl.dot(t, u.to(COMPUTE), input_precision=PRECISION).to(COMPUTE)
                q = rows_of(row + KEY, tokens, inside, keys, in_key, HEADS * width).to(COMPUTE)
                weights = rows_of(row + 3 * KEY + CHUNK, tokens, inside, rows, in_row, HEADS * width).to(COMPUTE)
                result = tl.dot(q, before, input_precision=PRECISION)
                result = tl.dot(weights, u, result, input_precision=PRECISION)
                rest = rows_of(row + 2 * KEY, tokens, inside, keys, in_key, HEADS * width).to(COMPUTE)
                left = tl.load(kept + (number * HEADS + head) * KEY + keys, mask=in_key, other=0.0)[:, None]
            else:
                k = rows_of(convolved + group, tokens, inside, keys, in_key, size)
                q = rows_of(convolved + group + GROUPS * KEY, tokens, inside, keys, in_key, size)
                v = rows_of(convolved + value, tokens, inside, values, in_value, size).to(tl.float32)
                a = tl.load(inputs + tokens.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)
                dt = tl.minimum(tl.maximum(softplus(a + own_bias), least), most)
                decays = tl.where(inside, own_rate * dt, 0.0)
                g, total = tl.cumsum(decays, 0), tl.sum(decays, 0)
                since = tl.exp(g)[:, None]
                k, q = k.to(COMPUTE), q.to(COMPUTE)
                u = (tl.where(inside, dt, 0.0)[:, None] * v).to(COMPUTE)
                up_to = rows[:, None] >= rows[None, :]
                weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                weights = tl.where(up_to, weights * tl.exp(tl.where(up_to, g[:, None] - g[None, :], 0.0)), 0.0)
                result = since * tl.dot(q, state.to(COMPUTE), input_precision=PRECISION)
                result = tl.dot(weights.to(COMPUTE), u, result, input_precision=PRECISION) + tl.load(skip + head) * v
                rest = (k.to(tl.float32) * tl.exp(total - g)[:, None]).to(COMPUTE)
                left = tl.exp(total)
            state = tl.dot(tl.trans(rest), u, state * left, input_precision=PRECISION)
            result_at = out + (tokens.to(tl.int64)[:, None] * HEADS + head) * VALUE + values[None, :]
            tl.store(result_at, result.to(out.dtype.element_ty), mask=inside[:, None] & in_value[None, :])
            written = tl.load(chunks + number * FIELDS + 3)
            if written >= 0:
                into = tables + written.to(tl.int64) * PAGES
                there = _state_at(
                    into, of_head, keys, in_key, values, in_value, KEY, VALUE, PAGE, WHOLE_ROWS, IS_DELTA
                )  # fmt: skip
                tl.store(states + there, state.to(states.dtype.element_ty), mask=of_state)


def compute_chunks(
    layer: Recurrence, convolved: torch.Tensor, projected: torch.Tensor, plan: ChunkPlan, states: BlockStates,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute the results ``out`` [tokens, heads · value] of sequences with several tokens, and update their states."""
    prepared = prepare(layer, convolved, projected, plan) if layer.is_delta else (convolved, layer.rate)
    block = min(max(16, power_of_two(layer.value)), 16 if convolved.dtype == torch.float32 else 32)
    launch(
        chunk_kernel, (layer.heads, triton.cdiv(layer.value, block), len(plan.firsts) - 1),
        convolved, projected, *prepared, out, states.values, states.tables, plan.firsts, plan.chunks, layer.decay_from,
        layer.rate, layer.dt_bias, layer.rate if layer.skip is None else layer.skip, projected.stride(0), states.start,
        *map(float, layer.limits), **chunk_options(layer, convolved.dtype), BLOCK=block,
        KEY_PADDED=max(16, power_of_two(layer.key)), PAGE=states.page, PAGES=states.pages,
        WHOLE_ROWS=states.has_whole_rows(layer.value if layer.is_delta else layer.key),
        IS_DELTA=layer.is_delta, num_warps=4 if layer.is_delta else 8, num_stages=1,
    )  # fmt: skip

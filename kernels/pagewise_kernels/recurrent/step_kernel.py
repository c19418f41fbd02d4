"""One token of each of some sequences: their states are read once, and written once.

In float32: of the gated delta rule (Yang et al., arXiv 2412.06464), with S the state after its decay, delta = beta (v -
S^T k), S += k delta^T, and the output is S^T q; in KDA (Kimi Linear, arXiv 2510.26692) each key has a decay of its own.
Of Mamba-2 (Dao and Gu, arXiv 2405.21060) S = decay S + dt x b^T, and the output is S c + skip x.
"""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import launch
from pagewise_kernels.recurrent.layers import Recurrence
from pagewise_kernels.recurrent.paged_states import FIELDS, BlockStates, ChunkPlan, matrix_at
from pagewise_kernels.shapes import power_of_two

TINY = tl.constexpr(1e-6)
"""Added to the squares of queries and keys."""
_VALUES = 4096
"""Of a state that a program holds, 32 for each of its threads."""


@triton.jit
def softplus(x):
    """log(1 + exp(x))."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def step_kernel(
    convolved, projected, out, states, tables, chunks, decay_from, beta_from, rate, dt_bias, skip, stride, start,
    beta_scale, least, most,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, FIELDS: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    IS_DELTA: tl.constexpr, BY_KEY: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: head, BLOCK of its values, chunk. Chunks of other sequences are left alone."""
    head = tl.program_id(0)
    keys, values = tl.arange(0, KEY_PADDED), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_key, in_value = keys < KEY, values < VALUE
    wait_for_predecessor(PDL)
    chunk = chunks + tl.program_id(2) * FIELDS
    token, read, written = tl.load(chunk).to(tl.int64), tl.load(chunk + 2), tl.load(chunk + 3)
    if tl.load(chunk + 5) != 0:
        row = convolved + token * (HEADS * VALUE + 2 * GROUPS * KEY)
        group = head // (HEADS // GROUPS)
        first_key: tl.constexpr = GROUPS * KEY if IS_DELTA else HEADS * VALUE
        first_query: tl.constexpr = 0 if IS_DELTA else HEADS * VALUE + GROUPS * KEY
        first_value: tl.constexpr = 2 * GROUPS * KEY if IS_DELTA else 0
        k = tl.load(row + first_key + group * KEY + keys, mask=in_key, other=0.0).to(tl.float32)
        q = tl.load(row + first_query + group * KEY + keys, mask=in_key, other=0.0).to(tl.float32)
        v = tl.load(row + first_value + head * VALUE + values, mask=in_value, other=0.0).to(tl.float32)
        inputs = projected + token * stride
        decayed = head * KEY + keys if BY_KEY else head  # numbers of decays
        in_decayed = in_key if BY_KEY else True
        input_at = inputs + tl.load(decay_from + decayed, mask=in_decayed, other=0)
        bias = tl.load(dt_bias + decayed, mask=in_decayed, other=0.0)
        dt = softplus(tl.load(input_at, mask=in_decayed, other=0.0).to(tl.float32) + bias)
        if read < 0:  # a prompt
            dt = tl.minimum(tl.maximum(dt, least), most)
        decay = tl.exp(tl.load(rate + head) * dt)
        if IS_DELTA:
            state = tl.zeros((KEY_PADDED, BLOCK), tl.float32)
            rows, in_row, columns, in_column, width = keys, in_key, values, in_value, VALUE
        else:
            state = tl.zeros((BLOCK, KEY_PADDED), tl.float32)
            rows, in_row, columns, in_column, width = values, in_value, keys, in_key, KEY
        of_head, mask = start + head * KEY * VALUE, in_row[:, None] & in_column[None, :]
        if read >= 0:
            pages = tables + read.to(tl.int64) * PAGES
            at = matrix_at(pages, of_head, rows, in_row, columns, in_column, width, PAGE, WHOLE_ROWS)
            state = tl.load(states + at, mask=mask, other=0.0).to(tl.float32)
        if IS_DELTA:
            beta = beta_scale / (1.0 + tl.exp(-tl.load(inputs + tl.load(beta_from + head)).to(tl.float32)))
            q *= tl.rsqrt(tl.sum(q * q, 0) + TINY) / tl.sqrt(KEY * 1.0)
            k *= tl.rsqrt(tl.sum(k * k, 0) + TINY)
            state *= decay[:, None] if BY_KEY else decay
            delta = beta * (v - tl.sum(state * k[:, None], 0))
            state += k[:, None] * delta[None, :]
            result = tl.sum(state * q[:, None], 0)
        else:
            state = state * decay + (dt * v)[:, None] * k[None, :]
            result = tl.sum(state * q[None, :], 1) + tl.load(skip + head) * v
        pages = tables + written.to(tl.int64) * PAGES
        at = matrix_at(pages, of_head, rows, in_row, columns, in_column, width, PAGE, WHOLE_ROWS)
        tl.store(states + at, state.to(states.dtype.element_ty), mask=mask)
        at = out + (token * HEADS + head) * VALUE + values
        tl.store(at, result.to(out.dtype.element_ty), mask=in_value)


def step(
    layer: Recurrence, convolved: torch.Tensor, projected: torch.Tensor, plan: ChunkPlan, states: BlockStates,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute the results ``out`` [tokens, heads · value] of sequences with one token, and update their states."""
    key = power_of_two(layer.key)
    block = min(power_of_two(layer.value), max(1, _VALUES // key))
    launch(
        step_kernel,
        (layer.heads, triton.cdiv(layer.value, block), len(plan.chunks)),
        convolved, projected, out, states.values, states.tables, plan.chunks, layer.decay_from, layer.beta_from,
        layer.rate, layer.dt_bias, layer.rate if layer.skip is None else layer.skip, projected.stride(0), states.start,
        float(layer.beta_scale), *map(float, layer.limits),
        HEADS=layer.heads, GROUPS=layer.groups, KEY=layer.key, VALUE=layer.value, KEY_PADDED=key, BLOCK=block,
        PAGE=states.page, PAGES=states.pages, FIELDS=FIELDS,
        WHOLE_ROWS=states.has_whole_rows(layer.value if layer.is_delta else layer.key), IS_DELTA=layer.is_delta,
        BY_KEY=layer.by_key, num_warps=4,
    )  # fmt: skip

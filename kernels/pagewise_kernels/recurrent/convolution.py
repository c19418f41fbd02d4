"""Causal convolutions of the channels of a flat batch, whose last inputs are the conv states of its sequences."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import launch
from pagewise_kernels.recurrent.layers import Recurrence, ShortConvolution
from pagewise_kernels.recurrent.paged_states import FIELDS, BlockStates, ChunkPlan
from pagewise_kernels.shapes import power_of_two

_CHANNELS = 256
"""Of a program, each of whose 128 threads has two of them."""
_TOKENS = 8
"""Of a tile in a step with chunks."""


@triton.jit
def _inputs(
    projected, states, pages, tokens, begin, stop, read, channels, inside, places, factors, stride, start,
    IS_SHORT: tl.constexpr, KEPT: tl.constexpr, PAGE: tl.constexpr, LOOK_BACK: tl.constexpr,
):  # fmt: skip
    """The inputs of tokens and channels [tokens, channels]. Those of tokens before ``begin`` lie in the state."""
    new = ((tokens >= begin) & (tokens < stop))[:, None] & inside[None, :]
    row = projected + tokens.to(tl.int64)[:, None] * stride
    x = tl.load(row + places[None, :], mask=new, other=0.0).to(tl.float32)
    if IS_SHORT:  # rounded as the model does it
        x = (x * tl.load(row + factors[None, :], mask=new, other=0.0).to(tl.float32)).to(projected.dtype.element_ty)
        x = x.to(tl.float32)
    if LOOK_BACK:
        kept = KEPT + tokens - begin
        old = ((tokens < begin) & (kept >= 0) & (read >= 0))[:, None] & inside[None, :]
        at = start + channels[None, :] * KEPT + kept[:, None]
        page = tl.load(pages + at // PAGE, mask=old, other=0).to(tl.int64)
        x += tl.load(states + page * PAGE + at % PAGE, mask=old, other=0.0).to(tl.float32)
    return x


@triton.jit
def _keep_inputs(
    projected, states, tables, chunk, channels, inside, places, factors, stride, start,
    IS_SHORT: tl.constexpr, KEPT: tl.constexpr, KEPT_PADDED: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Write the conv state behind a chunk, if it is kept."""
    stop, read, written, begin = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3), tl.load(chunk + 4)
    if written >= 0:
        kept = tl.arange(0, KEPT_PADDED)
        x = _inputs(
            projected, states, tables + read.to(tl.int64) * PAGES, stop - KEPT + kept, begin, stop, read, channels,
            inside, places, factors, stride, start, IS_SHORT, KEPT, PAGE, True,
        )  # fmt: skip
        tl.debug_barrier()  # what it replaces has been read by all threads
        at = start + channels[None, :] * KEPT + kept[:, None]
        mask = (kept < KEPT)[:, None] & inside[None, :]
        page = tl.load(tables + written.to(tl.int64) * PAGES + at // PAGE, mask=mask, other=0).to(tl.int64)
        tl.store(states + page * PAGE + at % PAGE, x.to(states.dtype.element_ty), mask=mask)


@triton.jit
def convolve_kernel(
    projected, out, states, tables, chunks, conv_from, factor_from, gate_from, weight, bias, stride, start,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr,
    KEPT_PADDED: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, FIELDS: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_SHORT: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: chunk, BLOCK of its channels. The states of sequences with one token are written, too."""
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    wait_for_predecessor(PDL)
    chunk = chunks + tl.program_id(0) * FIELDS
    first, stop, read, begin = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 4)
    places = tl.load(conv_from + channels, mask=inside, other=0)
    factors = tl.load(factor_from + channels, mask=inside, other=0)
    pages = tables + read.to(tl.int64) * PAGES
    kind = projected.dtype.element_ty
    for at in range(first, stop, TOKENS):
        tokens = at + tl.arange(0, TOKENS)
        sums = tl.zeros((TOKENS, BLOCK), tl.float32)
        if HAS_BIAS:
            sums += tl.load(bias + channels, mask=inside, other=0.0)[None, :]
        for back in tl.static_range(WIDTH):
            w = tl.load(weight + channels * WIDTH + (WIDTH - 1 - back), mask=inside, other=0.0)[None, :]
            if at - begin < back:
                x = _inputs(
                    projected, states, pages, tokens - back, begin, stop, read, channels, inside, places, factors,
                    stride, start, IS_SHORT, KEPT, PAGE, True,
                )  # fmt: skip
                sums += w * x
            else:
                x = _inputs(
                    projected, states, pages, tokens - back, begin, stop, read, channels, inside, places, factors,
                    stride, start, IS_SHORT, KEPT, PAGE, False,
                )  # fmt: skip
                sums += w * x
        mask = (tokens < stop)[:, None] & inside[None, :]
        if IS_SHORT:
            gates = tl.load(gate_from + channels, mask=inside, other=0)[None, :]
            gate = tl.load(projected + tokens.to(tl.int64)[:, None] * stride + gates, mask=mask, other=0.0)
            sums = sums.to(kind).to(tl.float32) * gate.to(tl.float32)
        else:
            sums = sums / (1.0 + tl.exp(-sums))
        row = out + tokens.to(tl.int64)[:, None] * CHANNELS
        tl.store(row + channels[None, :], sums.to(kind), mask=mask)
    if tl.load(chunk + 5) != 0:
        _keep_inputs(
            projected, states, tables, chunk, channels, inside, places, factors, stride, start, IS_SHORT, KEPT,
            KEPT_PADDED, PAGE, PAGES, FIELDS,
        )  # fmt: skip


@triton.jit
def keep_inputs_kernel(
    projected, states, tables, firsts, chunks, conv_from, factor_from, stride, start,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, KEPT_PADDED: tl.constexpr, PAGE: tl.constexpr,
    PAGES: tl.constexpr, FIELDS: tl.constexpr, IS_SHORT: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: sequence with several tokens, BLOCK of its channels.

    The last chunk comes first: the states behind a chunk of few tokens begin with the state that the sequence reads,
    which its first chunk may replace.
    """
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    wait_for_predecessor(PDL)
    first, last = tl.load(firsts + tl.program_id(0)), tl.load(firsts + tl.program_id(0) + 1)
    places = tl.load(conv_from + channels, mask=inside, other=0)
    factors = tl.load(factor_from + channels, mask=inside, other=0)
    for turn in range(last - first):
        chunk = chunks + (last - 1 - turn) * FIELDS
        if tl.load(chunk + 5) == 0:
            _keep_inputs(
                projected, states, tables, chunk, channels, inside, places, factors, stride, start, IS_SHORT, KEPT,
                KEPT_PADDED, PAGE, PAGES, FIELDS,
            )  # fmt: skip


def convolve(
    layer: Recurrence | ShortConvolution, projected: torch.Tensor, plan: ChunkPlan, states: BlockStates
) -> torch.Tensor:
    """Return the convolved channels [tokens, channels] of ``projected`` [tokens, size], and keep its last inputs.

    Behind a convolution comes SiLU; a short one multiplies by its gate instead. Padding gets no
    result, of a short one zeros.
    """
    is_short = isinstance(layer, ShortConvolution)
    factors = gates = layer.conv_from
    if isinstance(layer, ShortConvolution):
        factors, gates = layer.factor_from, layer.gate_from
    channels, width = layer.conv.shape
    block = min(_CHANNELS, power_of_two(channels))
    programs = triton.cdiv(channels, block)
    shape = {
        "CHANNELS": channels, "BLOCK": block, "KEPT": layer.kept, "KEPT_PADDED": power_of_two(layer.kept),
        "PAGE": states.page, "PAGES": states.pages, "FIELDS": FIELDS, "IS_SHORT": is_short,
    }  # fmt: skip
    out = (projected.new_zeros if is_short else projected.new_empty)(len(projected), channels)
    launch(
        convolve_kernel, (len(plan.chunks), programs), projected, out, states.values, states.tables, plan.chunks,
        layer.conv_from, factors, gates, layer.conv, layer.conv if layer.conv_bias is None else layer.conv_bias,
        projected.stride(0), states.start, TOKENS=_TOKENS if plan.longer else 1, WIDTH=width,
        HAS_BIAS=layer.conv_bias is not None, **shape, num_warps=4,
    )  # fmt: skip
    if plan.longer:
        launch(
            keep_inputs_kernel, (len(plan.firsts) - 1, programs), projected, states.values, states.tables, plan.firsts,
            plan.chunks, layer.conv_from, factors, projected.stride(0), states.start, **shape, num_warps=4,
        )  # fmt: skip
    return out

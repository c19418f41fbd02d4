"""Penalties on logits: tokens of the prompt and the output so far become less likely."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import check_device, launch
from pagewise_kernels.shapes import check_logits, check_rows


@triton.jit(do_not_specialize_on_alignment=["repetition", "presence", "frequency"])
def penalise_kernel(
    logits, out, counts, in_prompt, rows, repetition, presence, frequency, vocab_size,
    stride, stride_out, stride_counts,
    BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Programs: row, piece of the vocabulary."""
    index = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    wait_for_predecessor(PDL)
    value = tl.load(logits + index.to(tl.int64) * stride + columns, mask=inside, other=0.0).to(tl.float32)
    held = tl.load(rows + index).to(tl.int64) * stride_counts + columns
    count = tl.load(counts + held, mask=inside, other=0)
    seen = (count > 0) | (tl.load(in_prompt + held, mask=inside, other=0) != 0)
    factor = tl.load(repetition + index)
    value = tl.where(seen, tl.where(value > 0, value / factor, value * factor), value)
    value -= tl.load(frequency + index) * count.to(tl.float32)
    value -= tl.where(count > 0, tl.load(presence + index), 0.0)
    tl.store(out + index.to(tl.int64) * stride_out + columns, value, mask=inside)


def penalise(
    logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, in_prompt: torch.Tensor, *,
    repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Logits float32 [n, vocab] after the penalties of logits [n, vocab].

    rows int32 [n]: which row of ``counts`` int32 [.., vocab] (how often each entry is in the output) and ``in_prompt``
    bool [.., vocab] belongs to each. repetition, presence, frequency float32 [n]: 1, 0 and 0 change nothing.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    number, vocab_size = check_logits(logits)
    for name, tensor in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        check_rows(name, tensor, number, torch.float32)
    check_rows("rows", rows, number, torch.int32)
    if counts.shape != in_prompt.shape or counts.shape[-1:] != (vocab_size,) or counts.stride() != in_prompt.stride():
        raise ValueError(f"counts and in_prompt are [rows, {vocab_size}] alike, not {list(counts.shape)}")
    if counts.dtype != torch.int32 or in_prompt.dtype != torch.bool:
        raise TypeError(f"counts are int32 and in_prompt is bool, not {counts.dtype} and {in_prompt.dtype}")
    check_device(logits, rows, counts, in_prompt, repetition, presence, frequency)
    out = torch.empty(number, vocab_size, dtype=torch.float32, device=logits.device)
    block = 1024
    launch(
        penalise_kernel,
        (number, triton.cdiv(vocab_size, block)),
        logits, out, counts, in_prompt.view(torch.uint8), rows, repetition, presence, frequency, vocab_size,
        logits.stride(0), out.stride(0), counts.stride(0),
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out

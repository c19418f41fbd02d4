"""Log-probabilities and ranks of tokens, without the softmax of a whole row in memory."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import check_device, interpreted, launch
from pagewise_kernels.shapes import check_logits, check_rows


@triton.jit
def logprobs_kernel(
    logits, tokens, logprobs, ranks, vocab_size, stride, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    """One program per row."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    wait_for_predecessor(PDL)
    own = tl.load(row + tl.load(tokens + index)).to(tl.float32)
    high = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    rank = tl.full([], 1, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.load(row + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
        new_high = tl.maximum(high, tl.max(value, 0))
        total = total * tl.exp(high - new_high) + tl.sum(tl.exp(value - new_high), 0)
        high = new_high
        rank += tl.sum((value > own).to(tl.int32), 0)
    tl.store(logprobs + index, own - high - tl.log(total))
    tl.store(ranks + index, rank)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability float32 [n] of ``tokens`` int64 [n] in logits [n, vocab], and rank int32 [n], from 1 on.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    rows, vocab_size = check_logits(logits)
    check_rows("tokens", tokens, rows, torch.int64)
    check_device(logits, tokens)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    launch(
        logprobs_kernel,
        (rows,),
        logits, tokens, logprobs, ranks, vocab_size, logits.stride(0),
        BLOCK=256 if interpreted() else 4096, num_warps=8,
    )  # fmt: skip
    return logprobs, ranks

"""The model's inputs of a step, looked up on the device: the tokens sampled last, their positions and slots."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.dependent_launch import wait_for_predecessor
from pagewise_kernels.launch import check_device, launch

_BLOCK = 256


@triton.jit(do_not_specialize=["number", "stride_pool", "stride_slots"])
def decode_inputs_kernel(
    rows, lengths, tables, last_tokens, known, ids, positions, slots, number,
    stride_pool, stride_tables, stride_slots,
    HAS_KNOWN: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr = 0,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per BLOCK queries and pool. ``RING``: see ``block_ids``."""
    pool = tl.program_id(1).to(tl.int64)
    queries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = queries < number
    wait_for_predecessor(PDL)
    length = tl.load(lengths + queries, mask=inside, other=0)
    there = inside & (length > 0)
    row = tl.load(rows + queries, mask=there, other=0).to(tl.int64)
    position = tl.where(there, length - 1, 0)
    number_of_block = position // BLOCK_SIZE
    if RING > 0:
        number_of_block = number_of_block & (RING - 1)
    at = tables + pool * stride_pool + row * stride_tables + number_of_block
    block = tl.load(at, mask=there, other=0).to(tl.int64)
    slot = tl.where(there, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    is_sampled = there
    token = tl.zeros([BLOCK], tl.int64)
    if HAS_KNOWN:
        token = tl.load(known + queries, mask=there, other=0).to(tl.int64)
        is_sampled = there & (token < 0)
    token = tl.where(is_sampled, tl.load(last_tokens + row, mask=is_sampled, other=0), token)
    is_first = inside & (pool == 0)
    tl.store(ids + queries, token, mask=is_first)
    tl.store(positions + queries, position.to(tl.int64), mask=is_first)
    tl.store(slots + pool * stride_slots + queries, slot, mask=inside)


def decode_inputs(
    rows: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor, last_tokens: torch.Tensor, *, block_size: int,
    ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, known: torch.Tensor | None = None,
    ring: bool = False,
) -> None:  # fmt: skip
    """Fill ids, positions and slots int64 [n] for sequences in rows int32 [n] with lengths int32 [n] of context.

    A context counts the new token, which ``last_tokens`` int64 [rows] holds; tables int32 [rows, blocks]. Where the
    length is 0 the query pads: id 0, position 0, slot -1. ``known`` int32 [n]: tokens of prompts, and -1 where the last
    token of the row is meant, as it is everywhere without this. Layers in several pools have tables [pools, rows,
    blocks] and slots [pools, n]. ``ring``: see ``decode_attention``.

    Raises:
        ValueError: shapes or devices do not fit. TypeError: types do not.
    """
    number = len(rows)
    if tables.dim() == 2:
        tables, slots = tables[None], slots[None]
    pools, _, width = tables.shape
    if slots.shape != (pools, number) or slots.stride(1) != 1 or (ring and width & (width - 1)):
        raise ValueError(f"slots {list(slots.shape)} of {number} queries do not fit tables {list(tables.shape)}")
    for name, tensor, dtype in (
        ("rows", rows, torch.int32),
        ("lengths", lengths, torch.int32),
        ("ids", ids, torch.int64),
        ("positions", positions, torch.int64),
        ("slots", slots[0], torch.int64),
        *((("known", known, torch.int32),) if known is not None else ()),
    ):
        if tensor.shape != (number,):
            raise ValueError(f"{name} has {list(tensor.shape)} entries, not {number}")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {dtype}, not {tensor.dtype}")
    if tables.dtype != torch.int32 or tables.stride(2) != 1 or last_tokens.dtype != torch.int64:
        raise TypeError(
            f"tables are int32 [rows, blocks] and last tokens int64, not {tables.dtype}, {last_tokens.dtype}"
        )
    tokens = rows if known is None else known
    check_device(rows, lengths, tables, last_tokens, tokens, ids, positions, slots)
    launch(
        decode_inputs_kernel,
        (triton.cdiv(number, _BLOCK), pools),
        rows, lengths, tables, last_tokens, tokens, ids, positions, slots, number, *tables.stride()[:2],
        slots.stride(0),
        HAS_KNOWN=known is not None, BLOCK_SIZE=block_size, BLOCK=_BLOCK, RING=width if ring else 0, num_warps=4,
    )  # fmt: skip

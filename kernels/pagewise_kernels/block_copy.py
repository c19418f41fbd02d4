"""Copies whole blocks: on the device for copy-on-write, and between the pool and staging or pinned host memory."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.launch import check_device, launch

_PIECE = 4096
"""Words that one program copies of a block."""


@triton.jit
def copy_blocks_kernel(pool, pairs, num_words, stride, stride_part, PIECE: tl.constexpr):
    """``pool``: words; its blocks lie ``stride`` apart, its parts ``stride_part``. Programs: pair, piece, part."""
    pair = tl.program_id(0)
    source = tl.load(pairs + 2 * pair).to(tl.int64)
    target = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    words = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = words < num_words
    part = pool + tl.program_id(2).to(tl.int64) * stride_part + words
    tl.store(part + target * stride, tl.load(part + source * stride, mask=inside), mask=inside)


@triton.jit
def move_blocks_kernel(
    pool, blocks, staged, num_words,
    stride, stride_part, stride_staged,
    GATHER: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Between blocks of a pool and rows of ``staged``, part after part: to the rows if GATHER, else from them."""
    row = tl.program_id(0)
    part = tl.program_id(2).to(tl.int64)
    block = tl.load(blocks + row).to(tl.int64)
    words = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = words < num_words
    in_pool = pool + part * stride_part + block * stride + words
    in_row = staged + row.to(tl.int64) * stride_staged + part * num_words + words
    if GATHER:
        tl.store(in_row, tl.load(in_pool, mask=inside), mask=inside)
    else:
        tl.store(in_pool, tl.load(in_row, mask=inside), mask=inside)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks inside a pool, in all its parts.

    pool [parts, num_blocks, ...], the part of a block in itself contiguous; pairs int32 or int64 [n, 2] of source and
    destination. No destination is the source of another pair or twice a destination: they are copied in any order.

    Raises:
        ValueError: shapes or devices do not fit. TypeError: pairs are no integers.
    """
    words = _words(pool)
    if pairs.dim() != 2 or pairs.shape[1] != 2 or not pairs.is_contiguous():
        raise ValueError(f"pairs are [n, 2], not {list(pairs.shape)}")
    _check_integers(pairs)
    check_device(pool, pairs)
    parts, _, num_words = words.shape
    grid = (len(pairs), triton.cdiv(num_words, _PIECE), parts)
    launch(
        copy_blocks_kernel, grid, words, pairs, num_words, words.stride(1), words.stride(0), PIECE=_PIECE, num_warps=8
    )


def gather_blocks(pool: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy ``blocks`` int32 or int64 [n] of a pool [parts, num_blocks, ...] into rows of ``staged`` uint8 [n, bytes].

    A row is the parts of a block one after the other. ``staged``: its rows lie any distance apart, on the device or
    pinned on the host.

    Raises:
        ValueError: shapes do not fit. TypeError: types do not.
    """
    _move(pool, blocks, staged, gather=True)


def scatter_blocks(pool: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
    """The counterpart of ``gather_blocks``: rows of ``staged`` into ``blocks``, no two alike."""
    _move(pool, blocks, staged, gather=False)


def _move(pool: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor, *, gather: bool) -> None:
    words = _words(pool)
    _check_integers(blocks)
    size = words.shape[0] * words.shape[2] * words.element_size()
    if blocks.dim() != 1 or staged.dtype != torch.uint8 or staged.shape != (len(blocks), size) or staged.stride(1) != 1:
        raise ValueError(
            f"{len(blocks)} blocks of {size} bytes do not go into {staged.dtype} {list(staged.shape)}, and not back"
        )
    check_device(pool, blocks)
    if staged.device != pool.device and not staged.is_pinned():
        raise ValueError(f"staged lies on {staged.device}: it has to lie on {pool.device}, or pinned on the host")
    if staged.stride(0) % words.element_size():
        words = pool.flatten(2).view(torch.uint8)
    rows = staged.view(words.dtype)
    parts, _, num_words = words.shape
    grid = (len(blocks), triton.cdiv(num_words, _PIECE), parts)
    launch(
        move_blocks_kernel, grid, words, blocks, rows, num_words, words.stride(1), words.stride(0), rows.stride(0),
        GATHER=gather, PIECE=_PIECE, num_warps=8,
    )  # fmt: skip


def _words(pool: torch.Tensor) -> torch.Tensor:
    """The pool as [parts, num_blocks, words] of the largest integers that divide a block's part.

    Raises:
        ValueError: a block's part is not contiguous.
    """
    if pool.dim() < 3 or not pool[:1, :1].is_contiguous():
        raise ValueError(f"a block has to be contiguous in a pool {list(pool.shape)}, its strides are {pool.stride()}")
    item = pool.element_size()
    size = pool[0, 0].numel() * item
    flat = pool.flatten(2)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(length % dtype.itemsize == 0 for length in (size, pool.stride(0) * item, pool.stride(1) * item)):
            return flat.view(dtype)
    return flat.view(torch.uint8)


def _check_integers(tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"block ids are int32 or int64, not {tensor.dtype}")

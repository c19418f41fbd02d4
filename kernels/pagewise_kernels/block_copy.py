"""Copies whole blocks: on the device for copy-on-write, and between the pool and staging or pinned host memory."""

import torch
import triton
import triton.language as tl

from pagewise_kernels.launch import check_device, launch

_PIECE = 4096
"""Words that one program copies of a block."""


@triton.jit
def copy_blocks_kernel(pool, pairs, num_words, stride, PIECE: tl.constexpr):
    """``pool``: words of one region, its blocks ``stride`` apart. Programs: pair, piece of the block."""
    pair = tl.program_id(0)
    source = tl.load(pairs + 2 * pair).to(tl.int64)
    target = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    words = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = words < num_words
    tl.store(pool + target * stride + words, tl.load(pool + source * stride + words, mask=inside), mask=inside)


@triton.jit
def move_blocks_kernel(
    pool, blocks, staged, num_words, stride, staged_stride, GATHER: tl.constexpr, PIECE: tl.constexpr
):
    """Between blocks of a region and rows of ``staged``: to the rows if GATHER, else from them."""
    row = tl.program_id(0)
    block = tl.load(blocks + row).to(tl.int64)
    words = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = words < num_words
    in_pool = pool + block * stride + words
    in_row = staged + row.to(tl.int64) * staged_stride + words
    if GATHER:
        tl.store(in_row, tl.load(in_pool, mask=inside), mask=inside)
    else:
        tl.store(in_pool, tl.load(in_row, mask=inside), mask=inside)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks inside a pool.

    pool [num_blocks, ...], each block contiguous; pairs int32 or int64 [n, 2] of source and destination. No destination
    is the source of another pair or twice a destination: the pairs are copied in any order.

    Raises:
        ValueError: shapes or devices do not fit. TypeError: pairs are no integers.
    """
    words = _words(pool)
    if pairs.dim() != 2 or pairs.shape[1] != 2 or not pairs.is_contiguous():
        raise ValueError(f"pairs are [n, 2], not {list(pairs.shape)}")
    _check_integers(pairs)
    check_device(pool, pairs)
    num_words = words.shape[1]
    grid = (len(pairs), triton.cdiv(num_words, _PIECE))
    launch(copy_blocks_kernel, grid, words, pairs, num_words, words.stride(0), PIECE=_PIECE, num_warps=8)


def gather_blocks(pool: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy ``blocks`` int32 or int64 [n] of a pool [num_blocks, ...] into rows of ``staged`` uint8 [n, bytes].

    ``staged``: rows of the bytes of a block, any distance apart; on the device, or pinned on the host.

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
    size = words.shape[1] * words.element_size()
    if blocks.dim() != 1 or staged.dtype != torch.uint8 or staged.shape != (len(blocks), size) or staged.stride(1) != 1:
        raise ValueError(
            f"{len(blocks)} blocks of {size} bytes do not go into {staged.dtype} {list(staged.shape)}, and not back"
        )
    check_device(pool, blocks)
    if staged.device != pool.device and not staged.is_pinned():
        raise ValueError(f"staged lies on {staged.device}: it has to lie on {pool.device}, or pinned on the host")
    if staged.stride(0) % words.element_size():
        words = pool.view(torch.uint8).view(len(pool), -1)
    rows = staged.view(words.dtype)
    num_words = words.shape[1]
    grid = (len(blocks), triton.cdiv(num_words, _PIECE))
    launch(
        move_blocks_kernel, grid, words, blocks, rows, num_words, words.stride(0), rows.stride(0),
        GATHER=gather, PIECE=_PIECE, num_warps=8,
    )  # fmt: skip


def _words(pool: torch.Tensor) -> torch.Tensor:
    """The pool as [num_blocks, words] of the largest integers that divide a block.

    Raises:
        ValueError: a block is not contiguous.
    """
    if pool.dim() < 2 or not pool[:1].is_contiguous():
        raise ValueError(
            f"each block of the pool {list(pool.shape)} has to be contiguous, its strides are {pool.stride()}"
        )
    size = pool[0].numel() * pool.element_size()
    flat = pool.flatten(1)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if size % dtype.itemsize == 0 and pool.stride(0) * pool.element_size() % dtype.itemsize == 0:
            return flat.view(dtype)
    raise AssertionError("every size is a multiple of a byte")


def _check_integers(tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"block ids are int32 or int64, not {tensor.dtype}")

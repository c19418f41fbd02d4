"""Recurrent layers: gated delta nets, KDA, Mamba-2, and short convolutions, whose states lie in pages.

A step is a flat batch of sequences, some of which have one token. The states are read from the block of each sequence,
and written in place, or to another one. Nothing is gathered before and scattered after.
"""

import torch

from pagewise_kernels.launch import check_device
from pagewise_kernels.recurrent.chunk_kernel import compute_chunks
from pagewise_kernels.recurrent.convolution import convolve
from pagewise_kernels.recurrent.gate import gate_results
from pagewise_kernels.recurrent.layers import Recurrence, ShortConvolution
from pagewise_kernels.recurrent.paged_states import CHUNK, FIELDS, BlockStates, ChunkPlan
from pagewise_kernels.recurrent.step_kernel import step

__all__ = [
    "CHUNK", "FIELDS", "BlockStates", "ChunkPlan", "Recurrence", "ShortConvolution",
    "advance", "convolve_short", "recur",
]  # fmt: skip


def recur(
    layer: Recurrence, projected: torch.Tensor, plan: ChunkPlan, conv: BlockStates, state: BlockStates
) -> torch.Tensor:
    """Return outputs [tokens, heads · value] for ``projected`` [tokens, size]; update the states of the sequences.

    ``conv``, ``state``: where the conv states [channels, kept] and the recurrent states lie. Outputs of padding are
    zeros.

    Raises:
        ValueError: shapes or devices do not fit. TypeError: types do not fit.
    """
    return gate_results(layer, advance(layer, projected, plan, conv, state), projected, plan)


def advance(
    layer: Recurrence, projected: torch.Tensor, plan: ChunkPlan, conv: BlockStates, state: BlockStates
) -> torch.Tensor:
    """Update the states of the sequences; return the results [tokens, heads · value] before their norm and gate, in
    which rows of no sequence have any content.

    Raises:
        ValueError, TypeError: as ``recur``.
    """
    _check(layer, projected, plan, conv)
    state.check(layer.heads * layer.key * layer.value)
    check_device(projected, state.values, state.tables, layer.rate)
    convolved = convolve(layer, projected, plan, conv)
    results = projected.new_empty(len(projected), layer.heads * layer.value)
    step(layer, convolved, projected, plan, state, results)
    if plan.longer:
        compute_chunks(layer, convolved, projected, plan, state, results)
    return results


def convolve_short(
    layer: ShortConvolution, projected: torch.Tensor, plan: ChunkPlan, conv: BlockStates
) -> torch.Tensor:
    """Return the results [tokens, channels] of a short convolution; update its conv states. Those of padding
    are zeros.

    Raises:
        ValueError: shapes or devices do not fit. TypeError: types do not fit.
    """
    _check(layer, projected, plan, conv)
    return convolve(layer, projected, plan, conv)


def _check(layer: Recurrence | ShortConvolution, projected: torch.Tensor, plan: ChunkPlan, conv: BlockStates) -> None:
    if projected.dim() != 2 or projected.shape[1] < layer.size or projected.stride(1) != 1:
        raise ValueError(f"rows of projections have {layer.size} values, not {list(projected.shape)}")
    if projected.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"projections are floating point numbers, not {projected.dtype}")
    plan.check()
    conv.check(len(layer.conv) * layer.kept)
    check_device(projected, *plan.tensors, conv.values, conv.tables, layer.conv, layer.conv_from)

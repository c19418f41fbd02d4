"""Experts in MXFP4, read as the weights that they become in the model's type, of which a rank reads its part."""

from typing import Any

import torch

from pagewise_executor.models.shards import Slice
from pagewise_executor.models.weight_files import MXFP4_SCALES, MXFP4_WEIGHTS

_BLOCK = 32
"""Weights that share a scale."""
_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_SIZES, -_SIZES])
"""The values of a weight, by its four bits."""


class Experts:
    """A weight [experts, inputs, outputs] of which a part is read from its blocks uint8 [experts, outputs, inputs / 32,
    16] and scales uint8 [experts, outputs, inputs / 32], exponents of 2 with a bias of 127.
    """

    def __init__(self, blocks: Slice, scales: Slice, dtype: torch.dtype) -> None:
        self._blocks, self._scales, self._dtype = blocks, scales, dtype

    def get_shape(self) -> list[int]:
        """Return the shape of the weight."""
        experts, outs, blocks, _ = self._blocks.get_shape()
        return [experts, blocks * _BLOCK, outs]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part: an index is ..., or has slices without steps of the first dimensions."""
        given = () if index is ... else index
        count, ins, outs = (
            range(*cut.indices(size))
            for cut, size in zip([*given, *[slice(None)] * (3 - len(given))], self.get_shape(), strict=True)
        )
        first, last = ins.start // _BLOCK, -(-ins.stop // _BLOCK)
        found = torch.empty(len(count), len(ins), len(outs), dtype=self._dtype)
        rows, blocks = slice(outs.start, outs.stop), slice(first, last)
        for place, expert in enumerate(count):  # one by one, because the values take many times the memory of the bytes
            codes = self._blocks[expert : expert + 1, rows, blocks][0]
            exponents = self._scales[expert : expert + 1, rows, blocks][0].int() - 127
            values = _VALUES[torch.stack([codes & 15, codes >> 4], dim=-1).int()].flatten(-2)
            weights = torch.ldexp(values, exponents[..., None]).flatten(-2)
            found[place] = weights[:, ins.start - first * _BLOCK : ins.stop - first * _BLOCK].T
        return found


def joined(tensors: dict[str, Slice], dtype: torch.dtype) -> dict[str, Slice]:
    """Return the tensors of a checkpoint by name, in which one entry takes the place of the tensors of each weight in
    MXFP4."""
    found: dict[str, Slice] = {}
    for name, tensor in tensors.items():
        if name.endswith(MXFP4_WEIGHTS):
            weight = name.removesuffix("_blocks")
            found[weight] = Experts(tensor, tensors[name.removesuffix(MXFP4_WEIGHTS) + MXFP4_SCALES], dtype)
        elif not name.endswith(MXFP4_SCALES):
            found[name] = tensor
    return found

"""A weight in eight bits, and how weights and inputs are rounded to them: FP8 or int8."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
MOST = {FP8: 448.0, torch.int8: 127.0}
_AT_ONCE = 1 << 22
"""About how many weights are rounded at once, so that this takes little memory beside them."""


class Inputs(NamedTuple):
    """How the inputs of a layer are rounded before the product, to the type of its weights.

    ``quantised``: False: only weights are in eight bits. ``group``: the number of inputs of a row that share a scale;
    None: all. ``static``: the checkpoint has one scale for all rows; otherwise each row or group has one by its largest
    value. ``ue8m0``: such a scale is the next power of two, which exponents of eight bits hold.
    """

    quantised: bool = True
    group: int | None = None
    static: bool = False
    ue8m0: bool = False


BY_ROW = Inputs()


@dataclass(slots=True, frozen=True)
class QuantisedWeight:
    """The weight of a linear layer in eight bits: ``values`` times ``scales``.

    ``values``: float8_e4m3fn or int8 [outs, ins]. ``scales``: float32 [ceil(outs / block[0]), ceil(ins / block[1])].
    ``block``: outputs and inputs that share a scale. (1, ins) is one scale per output ("per channel"), (outs, ins) one
    for all ("per tensor"), (1, 128) one per group, (128, 128) one per block.
    """

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        (outs, ins), (rows, columns) = self.values.shape, self.block
        if list(self.scales.shape) != [-(-outs // rows), -(-ins // columns)]:
            raise ValueError(f"{outs} · {ins} weights in blocks of {rows} · {columns} have other scales than "
                             f"{list(self.scales.shape)}")  # fmt: skip

    def dequantised(self) -> torch.Tensor:
        """Return the weights as float32 [outs, ins]."""
        wide = self.values.float()
        for dim, size in enumerate(self.block):
            if size < wide.shape[dim] and size > 1:
                return self.with_block((1, self.block[1]) if dim == 0 else (self.block[0], 1)).dequantised()
        return wide.mul_(self.scales)

    def with_block(self, block: tuple[int, int]) -> "QuantisedWeight":
        """Return the same weights with scales for smaller blocks, whose sizes divide the sizes of the blocks."""
        scales = self.scales
        for dim, (fine, coarse) in enumerate(zip(block, self.block, strict=True)):
            starts = torch.arange(0, self.values.shape[dim], fine, device=scales.device)
            scales = scales.index_select(dim, starts // coarse)
        return QuantisedWeight(self.values, scales, block)

    def rows(self, start: int, stop: int) -> "QuantisedWeight":
        """Return the weights of some outputs, as the shard of a layer whose outputs are divided."""
        cut = self.with_block((math.gcd(self.block[0], start), self.block[1]))
        step = cut.block[0]
        return QuantisedWeight(cut.values[start:stop], cut.scales[start // step : -(-stop // step)], cut.block)

    def columns(self, start: int, stop: int) -> "QuantisedWeight":
        """Return the weights of some inputs, as the shard of a layer whose inputs are divided."""
        values = self.values[:, start:stop].contiguous()
        if self.scales.shape[1] == 1:
            return QuantisedWeight(values, self.scales, (self.block[0], stop - start))
        cut = self.with_block((self.block[0], math.gcd(self.block[1], start)))
        step = cut.block[1]
        return QuantisedWeight(values, cut.scales[:, start // step : -(-stop // step)].contiguous(), cut.block)


def join_outputs(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Return one weight with the outputs of all ``weights``, which are of one type and have the same inputs."""
    ins = weights[0].values.shape[1]
    rows = math.gcd(*(size for one in weights for size in (one.block[0], len(one.values))))
    columns = math.gcd(*(min(one.block[1], ins) for one in weights))
    fine = [one.with_block((rows, columns)) for one in weights]
    values = torch.cat([one.values.view(torch.int8) for one in fine]).view(weights[0].values.dtype)
    return QuantisedWeight(values, torch.cat([one.scales for one in fine]), (rows, columns))


def quantise(weight: torch.Tensor, dtype: torch.dtype) -> QuantisedWeight:
    """Quantise weights [outs, ins] with a scale per output, which makes its largest weight 448 or 127."""
    outs, ins = weight.shape
    values = torch.empty(outs, ins, dtype=dtype, device=weight.device)
    scales = torch.empty(outs, 1, device=weight.device)
    rows = max(1, _AT_ONCE // max(1, ins))
    for start in range(0, outs, rows):
        part = slice(start, min(start + rows, outs))
        rounded, scales[part] = quantise_inputs(weight[part].float(), dtype)
        values[part] = rounded.to(dtype)
    return QuantisedWeight(values, scales, (1, ins))


def quantise_inputs(
    x: torch.Tensor, dtype: torch.dtype, inputs: Inputs = BY_ROW, static_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows x [rows, size] as ``quantise_rows`` of the kernels does, in PyTorch.

    Returns float32 values [rows, size] that ``dtype`` can represent, and scales [rows, size or 1] to multiply them by.
    """
    wide = x.float()
    if static_scale is not None:
        scales = static_scale.expand(len(x), 1)
    else:
        size, group = wide.shape[1], inputs.group or wide.shape[1]
        padded = torch.nn.functional.pad(wide.abs(), (0, -size % group)).view(len(x), -1, group)
        most = padded.amax(dim=2)
        scales = torch.where(most > 0, most / MOST[dtype], 1.0)
        if inputs.ue8m0:
            # The next power of two has no bits of a fraction.
            scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scales = scales if scales.shape[1] == 1 else scales.repeat_interleave(group, dim=1)[:, :size]
    scaled = (wide / scales).clamp_(-MOST[dtype], MOST[dtype])
    return (scaled.round_() if dtype == torch.int8 else scaled.to(dtype).float()), scales

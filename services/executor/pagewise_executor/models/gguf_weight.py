"""Weights of linear layers and embeddings in the formats of GGUF files: unpacked, cut, joined, and dequantised.

A row consists of blocks of neighbouring weights. docs/quantization.md lists the formats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagewise_executor.models.four_bit_weight import SYMMETRIC_ZERO, FourBitWeight


class Format(NamedTuple):
    """A format: its blocks have ``weights`` weights in ``size`` bytes. ``kept``: the bytes of a block of a linear layer
    in memory. ``scales``: the places of numbers in float16 in a block."""

    weights: int
    size: int
    kept: int
    scales: tuple[int, ...] = (0,)


FORMATS = {
    "Q4_0": Format(32, 18, 18),
    "Q4_1": Format(32, 20, 20, (0, 2)),
    "Q5_0": Format(32, 22, 34),
    "Q5_1": Format(32, 24, 36, (0, 2)),
    "Q8_0": Format(32, 34, 34),
    "Q4_K": Format(256, 144, 148, (0, 2)),
    "Q5_K": Format(256, 176, 276, (0, 2)),
    "Q6_K": Format(256, 210, 274, (208,)),
}


@dataclass(slots=True, frozen=True)
class GgufWeight:
    """The weight of a linear layer: (code - zero) · scale · step - least · least step.

    ``codes`` uint8 [outs, ins]: in ``bits`` 4 or 8. ``scales`` and ``leasts`` float16 [outs, spans]. ``steps`` and
    ``least_steps`` int8 [outs, groups], where a span has some groups; None: they are one, and so are the spans.
    ``leasts`` None: they are zero.
    """

    codes: torch.Tensor
    bits: int
    zero: int
    scales: torch.Tensor
    steps: torch.Tensor | None = None
    leasts: torch.Tensor | None = None
    least_steps: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """The inputs of a group."""
        return self.codes.shape[1] // (self.scales if self.steps is None else self.steps).shape[1]

    def dequantised(self) -> torch.Tensor:
        """Return the weights as float32 [outs, ins]."""
        weights = self._by_group(self.scales, self.steps) * (self.codes.float() - self.zero)
        return weights if self.leasts is None else weights - self._by_group(self.leasts, self.least_steps)

    def _by_group(self, scales: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        wide = scales.float()
        if steps is not None:
            wide = wide.repeat_interleave(steps.shape[1] // wide.shape[1], dim=1) * steps
        return wide.repeat_interleave(self.group, dim=1)

    def rows(self, start: int, stop: int) -> "GgufWeight":
        """Return the weights of some outputs, as the shard of a layer whose outputs are divided."""
        parts = [None if part is None else part[start:stop] for part in self._parts()]
        return _weight(self.bits, self.zero, parts)

    def columns(self, start: int, stop: int) -> "GgufWeight":
        """Return the weights of some inputs, as the shard of a layer whose inputs are divided.

        Raises:
            ValueError: a group of inputs would be divided.
        """
        if start % self.group or stop % self.group:
            raise ValueError(f"inputs {start} to {stop} divide groups of {self.group}")
        groups, cut = self.codes.shape[1] // self.group, slice(start // self.group, stop // self.group)
        parts = [part if part is None else part.repeat_interleave(groups // part.shape[1], dim=1)[:, cut].contiguous()
                 for part in self._parts()[1:]]  # fmt: skip
        return _weight(self.bits, self.zero, [self.codes[:, start:stop].contiguous(), *parts])

    def _parts(self) -> list[torch.Tensor | None]:
        return [self.codes, self.scales, self.steps, self.leasts, self.least_steps]


def _weight(bits: int, zero: int, parts: Sequence[torch.Tensor | None]) -> GgufWeight:
    codes, scales, *others = parts
    assert codes is not None
    assert scales is not None
    return GgufWeight(codes, bits, zero, scales, *others)


def join_outputs(weights: Sequence[GgufWeight]) -> GgufWeight | None:
    """Return one weight with the outputs of all ``weights``; None if they are in different formats."""
    first, columns = weights[0], list(zip(*(one._parts() for one in weights), strict=True))
    kinds = {(one.bits, one.zero, *(None if part is None else part.shape[1] for part in one._parts()))
             for one in weights}  # fmt: skip
    if len(kinds) > 1:
        return None
    joined = [None if parts[0] is None else torch.cat([part for part in parts if part is not None])
              for parts in columns]  # fmt: skip
    return _weight(first.bits, first.zero, joined)


def unpack(blocks: torch.Tensor, kind: str) -> GgufWeight:
    """Return the weights in rows of blocks of a format, uint8 [outs, bytes of a row]."""
    weights, size = FORMATS[kind][:2]
    rows, count = len(blocks), blocks.shape[1] // size
    found = _UNPACK[kind](blocks.reshape(-1, size))
    parts = [None if part is None else part.reshape(rows, -1).contiguous() for part in found._parts()]
    made = _weight(found.bits, found.zero, parts)
    assert made.codes.shape[1] == count * weights
    return made


def in_four_bits(weight: GgufWeight) -> FourBitWeight:
    """Return a weight in Q4_0 in the form of other weights in four bits."""
    group_of = torch.arange(weight.codes.shape[1]) // weight.group
    assert (weight.bits, weight.zero, weight.steps, weight.leasts) == (4, SYMMETRIC_ZERO, None, None)
    return FourBitWeight(weight.codes, weight.scales.float(), None, group_of)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at byte ``start`` of each block."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _nibbles(blocks: torch.Tensor, run: int) -> torch.Tensor:
    """Return the lower halves of each ``run`` bytes, and then their upper halves, as uint8 [blocks, 2 · bytes]."""
    runs = blocks.reshape(len(blocks), -1, run)
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)


def _bits(blocks: torch.Tensor, width: int) -> torch.Tensor:
    """Return the bit fields of ``width`` bits, uint8 [blocks, 8 / width, bytes], the lowest of all bytes first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (blocks[:, None] >> shifts) & ((1 << width) - 1)


def _fifths(blocks: torch.Tensor) -> torch.Tensor:
    """Return the fifth bits of 32 codes, which are the bits of four bytes, at their place in a code."""
    return _bits(blocks, 1).transpose(1, 2).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> GgufWeight:
    return GgufWeight(_nibbles(blocks[:, 2:], 16), 4, SYMMETRIC_ZERO, _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> GgufWeight:
    return GgufWeight(_nibbles(blocks[:, 4:], 16), 4, 0, _half(blocks, 0), leasts=-_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> GgufWeight:
    return GgufWeight(_nibbles(blocks[:, 6:], 16) | _fifths(blocks[:, 2:6]), 8, 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> GgufWeight:
    codes = _nibbles(blocks[:, 8:], 16) | _fifths(blocks[:, 4:8])
    return GgufWeight(codes, 8, 0, _half(blocks, 0), leasts=-_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> GgufWeight:
    return GgufWeight(blocks[:, 2:] ^ 128, 8, 128, _half(blocks, 0))


def _k_steps(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the steps of eight groups and their least steps, six bits each in twelve bytes [blocks, 12]."""
    first, second, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    steps = torch.cat((first & 63, both & 15 | first >> 2 & 48), dim=1)
    least_steps = torch.cat((second & 63, both >> 4 | second >> 2 & 48), dim=1)
    return steps.view(torch.int8), least_steps.view(torch.int8)


def _q4_k(blocks: torch.Tensor) -> GgufWeight:
    steps, least_steps = _k_steps(blocks[:, 4:16])
    return GgufWeight(_nibbles(blocks[:, 16:], 32), 4, 0, _half(blocks, 0), steps, _half(blocks, 2), least_steps)


def _q5_k(blocks: torch.Tensor) -> GgufWeight:
    steps, least_steps = _k_steps(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 1).flatten(1) << 4
    return GgufWeight(codes, 8, 0, _half(blocks, 0), steps, _half(blocks, 2), least_steps)


def _q6_k(blocks: torch.Tensor) -> GgufWeight:
    # Each half of a block has its lower four bits in 64 bytes, and its upper two in 32.
    upper = torch.cat([_bits(half, 2).flatten(1) for half in (blocks[:, 128:160], blocks[:, 160:192])], dim=1)
    codes = _nibbles(blocks[:, :128], 64) | upper << 4
    return GgufWeight(codes, 8, 32, _half(blocks, 208), blocks[:, 192:208].contiguous().view(torch.int8))


_UNPACK: dict[str, Callable[[torch.Tensor], GgufWeight]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip

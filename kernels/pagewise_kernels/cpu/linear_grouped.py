"""Linear layers on the CPU for float32 batches, with quantised weights of which groups of inputs share a scale.

``WeightInGroups`` computes weights of all such formats. ``GroupedWeight`` packs weights of GGUF files for it.
"""

import ctypes
from collections.abc import Sequence

import torch

from pagewise_kernels.cpu.library import WeightArguments, empty, load_library, threads
from pagewise_kernels.cpu.operations import check_input, in_panels

GROUPS = (16, 32)
"""The numbers of inputs that may share a step."""


class WeightInGroups:
    """The weight [outs, ins] of a linear layer in four or eight bits, of which groups of inputs share scales.

    ``kind``: INT4 or GROUPED of ``WeightArguments``. ``parts`` and ``numbers``: as ``grouped_weight_of`` in
    grouped_rows.c reads them; the last of ``parts`` is the bias float32 [outs] or None. ``factor``: of all scales.
    ``groups``, ``group``: the first two numbers, which are the number and the size of groups of the packed weight.

    Raises:
        ValueError: the bias is of another shape.
    """

    def __init__(
        self,
        kind: int,
        shape: torch.Size,
        parts: Sequence[torch.Tensor | None],
        numbers: tuple[int, ...],
        factor: float,
    ) -> None:
        self._library = load_library()
        self.outs, self.ins = shape
        if (bias := parts[-1]) is not None and bias.shape != shape[:1]:
            raise ValueError(f"a layer of {self.outs} outputs has no bias of shape {list(bias.shape)}")
        self.groups, self.group = numbers[:2]
        self._kept = parts  # while the structure points to them
        pointers = tuple(None if part is None else part.data_ptr() for part in parts)
        self._arguments = WeightArguments(kind, self.ins, self.outs, pointers, numbers, factor)

    @property
    def arguments(self) -> WeightArguments:
        """This weight as an argument of operations."""
        return self._arguments

    @property
    def num_bytes(self) -> int:
        """The memory of codes, scales, steps and zeros."""
        return sum(part.nbytes for part in self._kept if part is not None and part.dim() > 1)

    def linear(self, x: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
        """Map x [rows, ins] to [rows, outs].

        ``exact``: inputs stay in float32; otherwise they are rounded to eight bits, with a scale for each group.

        Raises:
            ValueError: x does not fit. TypeError: it is not float32 on the CPU.
        """
        rows = check_input(x, self.ins)
        out = empty((rows, self.outs), x.dtype)
        inputs = empty((rows, self.groups * self.group), torch.float32 if exact else torch.int8)
        scales, sums = x.new_empty(rows, self.groups), x.new_empty(rows, self.groups, dtype=torch.int32)
        self._library.pagewise_linear_grouped(
            x.data_ptr(), x.stride(0), ctypes.byref(self._arguments), out.data_ptr(), inputs.data_ptr(),
            scales.data_ptr(), sums.data_ptr(), exact, rows, threads(),
        )  # fmt: skip
        return out


class GroupedWeight(WeightInGroups):
    """The weight [outs, ins] and the bias [outs] of a linear layer, in the layout that the product reads.

    A weight is (code - ``zero``) · scale · step, or code · scale · step - least · least step. ``codes`` uint8
    [outs, ins]: of ``bits`` 4 or 8. ``scales`` and ``leasts`` float16 [outs, spans]. ``steps``, ``least_steps`` int8
    [outs, groups]: each for 16 or 32 neighbouring inputs; None: they are one, and the spans are the groups.

    Raises:
        ValueError: shapes do not fit, or there are leasts and a zero. TypeError: types do not fit.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        bits: int,
        zero: int,
        scales: torch.Tensor,
        steps: torch.Tensor | None = None,
        leasts: torch.Tensor | None = None,
        least_steps: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        ins, spans = codes.shape[1], scales.shape[1]
        groups = spans if steps is None else steps.shape[1]
        group, span = ins // max(1, groups), groups // max(1, spans)
        _check(codes, bits, (groups, group, span), scales, steps, leasts, least_steps)
        if leasts is not None and zero:
            raise ValueError(f"weights with leasts have codes from zero on, not from {zero}")
        self.bits = bits
        bytes_of = [None if part is None else part.view(torch.int8) for part in (steps, least_steps)]
        packed = [
            None if part is None else in_panels(part)
            for part in (_words(codes, bits), scales, bytes_of[0], leasts, bytes_of[1])
        ]
        packed.append(None if bias is None else bias.detach().float().contiguous())
        super().__init__(WeightArguments.GROUPED, codes.shape, packed, (groups, group, span, bits, zero), 1.0)


def _check(
    codes: torch.Tensor, bits: int, sizes: tuple[int, int, int], scales: torch.Tensor, *others: torch.Tensor | None
) -> None:
    (outs, ins), (groups, group, span), (steps, leasts, least_steps) = codes.shape, sizes, others
    types = [part.dtype for part in (scales, scales if leasts is None else leasts)]
    bytes_of = [part.dtype.itemsize for part in (codes, steps, least_steps) if part is not None]
    if types != [torch.float16] * 2 or {1} != set(bytes_of) or not codes.is_cpu or bits not in (4, 8):
        raise TypeError(f"weights have codes in bytes of 4 or 8 bits, and scales float16 on the CPU, not {types}")
    shapes = [(outs, groups)] * 2 + [(outs, scales.shape[1])] * 2
    found = [shape if part is None else tuple(part.shape)
             for part, shape in zip((steps, least_steps, scales, leasts), shapes, strict=True)]  # fmt: skip
    whole = group * groups == ins and span * scales.shape[1] == groups
    if found != shapes or group not in GROUPS or not whole:
        raise ValueError(f"codes of shape {list(codes.shape)} do not fit scales and steps of shapes {found}")


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of neighbouring inputs in words, int32 [outs, ins · bits / 32]; see ``grouped_rows.h``."""
    if bits == 4:
        placed = codes.view(len(codes), -1, 2, 4)
        codes = (placed[:, :, 0] | placed[:, :, 1] << 4).flatten(1)
    return codes.contiguous().view(torch.int32)

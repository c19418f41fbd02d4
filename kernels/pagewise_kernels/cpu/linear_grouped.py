"""Linear layers on the CPU whose weights have scales in two steps, as in GGUF files, for float32 batches."""

import torch

from pagewise_kernels.cpu.library import WeightArguments, empty, load_library, threads
from pagewise_kernels.cpu.operations import check_input, in_panels

GROUPS = (16, 32)
"""The numbers of inputs that may share a step."""


class GroupedWeight:
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
        self._library = load_library()
        self.outs, self.ins = codes.shape
        spans = scales.shape[1]
        self._groups = spans if steps is None else steps.shape[1]
        self.group, self._span = self.ins // max(1, self._groups), self._groups // max(1, spans)
        self._check(codes, bits, scales, steps, leasts, least_steps)
        if leasts is not None and zero:
            raise ValueError(f"weights with leasts have codes from zero on, not from {zero}")
        self.bits, self._zero = bits, zero
        self.packed = in_panels(_words(codes, bits))
        small = [None if part is None else in_panels(part.view(torch.int8)) for part in (steps, least_steps)]
        self.scales, self.steps = in_panels(scales), small[0]
        self.leasts, self.least_steps = None if leasts is None else in_panels(leasts), small[1]
        self.bias = None if bias is None else bias.detach().float().contiguous()
        parts = (self.packed, self.scales, self.steps, self.leasts, self.least_steps, self.bias)
        self._pointers = [None if part is None else part.data_ptr() for part in parts]

    def _check(self, codes: torch.Tensor, bits: int, scales: torch.Tensor, *others: torch.Tensor | None) -> None:
        steps, leasts, least_steps = others
        types = [part.dtype for part in (scales, scales if leasts is None else leasts)]
        bytes_of = [part.dtype.itemsize for part in (codes, steps, least_steps) if part is not None]
        if types != [torch.float16] * 2 or {1} != set(bytes_of) or not codes.is_cpu or bits not in (4, 8):
            raise TypeError(f"weights have codes in bytes of 4 or 8 bits, and scales float16 on the CPU, not {types}")
        shapes = [(self.outs, self._groups)] * 2 + [(self.outs, scales.shape[1])] * 2
        found = [shape if part is None else tuple(part.shape)
                 for part, shape in zip((steps, least_steps, scales, leasts), shapes, strict=True)]  # fmt: skip
        whole = self.group * self._groups == self.ins and self._span * scales.shape[1] == self._groups
        if found != shapes or self.group not in GROUPS or not whole:
            raise ValueError(f"codes of shape {list(codes.shape)} do not fit scales and steps of shapes {found}")

    @property
    def num_bytes(self) -> int:
        """The memory of codes, scales and steps."""
        parts = (self.packed, self.scales, self.steps, self.leasts, self.least_steps)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def arguments(self) -> WeightArguments:
        """This weight as an argument of ``pagewise_kernels.cpu.layer``."""
        return WeightArguments(
            3, self.ins, self.outs, tuple(self._pointers), (self._groups, self.group, self._span, self.bits, self._zero)
        )

    def linear(self, x: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
        """Map x [rows, ins] to [rows, outs].

        ``exact``: inputs stay in float32; otherwise they are rounded to eight bits, with a scale for each group.

        Raises:
            ValueError: x does not fit. TypeError: it is not float32 on the CPU.
        """
        rows = check_input(x, self.ins)
        out, inputs = empty((rows, self.outs), x.dtype), empty((0 if exact else rows, self.ins), torch.int8)
        scales, sums = x.new_empty(rows, self._groups), x.new_empty(rows, self._groups, dtype=torch.int32)
        self._library.pagewise_linear_grouped(
            x.data_ptr(), x.stride(0), *self._pointers, out.data_ptr(), inputs.data_ptr(), scales.data_ptr(),
            sums.data_ptr(), self.bits, self._zero, exact, rows, self._groups, self.group, self._span, self.outs,
            threads(),
        )  # fmt: skip
        return out


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of neighbouring inputs in words, int32 [outs, ins · bits / 32]; see ``grouped_rows.h``."""
    if bits == 4:
        placed = codes.view(len(codes), -1, 2, 4)
        codes = (placed[:, :, 0] | placed[:, :, 1] << 4).flatten(1)
    return codes.contiguous().view(torch.int32)

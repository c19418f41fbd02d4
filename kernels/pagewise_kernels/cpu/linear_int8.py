"""Linear layers on the CPU with weights in eight bits, for float32 batches of any size."""

import torch

from pagewise_kernels.cpu import huge_pages
from pagewise_kernels.cpu.library import WeightArguments, empty, load_library, threads
from pagewise_kernels.cpu.operations import check_input

MAX_INPUTS = 65_536
"""With more inputs, the sum of products of eight bits may not fit into 32."""

_AT_ONCE = 1 << 20
"""About how many weights are rounded at once, so that this takes little memory beside them."""


class Int8Weight:
    """The weight [outs, ins] and the bias [outs] of a linear layer, quantised and in the layout that the product reads.

    Each output has a scale of its own: its largest weight becomes 127 or -127. The inputs are quantised in the same way
    when the layer is computed, with a scale for each row.

    ``packed`` int8 [panels, groups, panel, group]: the outputs in panels, the inputs in groups, whose sizes depend on
    the processor. ``scales`` float32, ``offsets`` int32 [panels · panel]: see ``linear_int8.c``. ``squares``: the sum
    of the squares of all weights. ``squared_error``: the sum of the squares of their rounding errors.

    A weight that is quantised already is int8, and comes with the ``scales`` of its outputs, float32 [outs].

    Raises:
        TypeError: the weight is neither on the CPU. ValueError: it has more inputs than ``MAX_INPUTS``.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scales: torch.Tensor | None = None
    ) -> None:
        wanted = torch.float32 if scales is None else torch.int8
        if (weight.dim(), weight.dtype, weight.device.type) != (2, wanted, "cpu"):
            raise TypeError(f"weights are {wanted} [outs, ins] on the CPU, not {weight.dtype} {list(weight.shape)}")
        self._library = load_library()
        panel, group = self._library.pagewise_int8_panel(), self._library.pagewise_int8_group()
        self.outs, self.ins = weight.shape
        if self.ins > MAX_INPUTS:
            raise ValueError(
                f"{self.ins} inputs are too many for weights in eight bits, up to {MAX_INPUTS} are supported"
            )
        panels, self._groups, self._group = -(-self.outs // panel), -(-self.ins // group), group
        padded = torch.zeros(panels * panel, self._groups * group, dtype=torch.int8)
        self.scales = torch.ones(panels * panel)
        self.offsets = torch.zeros(panels * panel, dtype=torch.int32)
        self.squares = self.squared_error = 0.0
        rows = max(1, _AT_ONCE // max(1, self.ins))
        for start in range(0, self.outs, rows):
            part = slice(start, min(start + rows, self.outs))
            if scales is None:
                self._quantise(weight.detach()[part], padded[part], self.scales[part], self.offsets[part])
            else:
                padded[part, : self.ins] = weight[part]
                self.scales[part] = scales[part]
                self._offset(padded[part], self.offsets[part])
        self.packed = huge_pages.zeros((panels, self._groups, panel, group), torch.int8)
        self.packed.copy_(padded.view(panels, panel, self._groups, group).transpose(1, 2))
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._pointers = [tensor.data_ptr() for tensor in (self.packed, self.scales, self.offsets)]
        self._pointers.append(0 if self.bias is None else self.bias.data_ptr())

    def _quantise(
        self, weight: torch.Tensor, padded: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        """Write the outputs ``weight`` [outs, ins] to ``padded`` [outs, padded ins], ``scales``, ``offsets`` [outs]."""
        most = weight.abs().amax(dim=1)
        scales.copy_(torch.where(most > 0, most / 127, 1.0))
        exact = weight / scales[:, None]
        rounded = exact.round()
        padded[:, : self.ins] = rounded
        self._offset(padded, offsets)
        self.squares += float(torch.linalg.vector_norm(weight)) ** 2
        self.squared_error += float(torch.linalg.vector_norm(exact.sub_(rounded).mul_(scales[:, None]))) ** 2

    @staticmethod
    def _offset(padded: torch.Tensor, offsets: torch.Tensor) -> None:
        offsets.copy_(padded.sum(dim=1, dtype=torch.int32) * 128)

    @property
    def arguments(self) -> WeightArguments:
        """This weight as an argument of ``pagewise_kernels.cpu.layer``."""
        numbers = self._groups, self._group
        return WeightArguments(WeightArguments.INT8, self.ins, self.outs, tuple(self._pointers), numbers)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [rows, ins] to [rows, outs].

        Raises:
            ValueError: x does not fit. TypeError: it is not float32 on the CPU.
        """
        rows = check_input(x, self.ins)
        out, row_scales = empty((rows, self.outs), x.dtype), x.new_empty(rows)
        inputs = empty((rows, self._groups * self._group), torch.uint8)
        self._library.pagewise_linear_int8(
            x.data_ptr(), x.stride(0), *self._pointers, out.data_ptr(), inputs.data_ptr(), row_scales.data_ptr(),
            rows, self.ins, self.outs, threads(),
        )  # fmt: skip
        return out

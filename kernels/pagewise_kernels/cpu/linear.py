"""Linear layers on the CPU in float32, for batches of any size."""

import torch

from pagewise_kernels.cpu import huge_pages
from pagewise_kernels.cpu.library import empty, load_library, parallel_regions, threads
from pagewise_kernels.cpu.operations import check_cpu
from pagewise_kernels.shapes import check_tensors


class PackedWeight:
    """The weight [outs, ins] and the bias [outs] of a linear layer, in the layout that the product reads.

    ``packed`` [panels, ins, panel]: the outputs in panels of as many as the registers of this processor hold at once.

    Raises:
        TypeError: the weight is not float32 on the CPU.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.dim() != 2 or weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise TypeError(f"weights are float32 [outs, ins] on the CPU, not {weight.dtype} {list(weight.shape)}")
        self._library = load_library()
        panel = self._library.pagewise_panel()
        self.outs, self.ins = weight.shape
        whole, rest = divmod(self.outs, panel)
        self.packed = huge_pages.zeros((whole + (rest > 0), self.ins, panel), torch.float32)
        self.packed[:whole] = weight.detach()[: whole * panel].unflatten(0, (whole, panel)).transpose(1, 2)
        self.packed[whole:, :, :rest] = weight.detach()[whole * panel :].t()
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._pointers = self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr()

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [rows, ins] to [rows, outs].

        Raises:
            ValueError: x does not fit. TypeError: it is not float32 on the CPU.
        """
        check_tensors("the product", {"ins": self.ins}, x=(x, ("rows", "ins"), (torch.float32,)))
        check_cpu(x)
        rows = x.shape[0]
        out = empty((rows, self.outs), x.dtype)
        packed, bias = self._pointers
        self._library.pagewise_linear(
            x.data_ptr(), x.stride(0), packed, bias, out.data_ptr(), rows, self.ins, self.outs, threads(),
            parallel_regions(),
        )  # fmt: skip
        return out

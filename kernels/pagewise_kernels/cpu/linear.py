"""Linear layers on the CPU in float32, for batches of any size."""

import torch

from pagewise_kernels.cpu import huge_pages
from pagewise_kernels.cpu.library import empty, load_library, parallel_regions, threads


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
        if x.dim() != 2 or x.shape[1] != self.ins or x.stride(1) != 1:
            raise ValueError(f"the product takes contiguous rows of {self.ins}, not {list(x.shape)}")
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise TypeError(f"the product takes float32 on the CPU, not {x.dtype} on {x.device}")
        rows = x.shape[0]
        out = empty((rows, self.outs), x.dtype)
        packed, bias = self._pointers
        self._library.pagewise_linear(
            x.data_ptr(), x.stride(0), packed, bias, out.data_ptr(), rows, self.ins, self.outs, threads(),
            parallel_regions(),
        )  # fmt: skip
        return out

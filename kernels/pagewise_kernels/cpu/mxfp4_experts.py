"""Mixtures of experts with weights in MXFP4 on the CPU in float32, which ``mxfp4_experts`` computes on a GPU."""

import torch

from pagewise_kernels.cpu.experts import SortedExperts
from pagewise_kernels.cpu.library import load_library, threads
from pagewise_kernels.cpu.operations import in_panels
from pagewise_kernels.mxfp4 import Mxfp4Weights


class PackedMxfp4Experts(SortedExperts):
    """Experts of gpt-oss, whose weights stay in four bits, in panels of outputs.

    ``gate_up``: [experts, 2 · inner, hidden], where gate and up take turns. ``down``: [experts, hidden, inner]. Gates
    have at most the value ``limit``, ups at most this absolute value. ``alpha``: factor of the gate in its sigmoid.

    Raises:
        ValueError: shapes do not fit. TypeError: types do not.
    """

    def __init__(self, gate_up: Mxfp4Weights, down: Mxfp4Weights, limit: float, alpha: float) -> None:
        self._library = load_library()
        self.num_experts, self.hidden, self.inner = down.shape
        gate_up.check(self.num_experts, 2 * self.inner, self.hidden)
        down.check(self.num_experts, self.hidden, self.inner)
        apart = [tensor.unflatten(1, (self.inner, 2)).transpose(1, 2) for tensor in gate_up]
        self._packed = [*_packed(Mxfp4Weights(*apart)), *_packed(down)]
        self._pointers = [tensor.data_ptr() for tensor in self._packed]
        self._limit, self._alpha = limit, alpha

    def _compute(
        self,
        rows: torch.Tensor,
        activated: torch.Tensor,
        outs: torch.Tensor,
        active: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        self._library.pagewise_mxfp4_experts(
            rows.data_ptr(), active.data_ptr(), starts.data_ptr(), *self._pointers, self._limit, self._alpha,
            activated.data_ptr(), outs.data_ptr(), len(active), self.hidden, self.inner, threads(),
        )  # fmt: skip


def _packed(weights: Mxfp4Weights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, eight in an int32, and scales in panels, and the bias in float32, of weights [.., outs, ins]."""
    words = weights.blocks.contiguous().flatten(-2).view(torch.int32)
    return in_panels(words), in_panels(weights.scales), weights.bias.detach().float().contiguous()

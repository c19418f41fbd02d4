"""Mixtures of experts with weights in MXFP4 on the CPU in float32, which ``mxfp4_experts`` computes on a GPU."""

import torch

from pagewise_kernels.cpu.experts import Experts
from pagewise_kernels.cpu.library import empty, load_library, parallel_regions, threads
from pagewise_kernels.cpu.operations import in_panels
from pagewise_kernels.mxfp4 import Mxfp4Weights


class PackedMxfp4Experts(Experts):
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

    def _sums(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        pairs, order = chosen.numel(), chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().clamp(-1).add(1).bincount(minlength=self.num_experts + 1)
        if len(counts) > self.num_experts + 1 or counts[0]:
            return None
        active = counts[1:].nonzero()[:, 0]
        starts = counts[1:][active].cumsum(0)
        starts = torch.cat([starts.new_zeros(1), starts])
        rows, activated = x[order // chosen.shape[1]], empty((pairs, self.inner), x.dtype)
        outs = empty((pairs, self.hidden), x.dtype)
        self._library.pagewise_mxfp4_experts(
            rows.data_ptr(), active.data_ptr(), starts.data_ptr(), *self._pointers, self._limit, self._alpha,
            activated.data_ptr(), outs.data_ptr(), len(active), self.hidden, self.inner, threads(), parallel_regions(),
        )  # fmt: skip
        of_tokens = outs[order.argsort()].view(*chosen.shape, self.hidden)
        return (of_tokens * weights.to(x.dtype)[..., None]).sum(dim=1)


def _packed(weights: Mxfp4Weights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, eight in an int32, and scales in panels, and the bias in float32, of weights [.., outs, ins]."""
    words = weights.blocks.contiguous().flatten(-2).view(torch.int32)
    return in_panels(words), in_panels(weights.scales), weights.bias.detach().float().contiguous()

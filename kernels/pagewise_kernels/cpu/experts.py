"""Mixtures of experts on the CPU in float32, which ``pagewise_kernels.experts`` computes on a GPU."""

import torch

from pagewise_kernels.cpu.library import empty, load_library, parallel_regions, threads
from pagewise_kernels.cpu.operations import check_input, pack_panels


class PackedExperts:
    """The weights of gate and up [experts, 2 · inner, hidden] and of down [experts, hidden, inner] in panels.

    Raises:
        TypeError: the weights are not float32 on the CPU. ValueError: their shapes do not fit.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        if gate_up.dim() != 3 or down.dim() != 3 or gate_up.shape != (len(down), 2 * down.shape[2], down.shape[1]):
            raise ValueError(
                "experts have gate and up [experts, 2 * inner, hidden] and down [experts, hidden, inner], not "
                f"{list(gate_up.shape)} and {list(down.shape)}"
            )
        self._library = load_library()
        self.num_experts, self.hidden, self.inner = down.shape
        self.gate_up = pack_panels(gate_up.unflatten(1, (2, self.inner)))
        self.down = pack_panels(down)

    @property
    def num_weights(self) -> int:
        """The number of weights of all experts."""
        return 3 * self.num_experts * self.hidden * self.inner

    def sums(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums [tokens, hidden] of the outputs of the experts of each token, x [tokens, hidden].

        ``chosen`` int64 [tokens, k]: the experts. ``weights`` [tokens, k]: of their outputs.

        Raises:
            ValueError: shapes do not fit, or there is no such expert. TypeError: x is not float32 on the CPU.
        """
        tokens = check_input(x, self.hidden)
        if chosen.dim() != 2 or len(chosen) != tokens or weights.shape != chosen.shape:
            raise ValueError(
                f"the experts and weights of {tokens} tokens are [tokens, k], not {list(chosen.shape)} and "
                f"{list(weights.shape)}"
            )
        pairs, top_k = chosen.numel(), chosen.shape[1]
        chosen, weights = chosen.long().contiguous(), weights.float().contiguous()
        out = empty((tokens, self.hidden), x.dtype)
        rows, activated = empty((pairs, self.hidden), x.dtype), empty((pairs, self.inner), x.dtype)
        scratch = torch.empty(2 * self.num_experts + 1 + pairs, dtype=torch.int64)
        failed = self._library.pagewise_experts(
            x.data_ptr(), self.gate_up.data_ptr(), self.down.data_ptr(), weights.data_ptr(), x.stride(0),
            chosen.data_ptr(), scratch.data_ptr(), rows.data_ptr(), activated.data_ptr(), out.data_ptr(), tokens,
            top_k, self.num_experts, self.hidden, self.inner, threads(), parallel_regions(),
        )  # fmt: skip
        if failed:
            raise ValueError(f"tokens chose experts that are not among the {self.num_experts}")
        return out

"""The experts of gpt-oss with weights in MXFP4, which stay in four bits: by Triton, the CPU operations, or PyTorch."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from pagewise_kernels.mxfp4 import BLOCK, Mxfp4Weights
from torch import nn

from pagewise_executor.attention.registry import Kernels
from pagewise_executor.models.grouped_experts import sum_one_by_one

if TYPE_CHECKING:
    from pagewise_kernels.mxfp4_experts import PackedWeights

_LINEARS = "gate_up_proj", "down_proj"


class Mxfp4Experts(nn.Module):
    """Experts whose parameters have the names and types of the files.

    ``source``: the module of transformers that it replaces.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.limit, self.alpha = float(source.limit), float(source.alpha)
        for name in _LINEARS:
            experts, ins, outs = getattr(source, name).shape
            shapes = {"blocks": (outs, ins // BLOCK, BLOCK // 2), "scales": (outs, ins // BLOCK)}
            for part, shape in shapes.items():
                empty = torch.empty(experts, *shape, dtype=torch.uint8, device="meta")
                self.register_parameter(f"{name}_{part}", nn.Parameter(empty, requires_grad=False))
            self.register_parameter(f"{name}_bias", getattr(source, f"{name}_bias"))

    def weights(self) -> tuple[Mxfp4Weights, Mxfp4Weights]:
        """Return the weights of gate and up, whose outputs take turns, and the weights of down."""
        gate_up, down = (
            Mxfp4Weights(*(getattr(self, f"{name}_{part}").detach() for part in ("blocks", "scales", "bias")))
            for name in _LINEARS
        )
        return gate_up, down

    def check(self) -> None:
        """Check the scales, after they have been read.

        Raises:
            ValueError: a weight may not be finite in the type of the model.
        """
        for weights in self.weights():
            if 6.0 * 2.0 ** (int(weights.scales.max()) - 127) > torch.finfo(weights.bias.dtype).max:
                raise ValueError(f"experts in MXFP4 have weights that are not finite in {weights.bias.dtype}")

    def forward(self, x: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums [tokens, hidden] of the outputs of the experts [tokens, k] of each token of x."""
        return sum_of_dequantised(*self.weights(), self.limit, self.alpha, x, router_indices, routing_weights)


def sum_of_dequantised(
    gate_up: "Mxfp4Weights | PackedWeights",
    down: "Mxfp4Weights | PackedWeights",
    limit: float,
    alpha: float,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sums [tokens, hidden] of such experts by PyTorch, which dequantises one after the other."""

    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        both = F.linear(rows, gate_up.dequantised(expert, x.dtype), gate_up.bias[expert])
        gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
        made = (up + 1) * (gate * torch.sigmoid(gate * alpha))
        return F.linear(made, down.dequantised(expert, x.dtype), down.bias[expert])

    return sum_one_by_one(compute, len(down.bias), x, chosen, weights)


class TritonMxfp4Experts(nn.Module):
    """Such experts by Triton kernels.

    Raises:
        ValueError: scales are larger than 2.
    """

    def __init__(self, gate_up: Mxfp4Weights, down: Mxfp4Weights, limit: float, alpha: float) -> None:
        from pagewise_kernels.mxfp4_experts import pack

        super().__init__()
        self.limit, self.alpha = limit, alpha
        self.gate_up, self.down = pack(gate_up), pack(down)

    def forward(self, x: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums [tokens, hidden] of the outputs of the experts [tokens, k] of each token of x."""
        from pagewise_kernels.mxfp4_experts import sum_of_mxfp4_experts

        return sum_of_mxfp4_experts(
            x, self.gate_up, self.down, router_indices.int(), routing_weights, limit=self.limit, alpha=self.alpha
        )


class CpuMxfp4Experts(nn.Module):
    """Such experts by the CPU operations, in float32."""

    def __init__(self, gate_up: Mxfp4Weights, down: Mxfp4Weights, limit: float, alpha: float) -> None:
        from pagewise_kernels.cpu.mxfp4_experts import PackedMxfp4Experts

        super().__init__()
        self.packed = PackedMxfp4Experts(gate_up, down, limit, alpha)

    def forward(self, x: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums [tokens, hidden] of the outputs of the experts [tokens, k] of each token of x."""
        return self.packed.sums(x.float(), router_indices, routing_weights).to(x.dtype)


def place_mxfp4(model: nn.Module) -> None:
    """Replace the experts of a gpt-oss by such experts without data."""
    for name, module in list(model.named_modules()):
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            model.set_submodule(name, Mxfp4Experts(module))


def make_mxfp4_fast(model: nn.Module, kernels: Kernels, within: str) -> None:
    """Give such experts within a part of a model, which have been read, the form that these kernels compute.

    Raises:
        ValueError: a weight may not be finite in the type of the model, or scales are too large for the kernels.
    """
    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        if isinstance(module, Mxfp4Experts):
            module.check()
            if kernels != "torch":
                kind = TritonMxfp4Experts if kernels == "triton" else CpuMxfp4Experts
                model.set_submodule(name, kind(*module.weights(), module.limit, module.alpha))

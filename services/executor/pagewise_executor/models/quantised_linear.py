"""Linear layers whose weights stay in eight bits in memory: FP8 or int8, of a checkpoint or quantised while loading.

The layout of weights and their scales is explicit, so that scales are divided among ranks with the weights.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pagewise_executor.attention.registry import Kernels
from pagewise_executor.models import four_bit_weight, gguf_weight
from pagewise_executor.models.four_bit_checkpoint import NVFP4_GROUP
from pagewise_executor.models.four_bit_linear import CpuFourBitExperts, FourBitLinear, TritonInt4Linear
from pagewise_executor.models.four_bit_weight import FourBitWeight
from pagewise_executor.models.gguf_weight import GgufWeight
from pagewise_executor.models.packed_linear import GroupedLinear, Int4Linear, Int8Linear, is_conv1d, is_quantised
from pagewise_executor.models.quantised_weight import (
    FP8,
    Inputs,
    QuantisedWeight,
    join_outputs,
    quantise,
    quantise_inputs,
)
from pagewise_executor.models.skinny_linear import FEW_ROWS, RoundedRows, Rows

log = logging.getLogger(__name__)

_ROW_WISE = nn.functional.ScalingType.RowWise


class QuantisedLinear(nn.Module):
    """A linear layer with a weight in eight bits, in plain PyTorch: correct on every device, and slow.

    ``values``, ``scales``, ``block``: the fields of ``QuantisedWeight``. ``inputs``: how inputs are rounded;
    ``static_scale`` float32 [1]: their scale, if the checkpoint has it. ``weight`` [out, in] has the shape and the type
    of the rest of the model, but no data. ``inputs_dropped``: inputs should be rounded, and cannot be here.
    """

    inputs_dropped = False

    def __init__(
        self,
        weight: QuantisedWeight,
        inputs: Inputs,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        static_scale: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.values, self.scales, self.block = nn.Buffer(weight.values), nn.Buffer(weight.scales), weight.block
        self.inputs = inputs
        self.bias = None if bias is None else nn.Buffer(bias.detach())
        self.static_scale = None if static_scale is None else nn.Buffer(static_scale)
        self.weight = torch.empty(weight.values.shape, dtype=dtype, device="meta")

    @property
    def quantised(self) -> QuantisedWeight:
        """The weight, to be joined or cut."""
        return QuantisedWeight(self.values, self.scales, self.block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., in] to [.., out]."""
        return self.compute(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], len(self.values))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Map rows [rows, in] to [rows, out]."""
        rounded = x.float()
        if self.inputs.quantised:
            values, scales = quantise_inputs(x, self.values.dtype, self.inputs, self.static_scale)
            rounded = values * scales
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(rounded, self.quantised.dequantised(), bias).to(x.dtype)


class TritonQuantisedLinear(QuantisedLinear):
    """A linear layer in eight bits by two Triton kernels: one quantises the inputs, one multiplies."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Map rows [rows, in] to [rows, out]."""
        from pagewise_kernels.quantised import quantise_rows, scaled_linear

        group = self.inputs.group
        if not self.inputs.quantised:
            return scaled_linear(x, None, self.values, self.scales, self.block, self.bias)
        values, scales = quantise_rows(
            x, self.values.dtype, group=group, static_scale=self.static_scale, ue8m0=self.inputs.ue8m0
        )
        return scaled_linear(
            values, scales, self.values, self.scales, self.block, self.bias, group=group, dtype=x.dtype
        )


class ScaledMMLinear(QuantisedLinear):
    """A linear layer by ``torch.nn.functional.scaled_mm``, for FP8 with a scale per output and per row; up to
    ``few_rows`` rows by the kernel for few rows."""

    few_rows = 0

    def __init__(self, weight: QuantisedWeight, *arguments: Any) -> None:
        super().__init__(weight.with_block((1, weight.block[1])), *arguments)
        self.column_scales = nn.Buffer(self.scales.t().contiguous())

    def forward(self, x: Rows) -> torch.Tensor:
        """Map [.., in] to [.., out]."""
        return self.compute(x) if isinstance(x, RoundedRows) else super().forward(x)

    def compute(self, x: Rows) -> torch.Tensor:
        """Map rows [rows, in] to [rows, out]; they may be rounded already."""
        if len(x) <= self.few_rows:
            return self._by_few_rows(x, gated=False)
        rounded = self._rounded(x)
        values, scales, dtype = rounded.values, rounded.scales[:, None], rounded.dtype
        weight, of_weight = self.values.t(), self.column_scales
        return nn.functional.scaled_mm(
            values, weight, scales, _ROW_WISE, of_weight, _ROW_WISE, bias=self.bias, output_dtype=dtype
        )

    def gated(self, x: Rows) -> torch.Tensor:
        """Map up to ``few_rows`` rows [rows, in] to silu(gate) · up, where the first half of the outputs are gates."""
        return self._by_few_rows(x, gated=True)

    def _by_few_rows(self, x: Rows, *, gated: bool) -> torch.Tensor:
        from pagewise_kernels.skinny_linear import MOST_ROUNDED_ROWS, skinny_linear

        weight, bias, weight_scales = self.values, self.bias, self.column_scales[0]
        if isinstance(x, torch.Tensor) and len(x) <= MOST_ROUNDED_ROWS and self.static_scale is None:
            return skinny_linear(x, weight, bias, weight_scales=weight_scales, gated=gated)
        rounded = self._rounded(x)
        return skinny_linear(
            rounded.values, weight, bias,
            x_scales=rounded.scales, weight_scales=weight_scales, gated=gated, dtype=rounded.dtype,
        )  # fmt: skip

    def _rounded(self, x: Rows) -> RoundedRows:
        from pagewise_kernels.quantised import quantise_rows

        if isinstance(x, RoundedRows):
            return x
        values, scales = quantise_rows(x, FP8, static_scale=self.static_scale)
        return RoundedRows(values, scales[:, 0], x.dtype)


class JoinedLinear(nn.Module):
    """Linear layers of the same inputs that cannot become one, because their weights are of different kinds."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)
        first: torch.Tensor = linears[0].weight  # type: ignore[assignment]
        outs = sum(len(linear.weight) for linear in linears)  # type: ignore[arg-type, misc]
        self.weight = torch.empty(outs, first.shape[1], dtype=first.dtype, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., in] to [.., out]."""
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


def join_linears(linears: Sequence[nn.Module]) -> nn.Module:
    """Return one linear layer whose output is the concatenated output of ``linears``, some of which are quantised.

    Of different static scales of inputs the largest one is used, so that no input is clipped that was not before.
    """
    linears = _join_four_bits(linears)
    if len(linears) == 1:
        return linears[0]
    quantised = [linear for linear in linears if isinstance(linear, QuantisedLinear)]
    kinds = {(linear.values.dtype, linear.inputs, linear.bias is None) for linear in quantised}
    if len(quantised) < len(linears) or len(kinds) > 1:
        return JoinedLinear(linears)
    first = quantised[0]
    static: list[torch.Tensor] = [linear.static_scale for linear in quantised if linear.static_scale is not None]
    bias: list[torch.Tensor] = [linear.bias for linear in quantised if linear.bias is not None]
    return QuantisedLinear(
        join_outputs([linear.quantised for linear in quantised]),
        first.inputs,
        first.weight.dtype,
        torch.cat(bias) if bias else None,
        torch.stack(static).amax(dim=0) if static else None,
    )


def _join_four_bits(linears: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers, with one layer for neighbours in four bits or of a GGUF file whose weights can be joined."""
    found: list[nn.Module] = []
    for linear in linears:
        last = found[-1] if found else None
        if isinstance(last, FourBitLinear) and isinstance(linear, FourBitLinear):
            weights = last.quantised, linear.quantised
            biases: list[torch.Tensor] = [bias for bias in (last.bias, linear.bias) if bias is not None]
            four = [weight for weight in weights if isinstance(weight, FourBitWeight)]
            of_gguf = [weight for weight in weights if isinstance(weight, GgufWeight)]
            joined: FourBitWeight | GgufWeight | None = None
            if len(biases) != 1 and not (four and of_gguf):
                joined = four_bit_weight.join_outputs(four) if four else gguf_weight.join_outputs(of_gguf)
            if joined is not None:
                found[-1] = FourBitLinear(joined, torch.cat(biases) if biases else None)
                continue
        found.append(linear)
    return found


def quantise_linears(model: nn.Module, dtype: torch.dtype, within: str) -> int:
    """Replace the linear layers within a part of a model by quantised ones; return how many.

    ``dtype``: float8_e4m3fn or int8. Weights get a scale per output, inputs one per row.
    """
    count = 0
    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        if is_quantised(module):
            weight, bias = module.weight, module.bias
            assert isinstance(weight, torch.Tensor)
            assert bias is None or isinstance(bias, torch.Tensor)
            made = quantise(weight.detach().t() if is_conv1d(module) else weight.detach(), dtype)
            model.set_submodule(name, QuantisedLinear(made, Inputs(), weight.dtype, bias))
            count += 1
    return count


def quantise_in_four_bits(model: nn.Module, within: str) -> None:
    """Replace the linear layers within a part of a model by layers in four bits, for ``make_fast``."""
    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        if is_quantised(module):
            weight, bias = module.weight.detach(), module.bias
            made, _ = four_bit_weight.quantise(weight.t() if is_conv1d(module) else weight)
            model.set_submodule(name, FourBitLinear(made, bias))


def make_fast(model: nn.Module, kernels: Kernels, device: torch.device, within: str) -> None:
    """Replace the quantised linear layers within a part of a model by the fastest form that these kernels have.

    Raises:
        ValueError: the kernels do not compute weights in four bits, or a scale is not finite in the type of the model.
    """
    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        if type(module) is QuantisedLinear:
            model.set_submodule(name, _fast(module, kernels, device))
        elif isinstance(module, FourBitLinear):
            model.set_submodule(name, _fast_four_bits(module, kernels, device, next(model.parameters()).dtype))


def _fast_four_bits(module: FourBitLinear, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> nn.Module:
    weight = module.quantised
    if isinstance(weight, GgufWeight):
        return GroupedLinear(weight, module.bias)
    if weight.unit is not None and (kernels == "triton" or device.type != "cpu"):
        own = QuantisedLinear(_in_eight_bits(weight), Inputs(quantised=False), dtype, module.bias)
        return _fast(own, kernels, device)
    if kernels == "triton":
        return TritonInt4Linear(weight, module.bias, dtype)
    if device.type != "cpu":
        raise ValueError(f"on {device} weights in four bits need the Triton kernels, which cannot compute this model")
    return Int4Linear(weight, module.bias)


def _in_eight_bits(weight: FourBitWeight) -> QuantisedWeight:
    """Return the same weight as a weight in int8: the doubles of numbers in e2m1 are whole."""
    starts = weight.group_of[::NVFP4_GROUP]
    aligned = torch.equal(starts.repeat_interleave(NVFP4_GROUP)[: len(weight.group_of)], weight.group_of)
    size = NVFP4_GROUP if aligned else 1  # a part of a rank may begin within a group
    scales = (weight.scales / 2)[:, weight.group_of[::size].to(weight.scales.device)]
    return QuantisedWeight(weight.doubled(), scales.contiguous(), (1, size))


def _fast(module: QuantisedLinear, kernels: Kernels, device: torch.device) -> nn.Module:
    weight, inputs, dtype = module.quantised, module.inputs, module.weight.dtype
    if kernels == "cpu" and _fits_cpu(module):
        scales = weight.with_block((1, weight.block[1])).scales[:, 0]
        return Int8Linear(module.values, module.bias, scales)
    if kernels != "triton":
        return module
    from pagewise_kernels.launch import capability
    from pagewise_kernels.quantised import computable

    if weight.values.dtype == FP8 and capability(device) < 89:
        inputs = Inputs(quantised=False)
    if not computable(weight.values.shape[1], weight.block[1], inputs.group, quantised=inputs.quantised):
        return module
    scaled_mm = all((
        capability(device) >= 90, inputs.quantised, weight.values.dtype == FP8, dtype == torch.bfloat16,
        module.scales.shape[1] == 1, inputs.group is None, math.gcd(16, *weight.values.shape) == 16,
    ))  # fmt: skip
    kind: type[TritonQuantisedLinear] | type[ScaledMMLinear] = ScaledMMLinear if scaled_mm else TritonQuantisedLinear
    fast = kind(weight, inputs, dtype, module.bias, module.static_scale if inputs.static else None)
    fast.inputs_dropped = inputs != module.inputs
    if isinstance(fast, ScaledMMLinear):
        fast.few_rows = FEW_ROWS
    return fast


def _fits_cpu(module: QuantisedLinear) -> bool:
    """Return whether ``Int8Linear`` computes the layer: int8 with a scale per output, and inputs with one per row."""
    from pagewise_kernels.cpu.linear_int8 import MAX_INPUTS

    return (
        module.values.dtype == torch.int8
        and module.inputs == Inputs()
        and module.scales.shape[1] == 1
        and module.weight.dtype == torch.float32
        and module.values.shape[1] <= MAX_INPUTS
    )


def has_exact_inputs(model: nn.Module) -> bool:
    """Return whether a layer of the model does not round its inputs though the checkpoint asks for it."""
    return any(getattr(module, "inputs_dropped", False) for module in model.modules())


def report(model: nn.Module, asked: bool) -> bool:
    """Log how many weights are in eight and in four bits, and in which layers; return whether PyTorch computes any.

    ``asked``: an option asks for quantised weights, so the line is a warning if most of them are not.
    """
    kinds = QuantisedLinear | Int8Linear | GroupedLinear | _FourBits
    linears = [module for module in model.modules() if isinstance(module, kinds)]
    if not linears:
        return False
    ways, kept = Counter(_WAYS[type(linear)] for linear in linears), _kept(model)
    sizes = Counter[str]()
    for linear in linears:
        size = linear.weight.numel()
        four = size * (linear.packed.bits == 4 if isinstance(linear, GroupedLinear) else isinstance(linear, _FourBits))
        if isinstance(linear, CpuFourBitExperts):
            four = linear.packed.in_four_bits
        sizes += Counter({"four bits": four, "eight bits": size - four})
    log.log(
        logging.WARNING if asked and sizes.total() < kept.total() else logging.INFO,
        "%s (%s)%s; %s weights stay in %s: %s%s",
        ", ".join(f"{_millions(size)} weights are in {bits}" for bits, size in sizes.most_common()),
        ", ".join(f"{count} {way}" for way, count in ways.most_common()),
        _change(linears), _millions(kept.total()), str(next(model.parameters()).dtype).removeprefix("torch."),
        ", ".join(f"{kind} {_millions(count)}" for kind, count in kept.most_common(3)),
        "; inputs of layers stay as they are, because this GPU has no FP8" * has_exact_inputs(model),
    )  # fmt: skip
    if plain := _WAYS[QuantisedLinear] in ways:
        log.warning(
            "PyTorch computes linear layers with weights in eight bits here, which is slower than with the weights in "
            "float32: FP8 needs a GPU; on the CPU, --quantization int8 and int8 checkpoints in float32 are fast"
        )
    return plain


def _kept(model: nn.Module) -> Counter[str]:
    """Return the number of weights that are not quantised, by the class that has them."""
    from pagewise_executor.models.cpu_mixtures import CpuExperts, CpuRouter

    kept = Counter[str]()
    for module in model.modules():
        kept[type(module).__name__.lstrip("_")] += sum(weight.numel() for weight in module.parameters(recurse=False))
        if isinstance(module, CpuExperts | CpuRouter):
            kept[type(module).__name__] += module.packed.num_weights
    return kept


def _change(linears: Sequence[nn.Module]) -> str:
    """Return how much rounding has changed weights, where they were rounded while they were loaded."""
    rounded = Int8Linear | Int4Linear | CpuFourBitExperts
    rounding = [linear.rounding for linear in linears if isinstance(linear, rounded)]
    if not (squares := sum(one for one, _ in rounding)):
        return ""
    change = 100 * math.sqrt(sum(error for _, error in rounding) / squares)
    where = "docs/quantization.md says how that changes the tokens of the demo model"
    return f", which changes them by {change:.2f}% (root mean square; {where})"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count}"


_FourBits = Int4Linear | TritonInt4Linear | CpuFourBitExperts
_WAYS = {
    QuantisedLinear: "linear layers by PyTorch",
    TritonQuantisedLinear: "linear layers by Triton",
    ScaledMMLinear: "linear layers by scaled_mm of PyTorch",
    Int8Linear: "linear layers by the CPU operations",
    TritonInt4Linear: "linear layers by Triton",
    Int4Linear: "linear layers by the CPU operations",
    GroupedLinear: "linear layers by the CPU operations",
    CpuFourBitExperts: "layers of experts by the CPU operations",
}

"""Linear layers for the CPU: weights in the layout of oneDNN or of the CPU operations, or in eight or four bits.

PyTorch passes a plain weight to MKL or reorders it on every call; for the few rows of a decode step, either costs more
than the product. With weights that are reordered once, a small batch is several times faster (the numbers are in
``docs/performance.md``).
"""

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from pagewise_executor.attention.registry import Kernels
from pagewise_executor.models.four_bit_weight import FourBitWeight, Rounding, round_alone
from pagewise_executor.models.gguf_weight import GgufWeight

if TYPE_CHECKING:
    from pagewise_kernels.cpu.linear_grouped import GroupedWeight
    from pagewise_kernels.cpu.linear_int4 import Int4Weight
    from pagewise_kernels.cpu.linear_int8 import Int8Weight
    from pagewise_kernels.cpu.operations import PackedWeight

log = logging.getLogger(__name__)

TORCH_VERSIONS = ((2, 11), (2, 15))
"""The first and the last PyTorch with which ``PackedLinear`` was tested. No public function reorders a weight:
``torch.utils.mkldnn`` does so for convolutions only, which take longer."""
_ROWS = 32  # the batch size that the layout is made for; others work as well
_TYPES = (torch.float32, torch.bfloat16)

Quantization = Literal["none", "int8", "int4", "fp8"]
"""The values of the option."""


class PackedLinear(nn.Module):
    """A linear layer for inference on the CPU. ``weight`` [out, in] gives its type and shape, but has no data."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self.bias = None if bias is None else bias.detach()
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., in] to [.., out]."""
        rows = x.numel() // x.shape[-1]
        more = rounded_rows(rows) - rows
        flat = x.reshape(rows, x.shape[-1])
        if more:
            flat = nn.functional.pad(flat, (0, 0, 0, more))
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(flat, self.packed, self.bias, "none", [], "")
        return result[:rows].view(*x.shape[:-1], result.shape[-1])


def rounded_rows(rows: int) -> int:
    """Return how many rows oneDNN computes for a batch of ``rows``: up to an eighth more.

    oneDNN compiles a kernel for every number of rows that it meets, which takes milliseconds of CPU time and hundreds
    of kilobytes of memory for each shape of a layer, and keeps about a thousand. Batches come with any number of rows,
    so an executor would grow for hours. With rounded numbers there are eight for each power of two.
    """
    return -(-rows // (step := 1 << max(0, (rows - 1).bit_length() - 4))) * step


class CpuLinear(nn.Module):
    """A linear layer by the CPU operations, in float32."""

    packed: "PackedWeight | Int8Weight | Int4Weight | GroupedWeight"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        from pagewise_kernels.cpu.operations import PackedWeight

        super().__init__()
        self.packed = PackedWeight(weight, bias)
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., in] to [.., out]."""
        if x.dim() == 2:
            return self.packed.linear(x)
        return self.packed.linear(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], self.packed.outs)


class Int8Linear(CpuLinear):
    """A linear layer by the CPU operations in eight bits. An int8 ``weight`` comes with ``scales`` [out].

    ``rounding``: the sums of the squares of the weights and of their rounding errors; zeros if they were int8.
    """

    packed: "Int8Weight"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor | None = None) -> None:
        from pagewise_kernels.cpu.linear_int8 import Int8Weight

        nn.Module.__init__(self)
        self.packed = Int8Weight(weight, bias, scales)
        self.rounding = self.packed.squares, self.packed.squared_error
        self.weight = torch.empty(weight.shape, device="meta")


class Int4Linear(CpuLinear):
    """A linear layer by the CPU operations in four bits, whose inputs are rounded to eight bits by group.

    ``rounding``: as of ``Int8Linear``.
    """

    packed: "Int4Weight"

    def __init__(
        self, weight: FourBitWeight, bias: torch.Tensor | None, rounding: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        from pagewise_kernels.cpu.linear_int4 import Int4Weight

        nn.Module.__init__(self)
        self.packed = Int4Weight(weight.codes, weight.scales, weight.zeros, weight.group_of, bias, weight.unit)
        self.rounding = rounding
        self.weight = torch.empty(weight.codes.shape, device="meta")

    @classmethod
    def of(cls, module: nn.Module, rounding: Rounding, weight: torch.Tensor, bias: torch.Tensor | None) -> "Int4Linear":
        """Quantise the weight float32 [out, in] of a linear layer."""
        given = weight.detach()
        made, error = rounding(module, given)
        return cls(made, bias, (float(torch.linalg.vector_norm(given)) ** 2, error))


class GroupedLinear(CpuLinear):
    """A linear layer of a GGUF file by the CPU operations, whose inputs are rounded to eight bits by group."""

    packed: "GroupedWeight"

    def __init__(self, weight: GgufWeight, bias: torch.Tensor | None) -> None:
        from pagewise_kernels.cpu.linear_grouped import GroupedWeight

        nn.Module.__init__(self)
        self.packed = GroupedWeight(
            weight.codes, weight.bits, weight.zero, weight.scales, weight.steps, weight.leasts, weight.least_steps, bias
        )
        self.weight = torch.empty(weight.codes.shape, device="meta")


def pack_linears(
    model: nn.Module,
    kernels: Kernels,
    quantization: Quantization = "none",
    within: str = "",
    rounding: Rounding = round_alone,
) -> int:
    """Replace the linear layers of a model on the CPU by packed ones; return how many.

    With ``int8`` they are ``Int8Linear``, with ``int4`` ``Int4Linear``, in a model in float32. Otherwise they are
    ``CpuLinear`` in float32 models on the CPU operations, where these are as fast as oneDNN, or else ``PackedLinear``
    if oneDNN is available.

    ``within``: the name of a part of ``model``; empty: all of it. ``rounding``: to four bits.

    Raises:
        ValueError: a layer has too many inputs for weights in eight bits.
    """
    kind = _kind_of_packed(kernels)
    count = 0
    for name, module in list(model.get_submodule(within).named_modules(prefix=within, remove_duplicate=False)):
        transposed = is_conv1d(module)
        if type(module) is not nn.Linear and not transposed:
            continue
        weight, bias = module.weight, module.bias
        assert isinstance(weight, torch.Tensor)
        own: dict[Quantization, Callable[..., nn.Module]]
        own = {"int8": Int8Linear, "int4": functools.partial(Int4Linear.of, module, rounding)}
        quantised = own.get(quantization)
        replaced = kind(weight) if quantised is None else quantised if is_quantised(module) else None
        if replaced is not None:
            model.set_submodule(name, replaced(weight.t() if transposed else weight, bias))
            count += 1
    return count


def _kind_of_packed(kernels: Kernels) -> Callable[[torch.Tensor], type[nn.Module] | None]:
    """Return a function from a weight to the class that packs it; None: its linear layer stays as it is."""
    own = False
    if kernels == "cpu":
        from pagewise_kernels.cpu.library import has_fast_products

        own = has_fast_products()

    def kind(weight: torch.Tensor) -> type[nn.Module] | None:
        if own and weight.dtype == torch.float32:
            return CpuLinear
        return PackedLinear if weight.dtype in _TYPES and _packs(weight.dtype) else None

    return kind


@functools.cache
def _packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this type here. Without AVX-512 it packs none in bfloat16."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not TORCH_VERSIONS[0] <= version <= TORCH_VERSIONS[1]:
        log.warning(
            "PyTorch computes linear layers of %s, which is slower: the order of oneDNN's weights was tested with "
            "PyTorch %d.%d to %d.%d, not %d.%d", dtype, *TORCH_VERSIONS[0], *TORCH_VERSIONS[1], *version,
        )  # fmt: skip
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        PackedLinear(torch.zeros(16, 16, dtype=dtype), None)(torch.zeros(1, 16, dtype=dtype))
    except RuntimeError as error:
        log.info("PyTorch computes linear layers of %s: oneDNN does not pack their weights (%s)", dtype, error)
        return False
    return True


def is_conv1d(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D, a linear layer with transposed weights, without importing it."""
    return type(module).__module__.startswith("transformers.") and type(module).__name__ == "Conv1D"


def is_layer(part: str) -> bool:
    """Return whether a part of a model is a decoder layer, given its name."""
    return part.rpartition(".")[2].isdecimal()


def quantisation_of(part: str, quantization: Quantization) -> Quantization:
    """Return how linear layers of a part of a model are quantised, given its name.

    Those of decoder layers are as the option says. The head, where rounding changes tokens more, has eight bits with
    ``int4``, and stays as it is with ``fp8``.
    """
    if is_layer(part):
        return quantization
    of_head: dict[Quantization, Quantization] = {"int4": "int8", "fp8": "none"}
    return of_head.get(quantization, quantization)


def is_quantised(module: nn.Module) -> bool:
    """Return whether ``--quantization`` brings the weight of a module into fewer bits.

    Those of linear layers go, and not the experts of mixtures, which are no linear layers. A layer with one output or
    one input stays as it is: it takes little memory, and gates whole layers, such as the shared expert of Qwen2-MoE.
    """
    if type(module) is not nn.Linear and not is_conv1d(module):
        return False
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return 1 not in weight.shape

"""Measures at the start of an executor up to how many tokens the kernel for few rows computes a product.

For few tokens a product takes as long as its weights take to read, and the library's kernels reach different shares of
the memory's bandwidth for different shapes. The kernel also computes the activation behind gate and up, and saves a
launch. Only a measurement on the device decides which one is faster. CUDA graphs are timed, because decode steps run as
graphs; each graph keeps the choice for its size.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from pagewise_executor.devices import median_milliseconds
from pagewise_executor.graph_capture import captured
from pagewise_executor.models.fused import FusedDecoderLayer
from pagewise_executor.models.operations import TritonOperations
from pagewise_executor.models.quantised_linear import ScaledMMLinear
from pagewise_executor.models.quantised_weight import FP8
from pagewise_executor.models.skinny_linear import FEW_ROWS, RoundedRows, Rows, SkinnyLinear

log = logging.getLogger(__name__)

_PRODUCTS = ("qkv", "out", "gate_up", "down")
"""The linear layers of a decoder layer."""
_ROWS = (1, 16, 32, 64, 128, 256)
"""Sizes of batches. The kernel has one tile for up to 16 rows, one for up to 64, and one for more."""
_REPEATS = 7

Product = SkinnyLinear | ScaledMMLinear
Time = Callable[[Callable[[], None]], float]
"""Measures a call."""


def make_skinny(model: nn.Module, within: str) -> None:
    """Give the linear layers in 16 bits of fused decoder layers within a part of a model the kernel for few rows.

    Where kernels are interpreted, layers in 32 bits get it too. Until ``few_rows`` is set, it computes gate and up
    alone: for the other products PyTorch is faster.
    """
    from pagewise_kernels.launch import interpreted

    for layer in model.get_submodule(within).modules():
        if isinstance(layer, FusedDecoderLayer):
            for name in _PRODUCTS:
                linear = getattr(layer, name, None)  # a mixture of experts has none of its own
                if type(linear) is nn.Linear and (linear.weight.dtype.itemsize == 2 or interpreted()):
                    made = SkinnyLinear.of(linear)
                    if name == "gate_up":
                        made.few_rows = FEW_ROWS
                    setattr(layer, name, made)


@torch.inference_mode()
def choose_few_rows(model: nn.Module, operations: TritonOperations | None = None, time: Time | None = None) -> None:
    """Set ``few_rows`` of each product to the largest batch up to which the kernel is not slower than the library.

    The products of all layers are computed one after the other, so that weights come from memory as they do in a step.
    ``time``: measures a call; None: by replays of a CUDA graph. If a measurement fails, the library computes all
    products, with a warning in the log.
    """
    groups: dict[tuple[str, type, torch.Size], list[Product]] = {}
    for layer in model.modules():
        if isinstance(layer, FusedDecoderLayer):
            for name in _PRODUCTS:
                product = getattr(layer, name, None)
                if isinstance(product, Product):
                    groups.setdefault((name, type(product), product.weight.shape), []).append(product)
    for (name, _, shape), products in groups.items():
        try:
            operations = operations or TritonOperations()
            most = _most_rows(products, name, operations, time or graph_milliseconds)
        except Exception as error:  # torch, Triton and the device raise many kinds
            most = 0
            log.warning("the library computes all products of %s: they could not be measured (%s)", name, error)
        _set(products, most)
        log.info("%s of %d · %d: the kernel for few rows computes up to %d tokens", name, *shape, most)


def _most_rows(products: Sequence[Product], name: str, operations: TritonOperations, time: Time) -> int:
    most = 0
    gated, after_norm = name == "gate_up", name in ("qkv", "gate_up")
    for rows in _ROWS:
        x = _inputs(products[0], rows, rounded=after_norm)

        def compute(x: Rows = x) -> None:
            for product in products:
                if gated:
                    operations.gated(product, x)
                else:
                    product(x)

        _set(products, 0)
        library = time(compute)
        _set(products, rows)
        kernel = time(compute)
        log.debug(
            "products of %d tokens: %.3f ms by the kernel for few rows, %.3f by the library", rows, kernel, library
        )
        if kernel > library:
            break
        most = rows
    return most


def _set(products: Sequence[Product], few_rows: int) -> None:
    for product in products:
        product.few_rows = few_rows


def _inputs(product: Product, rows: int, *, rounded: bool) -> Rows:
    """Return inputs of a product as in a step of ``rows`` tokens; ``rounded``: a norm may have rounded them."""
    shape, dtype = (rows, product.weight.shape[1]), product.weight.dtype
    if not isinstance(product, ScaledMMLinear):
        return torch.zeros(shape, dtype=dtype, device=product.weight.device)
    device = product.values.device
    if rounded and product.static_scale is None:
        return RoundedRows(torch.zeros(shape, dtype=FP8, device=device), torch.ones(rows, device=device), dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def graph_milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call as a CUDA graph."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        call()
    return median_milliseconds(graph.replay, _REPEATS)

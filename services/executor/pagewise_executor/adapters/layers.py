"""Linear layers to whose outputs the adapters of a batch are added."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from pagewise_executor.models.fused import FusedDecoderLayer, WrappedLinear
from pagewise_executor.models.shards import move_sum


class Part(NamedTuple):
    """A linear layer as the checkpoint has it, which is outputs ``start`` to ``stop`` of an ``AdaptedLinear``."""

    module: str
    start: int
    stop: int


class AdapterContext:
    """The state that all layers of a model share.

    ``add``: adds the products of the batch's adapters with x [tokens, ins] to the outputs y [tokens, outs] of a layer;
    None: the batch has no adapters.
    """

    add: "Callable[[AdaptedLinear, torch.Tensor, torch.Tensor], None] | None" = None


class AdaptedLinear(WrappedLinear):
    """A linear layer ``base`` with adapters. ``number``: its index among the adapted layers of the model."""

    def __init__(self, base: nn.Module, number: int, parts: list[Part], ins: int, context: AdapterContext) -> None:
        super().__init__(base)
        self.number, self.parts, self.ins, self.outs = number, parts, ins, parts[-1].stop
        self.context = context

    @property
    def adds(self) -> bool:
        """Whether the batch has adapters."""
        return self.context.add is not None

    @property
    def weight(self) -> torch.Tensor:
        """The weight of ``base``: code of transformers may read its type."""
        weight = self.base.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., ins] to [.., outs]."""
        y: torch.Tensor = self.base(x)
        if (add := self.context.add) is not None:
            add(self, x.reshape(-1, self.ins), y.view(-1, self.outs))
        return y


def adapt_linears(model: nn.Module, context: AdapterContext, recurrent: Sequence[str] = ()) -> list[AdaptedLinear]:
    """Wrap the linear layers of a model's decoder layers that see every token of the batch; return them in order.

    The layers of experts, which see some tokens only, embeddings and the head stay as they are, and so do the modules
    named ``recurrent`` with their layers, which see the tokens in another order.
    """
    found: list[AdaptedLinear] = []
    for name, layer in list(_decoder_layers(model)):
        linears = _fused(name, layer) if isinstance(layer, FusedDecoderLayer) else _plain(name, layer)
        for path, parts, ins in list(linears):
            if any(path.startswith(f"{one}.") for one in recurrent):
                continue
            base = model.get_submodule(path)
            adapted = AdaptedLinear(base, len(found), parts, ins, context)
            move_sum(base, adapted)  # the sum over the ranks must include the adapter's part
            model.set_submodule(path, adapted)
            found.append(adapted)
    return found


def shapes_of(layers: list[AdaptedLinear]) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of each linear layer that may have adapters, by its name in the checkpoint."""
    return {part.module: (layer.ins, part.stop - part.start) for layer in layers for part in layer.parts}


def _decoder_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and "experts" not in name.split("."):
            yield from ((f"{name}.{index}", layer) for index, layer in enumerate(module))


def _fused(name: str, layer: FusedDecoderLayer) -> Iterator[tuple[str, list[Part], int]]:
    """Yield the name of each linear layer, the parts that it was joined of, and the number of its inputs."""
    heads, kv_heads, dim = layer.shape.heads, layer.shape.kv_heads, layer.shape.head_dim
    hidden = _shape(layer.qkv)[0]
    yield (
        f"{name}.qkv",
        _parts(
            (f"{name}.self_attn.q_proj", heads * dim),
            (f"{name}.self_attn.k_proj", kv_heads * dim),
            (f"{name}.self_attn.v_proj", kv_heads * dim),
        ),
        hidden,
    )
    yield f"{name}.out", _parts((f"{name}.self_attn.o_proj", hidden)), heads * dim
    if layer.mlp is not None:
        yield from _plain(f"{name}.mlp", layer.mlp)
        return
    size = _shape(layer.gate_up)[1] // 2
    yield f"{name}.gate_up", _parts((f"{name}.mlp.gate_proj", size), (f"{name}.mlp.up_proj", size)), hidden
    yield f"{name}.down", _parts((f"{name}.mlp.down_proj", hidden)), size


def _plain(name: str, layer: nn.Module) -> Iterator[tuple[str, list[Part], int]]:
    for path, module in layer.named_modules(prefix=name):
        if "experts" not in path.split(".") and _is_linear(module):
            ins, outs = _shape(module)
            yield path, _parts((path, outs)), ins


def _parts(*sizes: tuple[str, int]) -> list[Part]:
    parts, start = [], 0
    for module, size in sizes:
        parts.append(Part(module, start, start + size))
        start += size
    return parts


def _is_linear(module: nn.Module) -> bool:
    from pagewise_executor.models.packed_linear import CpuLinear, PackedLinear
    from pagewise_executor.models.quantised_linear import QuantisedLinear

    if type(module).__name__.endswith("Router"):  # some extend nn.Linear, and return more than its outputs
        return False
    return isinstance(module, nn.Linear | PackedLinear | CpuLinear | QuantisedLinear) or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    # transformers' Conv1D is a linear layer whose weight is [ins, outs].
    return type(module).__name__ == "Conv1D"


def _shape(module: nn.Module) -> tuple[int, int]:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    first, second = weight.shape
    return (first, second) if _is_transposed(module) else (second, first)

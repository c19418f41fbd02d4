"""Quantised linear layers as the files of a checkpoint have them, between its headers and the layers that compute."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint, Scheme
from pagewise_executor.models.quantised_linear import FP8, QuantisedLinear, QuantisedWeight
from pagewise_executor.models.shards import Shards, UnknownShardError
from pagewise_executor.models.weight_files import FileTensor
from pagewise_executor.models.weight_report import FLOATS

_FLOATS = FLOATS - {"F64"}
_TYPES = {FP8: {"F8_E4M3"}, torch.int8: {"I8"}, torch.int32: {"I32"}, torch.int64: {"I64"}}


class StoredTensor(NamedTuple):
    """A tensor of the model. ``dtype``: the type that it keeps; None: that of the model. ``types``: of it in files."""

    dtype: torch.dtype | None
    shape: list[int]
    types: frozenset[str] = FLOATS

    def shape_of(self, found: list[int]) -> list[int]:
        """Return ``shape`` if a tensor that keeps its type has the shape ``found`` but for dimensions of one."""
        same = self.dtype is not None and [n for n in found if n != 1] == [n for n in self.shape if n != 1]
        return self.shape if same else found


class StoredLinear(nn.Module):
    """A quantised linear layer as the files have it. Its parameters are named as they are there.

    ``scales``, ``input_scale``: the names of the scales, which differ. ``part``: the shape of what a rank keeps of it.
    """

    part: list[int] | None = None

    def __init__(self, scheme: Scheme, outs: int, ins: int, bias: bool, scales: str, input_scale: str) -> None:
        super().__init__()
        self.scheme, self.names = scheme, (scales, input_scale)
        self.block = (scheme.block[0] or outs, scheme.block[1] or ins)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"weight": ((outs, ins), scheme.dtype)}
        if scheme.packed:
            shapes = {"weight_packed": ((outs, -(-ins // 4)), torch.int32), "weight_shape": ((2,), torch.int64)}
        shapes[scales] = (-(-outs // self.block[0]), -(-ins // self.block[1])), torch.float32
        if scheme.inputs.static:
            shapes[input_scale] = (1,), torch.float32
        if bias:
            shapes["bias"] = (outs,), torch.float32
        for name, (shape, dtype) in shapes.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.outs, self.ins = outs, ins

    def loaded(self, dtype: torch.dtype) -> QuantisedLinear:
        """Return the layer of these weights, in a model that computes in ``dtype``.

        Raises:
            ValueError: packed weights are of another shape, or a static scale is not positive.
        """
        tensors = {name: weight.detach() for name, weight in self.named_parameters()}
        values = tensors.get("weight")
        if values is None:
            if tensors["weight_shape"].tolist() != [self.outs, self.ins]:
                raise ValueError(f"packed weights are {tensors['weight_shape'].tolist()}, not {[self.outs, self.ins]}")
            # Bytes in the order of the inputs, with 128 added.
            packed = tensors["weight_packed"].view(torch.uint8)[:, : self.ins]
            values = packed.bitwise_xor(128).view(torch.int8).contiguous()
        static = tensors.get(self.names[1])
        if static is not None and not 0 < float(static) < float("inf"):
            raise ValueError(f"{self.names[1]} of a layer is {float(static)}: inputs cannot be divided by that")
        weight = QuantisedWeight(values, tensors[self.names[0]], self.block)
        return QuantisedLinear(weight, self.scheme.inputs, dtype, tensors.get("bias"), static)


def place_stored(model: nn.Module, checkpoint: QuantisedCheckpoint, tensors: Mapping[str, FileTensor]) -> None:
    """Replace the linear layers of a model that are quantised in the files. ``tensors``: by their names in the model.

    Raises:
        ModelError: a weight is of another type than the configuration says.
    """
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            weight = f"{name}.weight" if f"{name}.weight" in tensors else f"{name}.weight_packed"
            there, stored = name, None
            if (found := tensors.get(weight)) is not None:
                there, stored = found.name.rpartition(".")[0], found.info.dtype
            if (scheme := checkpoint.scheme(there, stored)) is not None:
                outs, ins = module.weight.shape
                # transformers writes the second name of each for quant_method fp8.
                names = [
                    second if f"{name}.{second}" in tensors else first
                    for first, second in (("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale"))
                ]
                model.set_submodule(name, StoredLinear(scheme, outs, ins, module.bias is not None, *names))


def place_whole(model: nn.Module, whole: nn.Module) -> None:
    """Replace linear layers of a rank's part of a model by the stored ones of the ``whole`` model.

    They are read whole, one part of the model at a time, and then cut: blocks of scales do not end where parts do.
    """
    for name, module in whole.named_modules():
        if isinstance(module, StoredLinear):
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            module.part = list(linear.weight.shape)
            model.set_submodule(name, module)


def stored_tensors(model: nn.Module) -> dict[str, StoredTensor]:
    """Return the weights and scales of all stored layers of a model, by their names."""
    return {
        f"{name}.{own}": StoredTensor(weight.dtype, list(weight.shape), frozenset(_TYPES.get(weight.dtype, _FLOATS)))
        for name, module in model.named_modules()
        if isinstance(module, StoredLinear)
        for own, weight in module.named_parameters()
        if own != "bias"
    }


def take_stored(model: nn.Module, within: str, dtype: torch.dtype, shards: Shards | None = None) -> None:
    """Replace the stored layers within a part of a model, whose tensors have been read, by layers that compute.

    Raises:
        ValueError: packed weights or static scales are not what they should be. UnknownShardError: a weight cannot be
            divided.
    """
    for name, module in list(model.get_submodule(within).named_modules(prefix=within)):
        if isinstance(module, StoredLinear):
            linear = module.loaded(dtype)
            if shards is not None and module.part is not None:
                linear = part_of(linear, name, module.part, shards)
            model.set_submodule(name, linear)


def part_of(linear: QuantisedLinear, name: str, shape: list[int], shards: Shards) -> QuantisedLinear:
    """Return a rank's part of a quantised layer: a weight of this ``shape``, some of its outputs or of its inputs.

    A layer of which each rank has some inputs has its bias on rank 0 alone (``Shards.read``), and rounds its inputs by
    the largest of these.

    Raises:
        UnknownShardError: the outputs cannot be divided.
    """
    (outs, ins), weight = linear.values.shape, linear.quantised
    shards.note(name, (outs, ins))
    bias: torch.Tensor | None = linear.bias
    if shape[0] < outs:
        if outs % shape[0]:
            raise UnknownShardError(
                f"--tensor-parallel: {name} is quantised, and its {outs} outputs are no multiple of {shape[0]}"
            )
        start, stop = shards.span(outs, shape[0])
        weight, bias = weight.rows(start, stop), None if bias is None else bias[start:stop]
    if shape[1] < ins:
        weight = weight.columns(*shards.span(ins, shape[1]))
    return QuantisedLinear(weight, linear.inputs, linear.weight.dtype, bias, linear.static_scale)

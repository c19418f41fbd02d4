"""The memory that the weights of a model take, and whether they fit into it."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from pagewise_shared.config import ExecutorConfig, size_text
from pagewise_shared.errors import ModelError
from torch import nn

from pagewise_executor.kv.kv_pool import free_memory
from pagewise_executor.models.four_bit_checkpoint import FourBitScheme
from pagewise_executor.models.four_bit_weight import GROUP
from pagewise_executor.models.gguf_weight import FORMATS
from pagewise_executor.models.packed_linear import Quantization, is_conv1d, is_layer, is_quantised, quantisation_of
from pagewise_executor.models.preparation import parts_of
from pagewise_executor.models.weight_files import Headers


def check_weights(
    config: ExecutorConfig,
    model: nn.Module,
    headers: Headers,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int,
    *,
    stored: bool,
) -> None:
    """Compare the weights with the free memory of the device, on the CPU with free swap space.

    ``model``: the whole model, whose weights have no data. ``ranks``: hold a part of the model each. ``stored``: the
    checkpoint is quantised, and is kept as it is.

    Raises:
        ModelError: they do not fit; the text says which option makes them fit.
    """
    free = free_memory(device)
    if device.type == "cpu":
        free = (free + _swap()) // ranks
    on_gpu = device.type != "cpu"
    size = stored_bytes(headers, dtype) if stored else weight_bytes(model, dtype, config.quantization, on_gpu=on_gpu)
    if size // ranks <= free:
        return
    kind = f"in {str(dtype).removeprefix('torch.')}" if config.quantization == "none" else f"in {config.quantization}"
    kind = "as they are stored" if stored else kind
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    raise ModelError(
        f"not enough memory on {device} for the weights of {config.model}: {kind} they take {size_text(size // ranks)}"
        f"{each}, and {size_text(free)} are free; "
        + _what_fits(config, model, device, dtype, free, size, stored=stored)
    )


def weight_bytes(
    model: nn.Module, dtype: torch.dtype, quantization: Quantization = "none", *, on_gpu: bool = False
) -> int:
    """Return the bytes of the weights of a model without data, as they are kept.

    Floats are kept as ``dtype``, and bytes, such as those of experts in MXFP4, as they are. Weights that ``prepare``
    quantises take a byte each, and a scale in float32 for each output; in four bits half a byte each, and three for the
    scale and the zero of a group. A weight of several modules counts once; if it is quantised in one of them alone,
    such as a head in int8 that is tied to the embedding, it is kept in both forms. ``on_gpu``: head and experts stay as
    they are.
    """

    def kind_of(part: str) -> _Kind | None:
        return _KINDS["none" if on_gpu and not is_layer(part) else quantisation_of(part, quantization)]

    return _bytes_of(model, dtype, kind_of, quantization == "int4" and not on_gpu)


def checkpoint_bytes(model: nn.Module, dtype: torch.dtype, scheme: FourBitScheme | None) -> int:
    """Return the bytes of the weights of a quantised checkpoint of a model without data.

    They count as if all linear layers of decoder layers, experts included, had four bits by this ``scheme``, or eight
    where there is none.
    """
    kind = _EIGHT if scheme is None else _Kind(0.5, scheme.group, 2 + scheme.zeros)
    none = _KINDS["none"]
    return _bytes_of(model, dtype, lambda part: kind if quantisation_of(part, "fp8") == "fp8" else none, True)


class _Kind(NamedTuple):
    """The bytes of a weight, and of the scale and zero of a ``group`` of inputs of an output, 0: of all of them."""

    weight: float
    group: int
    scale: int

    def bytes(self, outs: int, ins: int) -> int:
        """Return the bytes of a weight matrix."""
        group = self.group or ins
        groups = -(-ins // group)
        return outs * (int(self.weight * (groups * group if self.weight < 1 else ins)) + groups * self.scale)


_EIGHT = _Kind(1, 0, 4)
_KINDS: dict[Quantization, _Kind | None] = {
    "none": None, "int8": _EIGHT, "fp8": _EIGHT, "int4": _Kind(0.5, GROUP, 3),
}  # fmt: skip


def _bytes_of(model: nn.Module, dtype: torch.dtype, kind_of: Callable[[str], _Kind | None], experts: bool) -> int:
    """Return the bytes of the weights of a model. ``kind_of``: of quantised weights, by the name of their part.

    ``experts``: the experts of mixtures are quantised, too.
    """
    sizes: dict[torch.Tensor, int] = {}
    kept: set[torch.Tensor] = set()
    kinds = {module: kind_of(part) for part in parts_of(model) for module in model.get_submodule(part).modules()}
    for module in model.modules():
        kind = kinds.get(module)
        for name, weight in module.named_parameters(recurse=False):
            if kind is None or not weight.is_floating_point():
                kept.add(weight)
            elif name == "weight" and is_quantised(module):
                outs, ins = reversed(weight.shape) if is_conv1d(module) else weight.shape
                sizes[weight] = kind.bytes(outs, ins)
            elif experts and weight.dim() == 3:
                count, outs, ins = weight.shape
                sizes[weight] = kind.bytes(count * outs, ins)
            else:
                kept.add(weight)
    return sum(sizes.values()) + sum(
        weight.numel() * (dtype if weight.is_floating_point() else weight.dtype).itemsize for weight in kept
    )


def _what_fits(
    config: ExecutorConfig,
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    free: int,
    size: int,
    *,
    stored: bool,
) -> str:
    """Return the options with which the weights fit ``free`` bytes; else the memory that they need."""
    ways: list[tuple[str, int]] = []
    if not stored and config.quantization == "none":
        on_gpu = device.type != "cpu"
        kinds: tuple[Quantization, ...] = ("fp8" if on_gpu else "int8", "int4")
        if dtype == torch.float32:
            ways.append(("--dtype bfloat16", weight_bytes(model, torch.bfloat16)))
        ways += [(f"--quantization {kind}", weight_bytes(model, dtype, kind, on_gpu=on_gpu)) for kind in kinds]
    gpus = torch.cuda.device_count() * (device.type == "cuda")
    if config.tensor_parallel == 1:
        ways += [(f"--tensor-parallel {count}", size // count) for count in (2, 4, 8) if count <= gpus][-1:]
    if fitting := [f"{option} takes {size_text(needed)}" for option, needed in ways if needed <= free]:
        return ", or ".join(fitting)
    least = min([size // config.tensor_parallel, *(needed for _, needed in ways)])
    return f"take a smaller model, or a machine with more than {size_text(least)} for it"


def stored_bytes(headers: Headers, dtype: torch.dtype) -> int:
    """Return the bytes of all tensors as they are stored, but those in 16 bits as ``dtype``, and those of linear layers
    in GGUF files as they are packed."""
    tensors = {name: one for header in headers.values() for name, one in header.items()}
    embedding = tensors.get("model.embed_tokens.weight")
    if "lm_head.weight" not in tensors and embedding is not None and embedding.dtype in FORMATS:
        tensors["lm_head.weight"] = embedding  # which is packed for the head once more
    factors = {"BF16": dtype.itemsize / 2, "F16": dtype.itemsize / 2}
    factors |= {kind: form.kept / form.size for kind, form in FORMATS.items()}
    size = 0
    for name, one in tensors.items():
        kept = name == "model.embed_tokens.weight" and one.dtype in FORMATS  # its rows are looked up in their blocks
        size += int((one.data_offsets[1] - one.data_offsets[0]) * (1 if kept else factors.get(one.dtype, 1)))
    return size


def _swap() -> int:
    table = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in table if line.startswith("SwapFree:"))

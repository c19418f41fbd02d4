"""Replaces the parts of a model by faster ones: fused layers, packed or quantised linear layers.

A model is prepared part by part: the original of a part is released before the next one is read. So loading takes the
memory of the prepared model and of one original part, and not twice the memory of the model.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial

import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.progress import logged_progress
from pagewise_shared.service_process import return_freed_memory
from torch import nn

from pagewise_executor.attention.registry import Kernels
from pagewise_executor.collectives import ALONE, Ranks
from pagewise_executor.models.calibration import Calibration
from pagewise_executor.models.cpu_mixtures import pack_mixtures
from pagewise_executor.models.cpu_operations import CpuOperations
from pagewise_executor.models.few_rows import make_skinny
from pagewise_executor.models.four_bit_experts import pack_four_bit_experts, quantise_experts
from pagewise_executor.models.four_bit_weight import Rounding, round_alone
from pagewise_executor.models.fused import FusedDecoderLayer, fuse_decoder, fuse_layers, sum_of_one
from pagewise_executor.models.grouped_experts import make_grouped
from pagewise_executor.models.mxfp4_experts import make_mxfp4_fast
from pagewise_executor.models.operations import Operations, TritonOperations
from pagewise_executor.models.packed_linear import is_layer, pack_linears, quantisation_of
from pagewise_executor.models.quantised_linear import make_fast, quantise_in_four_bits, quantise_linears, report
from pagewise_executor.models.quantised_weight import FP8

log = logging.getLogger(__name__)

_OPERATIONS: dict[Kernels, Callable[[], Operations]] = {
    "triton": TritonOperations, "cpu": CpuOperations, "torch": Operations,
}  # fmt: skip


def prepare(
    config: ExecutorConfig,
    model: nn.Module,
    kernels: Kernels,
    num_layers: int,
    max_model_len: int,
    device: torch.device,
    read: Callable[[str], None] | None = None,
    ranks: Ranks = ALONE,
    calibration: Calibration | None = None,
) -> bool:
    """Replace the parts of a model that have a faster form, and log their numbers.

    Returns whether PyTorch computes weights in eight bits, which is slow.

    ``read``: reads the weights of a part, given its name in ``model``, before it is replaced; None: they are there.
    ``ranks``: hold a part of each layer; sums are over them. ``calibration``: rounds decoder layers to four bits, after
    it has computed each.

    Raises:
        ModelError: the model cannot be deterministic. OSError, RuntimeError: of ``read``.
        ValueError: a linear layer cannot be quantised, or the kernels cannot compute experts in MXFP4.
    """
    operations = operations_of(kernels)
    reduce = ranks.reduce_in_order if config.deterministic else ranks.reduce
    if ranks.size == 1:
        reduce = sum_of_one
    fused = packed = 0
    parts = list(parts_of(model))
    progress = logged_progress(log, f"loading {config.model}", len(parts), "parts")

    def load(part: str) -> None:
        nonlocal fused
        if read is not None:
            read(part)
        if quantisation_of(part, config.quantization) == "fp8":
            quantise_linears(model, FP8, part)
        fused += fuse_layers(model, operations, part, reduce)

    def replace(part: str, rounding: Rounding = round_alone) -> None:
        nonlocal packed
        packed += replace_linears(config, model, kernels, device, part, rounding, alone=ranks.size == 1)
        progress.update()

    layers = [part for part in parts if calibration is not None and is_layer(part)]
    for part in parts:
        if part not in layers:
            load(part)
            replace(part)
    ahead = layers[:1] if read is not None else layers
    for part in ahead:
        load(part)
    if fused:
        fuse_decoder(model, operations, max_model_len)
    if calibration is not None:
        calibration.compute(model, layers, len(ahead), load, partial(replace, rounding=calibration.quantise))
    if config.deterministic:
        _make_deterministic(config.model, model, kernels, num_layers - fused)
    log.info("%d of %d layers fused, %d linear layers packed", fused, num_layers, packed)
    return report(model, asked=config.quantization != "none")


def operations_of(kernels: Kernels) -> Operations:
    """Return the small operations of fused layers by these kernels."""
    return _OPERATIONS[kernels]()


def replace_linears(
    config: ExecutorConfig,
    model: nn.Module,
    kernels: Kernels,
    device: torch.device,
    part: str,
    rounding: Rounding = round_alone,
    *,
    alone: bool,
) -> int:
    """Replace the linear layers and mixtures of a part of a model by faster ones; return how many were packed.

    ``rounding``: to four bits. ``alone``: there is one rank.

    Raises:
        ValueError: a linear layer cannot be quantised, or the kernels cannot compute experts in MXFP4.
    """
    quantization, on_cpu = quantisation_of(part, config.quantization), kernels != "triton" and device.type == "cpu"
    if on_cpu:
        pack_four_bit_experts(model, part)
    elif quantization == "int4":
        quantise_in_four_bits(model, part)
    make_fast(model, kernels, device, part)
    make_mxfp4_fast(model, kernels, part)
    if kernels == "triton":
        if not config.deterministic:
            make_skinny(model, part)
            make_grouped(model, part)
        return 0
    if not on_cpu:
        return 0
    if quantization == "int4":
        quantise_experts(model, part, rounding)
    if kernels == "cpu":
        pack_mixtures(model, part, alone)
    packed = pack_linears(model, kernels, quantization, part, rounding)
    return_freed_memory()  # the next part may not fit into the holes that this one has left
    return packed


def parts_of(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of the parts of a model in their order: its decoder layers, and the modules beside them."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from (f"{prefix}{name}.{index}" for index in range(len(child)))
        elif any(isinstance(module, nn.ModuleList) for module in child.modules()):
            yield from parts_of(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _make_deterministic(name: str, model: nn.Module, kernels: str, not_fused: int) -> None:
    if kernels != "triton":
        raise ModelError(f"--deterministic needs the Triton kernels, which cannot compute {name}")
    if not_fused or any(isinstance(layer, FusedDecoderLayer) and layer.mlp is not None for layer in model.modules()):
        raise ModelError(f"--deterministic: {name} is none of the families it supports (Llama, Mistral, Qwen2, Qwen3)")
    from pagewise_executor.models.skinny_linear import make_rowwise

    make_rowwise(model)

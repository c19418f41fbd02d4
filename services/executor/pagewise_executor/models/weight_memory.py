"""Whether a model's weights fit the memory of a device, and what would, before any of them is read."""

import math
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from pagewise_shared.config import ExecutorConfig, size_text
from pagewise_shared.errors import ModelError

from pagewise_executor.kv.kv_pool import free_memory
from pagewise_executor.models.weight_files import Headers

_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embed_in")


def check_weights(
    config: ExecutorConfig, headers: Headers, device: torch.device, dtype: torch.dtype, ranks: int, *, stored: bool
) -> None:
    """Compare the weights with what is free on the device. On the CPU what the kernel can swap out counts as free.

    ``ranks``: how many hold a part of the model each. ``stored``: the checkpoint is quantised, and is kept as it is.

    Raises:
        ModelError: they do not fit; the text says which option makes them fit.
    """
    free = free_memory(device)
    if device.type == "cpu":
        free = (free + _swap()) // ranks
    size = _stored_bytes(headers) if stored else weight_bytes(headers, dtype, config.quantization)
    if size // ranks <= free:
        return
    kind = f"in {str(dtype).removeprefix('torch.')}" if config.quantization == "none" else f"in {config.quantization}"
    kind = "as they are stored" if stored else kind
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    raise ModelError(
        f"not enough memory on {device} for the weights of {config.model}: {kind} they take {size_text(size // ranks)}"
        f"{each}, and {size_text(free)} are free; "
        + _what_fits(config, headers, device, dtype, free, size, stored=stored)
    )


def weight_bytes(headers: Headers, dtype: torch.dtype, quantization: Literal["none", "int8", "fp8"] = "none") -> int:
    """Return the bytes of all weights as ``dtype``, with linear layers in eight bits if they are quantised."""
    total = 0
    for name, tensor in chain.from_iterable(header.items() for header in headers.values()):
        linear = len(tensor.shape) >= 2 and not any(part in name for part in _EMBEDDINGS)
        total += math.prod(tensor.shape) * (1 if linear and quantization != "none" else dtype.itemsize)
    return total


def _what_fits(
    config: ExecutorConfig,
    headers: Headers,
    device: torch.device,
    dtype: torch.dtype,
    free: int,
    size: int,
    *,
    stored: bool,
) -> str:
    """Return what to do, by what would fit ``free`` bytes."""
    ways: list[tuple[str, int]] = []
    if not stored and config.quantization == "none":
        eight: Literal["int8", "fp8"] = "int8" if device.type == "cpu" else "fp8"
        if dtype == torch.float32:
            ways.append(("--dtype bfloat16", weight_bytes(headers, torch.bfloat16)))
        ways.append((f"--quantization {eight}", weight_bytes(headers, dtype, eight)))
    gpus = torch.cuda.device_count() * (device.type == "cuda")
    if config.tensor_parallel == 1:
        ways += [(f"--tensor-parallel {count}", size // count) for count in (2, 4, 8) if count <= gpus][-1:]
    if fitting := [f"{option} takes {size_text(needed)}" for option, needed in ways if needed <= free]:
        return ", or ".join(fitting)
    least = min([size // config.tensor_parallel, *(needed for _, needed in ways)])
    return f"take a smaller model, or a machine with more than {size_text(least)} for it"


def _stored_bytes(headers: Headers) -> int:
    tensors = chain.from_iterable(header.values() for header in headers.values())
    return sum(tensor.data_offsets[1] - tensor.data_offsets[0] for tensor in tensors)


def _swap() -> int:
    """Return the bytes of swap space that are free."""
    table = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in table if line.startswith("SwapFree:"))

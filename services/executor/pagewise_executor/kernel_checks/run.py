"""Checks the kernels that an executor uses before it joins, or all kernels on all GPUs for ``pagewise doctor``.

A kernel which the device, its driver or a version of Triton cannot run ends the executor with one sentence, and a
kernel that is compiled wrongly never serves. ``python -m pagewise_executor.kernel_checks.run`` prints JSON, a line
before each kernel and a line after it, so that the last line names the kernel that ended the process.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from pagewise_kernels.kv_layer import INT4, INT8
from pagewise_kernels.launch import capability, interpreted
from pagewise_shared.errors import ModelError
from torch import nn

from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.kernel_checks.kernels import KERNELS, READS_KV, kernels_of
from pagewise_executor.kernel_checks.use import KernelUse, typical_use, use_of
from pagewise_executor.kv.layer_groups import PageLayout
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.models.quantised_linear import QuantisedLinear, make_fast
from pagewise_executor.models.quantised_weight import FP8, Inputs, quantise

log = logging.getLogger(__name__)


class Checked(NamedTuple):
    """``error``: why the kernel does not work; empty if it does."""

    kernel: str
    error: str
    seconds: float


def check_kernels(
    config: SizedConfig, loaded: LoadedModel, kv_dtype: torch.dtype, pages: PageLayout | None = None
) -> None:
    """Check the kernels that an executor with this model uses. ``pages``: see ``use_of``.

    Raises:
        ModelError: one of them fails, or its results differ from PyTorch's; the text names it.
    """
    began = time.perf_counter()
    use = use_of(config, loaded, kv_dtype, pages)
    kernels = kernels_of(use)
    for name in kernels:
        if error := kernel_error(name, use):
            raise ModelError(
                f"the kernel of {name} does not work on {_described(use.device)}: {error}. `pagewise doctor` tries "
                "all kernels; --kernels torch serves without them, more slowly"
            )
    if use.device.type == "cuda":
        torch.cuda.empty_cache()  # the KV pool is sized by the free memory
    log.info("%d kernels agree with PyTorch, checked in %.1f s", len(kernels), time.perf_counter() - began)


_KV_TYPES = {FP8: ", float8 KV", INT8: ", int8 KV", INT4: ", int4 KV"}
"""How the checks with KV of these types are called."""


def check_all(device: torch.device, begin: Callable[[str], None] = lambda _: None) -> Iterator[Checked]:
    """Check all kernels on a device. ``begin`` is called with the name of each before it runs.

    It ends early if a kernel leaves the device unusable: everything that runs after that would fail as well.
    """
    plain = typical_use(device)
    full_heads = plain.attention[:1]  # latents are kept in the type of the model only
    uses = [plain, replace(plain, attention=full_heads, kv_dtype=INT8)]
    uses.append(replace(plain, attention=full_heads, kv_dtype=INT4, rotation=None))  # its tokens are not moved
    if interpreted() or capability(device) >= 89:
        weight = plain.draw(256, 256).float()  # in float8 a library may multiply, in int8 the kernel does
        layers = [QuantisedLinear(quantise(weight, dtype), Inputs(), plain.dtype) for dtype in (FP8, torch.int8)]
        make_fast(holder := nn.Sequential(*layers), "triton", device, "")
        linears = tuple(each for each in holder if isinstance(each, QuantisedLinear))
        uses.append(replace(plain, attention=full_heads, kv_dtype=FP8, linears=linears))
    done = set[str]()
    for use in uses:
        for name in kernels_of(use):
            if (full := name + (_KV_TYPES.get(use.kv_dtype, "") if name in READS_KV else "")) in done:
                continue
            done.add(full)
            begin(full)
            began = time.perf_counter()
            error = kernel_error(name, use)
            yield Checked(full, error, round(time.perf_counter() - began, 3))
            if error and not _is_usable(device):
                return


@torch.inference_mode()
def kernel_error(name: str, use: KernelUse) -> str:
    """Run a kernel; return why it does not work, empty if it does."""
    try:
        for found, expected, tolerance in KERNELS[name][1](use):
            wide, wanted = (t.double() if t.is_floating_point() else t.long() for t in (found, expected))
            difference, most = float((wide - wanted).abs().max()), float(wanted.abs().max())
            if not difference <= tolerance * most:  # also if it is not a number
                return f"its result differs from PyTorch's by {difference:.3g}, where the largest value is {most:.3g}"
    except Exception as error:  # Triton, the driver or the device may raise anything
        text = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {text}"
    return ""


def _is_usable(device: torch.device) -> bool:
    """Whether a device computes after a kernel has failed: after an illegal access CUDA refuses everything."""
    try:
        return bool(torch.ones(1, device=device).sum() == 1)
    except RuntimeError:
        return False


def _described(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"


def main() -> None:
    """Check all kernels on all CUDA devices, or in the interpreter, and print JSON lines."""

    def begin(kernel: str) -> None:
        print(json.dumps({"device": number, "kernel": kernel}), flush=True)

    devices = (
        [torch.device("cpu")] if interpreted() else [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    )
    for number, device in enumerate(devices):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        for checked in check_all(device, begin):
            print(json.dumps({"device": number} | checked._asdict()), flush=True)


if __name__ == "__main__":
    main()

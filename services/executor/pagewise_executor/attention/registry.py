"""The attention backends by name."""

import pkgutil
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from pagewise_kernels.kv_layer import FP8, GROUP, INT4, INT8
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from pagewise_executor.attention.backend import AttentionBackend
from pagewise_executor.kv.kv_pool import KVShape, Layout

Kernels = Literal["torch", "triton", "cpu"]


class Backend(NamedTuple):
    """An attention backend. ``kernels``: of the rest of the model. ``path``: of its class, imported when needed."""

    kernels: Kernels
    path: str

    def load(self) -> type[AttentionBackend]:
        """Import the class."""
        found: type[AttentionBackend] = pkgutil.resolve_name(f"pagewise_executor.attention.{self.path}")
        return found


_TRITON = Backend("triton", "triton_attention:TritonBackend")
BACKENDS = {
    "cpu": Backend("cpu", "cpu_attention:CpuBackend"),
    "torch": Backend("torch", "torch_attention:TorchBackend"),
    "mmu": Backend("torch", "mapped_attention:MappedBackend"),
    "triton": _TRITON,
    # The Triton kernels with a library for prompts, see ``prefill_choice``.
    "gluon": _TRITON,
    "fa3": _TRITON,
    "flashinfer": _TRITON,
}
"""By name: the value of ``--attention`` or ``--kv-mapping`` that asks for a backend, or of ``--kernels``."""

_NEEDS = {
    "fp8": "the Triton kernels",
    "int8": "the Triton kernels, or the CPU operations in C with a model in float32 or bfloat16",
    "int4": "the Triton kernels, or the CPU operations in C with a model in float32 or bfloat16",
}
"""The kernels that read KV of each type."""
KV_TYPES = {"fp8": FP8, "int8": INT8, "int4": INT4}
"""The types that ``--kv-dtype`` names."""


def named_backends(config: ExecutorConfig) -> dict[str, Backend]:
    """Return the backends that options name, by the option with its value."""
    asked = {"--kv-mapping": config.kv_mapping, "--attention": config.attention}
    return {f"{option} {name}": BACKENDS[name] for option, name in asked.items() if name in BACKENDS}


def backend_of(config: ExecutorConfig, kernels: Kernels) -> type[AttentionBackend]:
    """Return the backend that an option names, or the one of these kernels."""
    return next(iter(named_backends(config).values()), BACKENDS[kernels]).load()


def kv_dtype_for(
    config: ExecutorConfig, dtype: torch.dtype, backend: type[AttentionBackend], device: torch.device
) -> torch.dtype:
    """Return the KV type that ``--kv-dtype`` asks for, for a model in ``dtype`` with this backend.

    Raises:
        ModelError: the type needs another backend, or another GPU.
    """
    if config.kv_dtype == "auto":
        return dtype
    if config.kv_dtype not in backend.kv_dtypes:
        raise ModelError(f"--kv-dtype {config.kv_dtype} needs {_NEEDS[config.kv_dtype]}")
    if config.kv_dtype == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ModelError("--kv-dtype fp8 needs a GPU of compute capability 8.9 or more")
    return KV_TYPES[config.kv_dtype]


def check_kv_shapes(kv_dtype: torch.dtype, shapes: Sequence[KVShape]) -> None:
    """Check that keys and values of these shapes can be kept in ``kv_dtype``.

    Raises:
        ModelError: they cannot.
    """
    if kv_dtype == INT4 and (unfit := [shape[1] for shape in shapes if shape[1] % GROUP]):
        raise ModelError(
            f"--kv-dtype int4: heads of {unfit[0]} numbers are no multiple of {GROUP}, which share a scale: take int8"
        )


def layout_of(config: ExecutorConfig, backend: type[AttentionBackend]) -> Layout:
    """Return the layout of the KV pool that ``--kv-layout`` asks for.

    Raises:
        ModelError: the backend does not support it.
    """
    if config.kv_layout not in backend.layouts:
        raise ModelError("--kv-layout blocks needs the Triton kernels, or --kv-mapping mmu")
    return backend.layouts[config.kv_layout]

"""Compiles kernels for a GPU that need not be there."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from pagewise_kernels.launch import Watcher, interpreted, watch_launches


class _Target:
    """Replaces Triton's driver where there is no device."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def watching(watcher: Watcher, capability: int, sms: int) -> Iterator[None]:
    """Within it, Triton compiles for a device of ``capability`` (90 for Hopper) with ``sms`` multiprocessors, and
    launches are handed to ``watcher`` instead of run.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    if interpreted():
        raise RuntimeError("kernels are interpreted in this process (TRITON_INTERPRET=1): they cannot be compiled")
    driver = triton.runtime.driver
    driver.set_active(_Target(capability))
    watch_launches(watcher, capability, sms)
    try:
        yield
    finally:
        watch_launches(None)
        driver.set_active(None)  # Triton looks for a device again when it needs one


@contextmanager
def filling_cache(capability: int, sms: int, threads: int) -> Iterator[None]:
    """Within it, launches are compiled into Triton's cache instead of run, for a device of ``capability`` with ``sms``
    multiprocessors.

    They are compiled by ``threads``: Triton holds Python's lock for an eighth of the time only. At its end all are
    compiled, but for kernels that cannot be: their launch raises the error.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    kernels: list[Any] = []

    def watch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        kernels.append(kernel.warmup(*arguments, grid=(1,), **options))

    with ThreadPoolExecutor(threads) as pool, watching(watch, capability, sms):
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            yield
        list(pool.map(_make_launcher, {id(kernel): kernel for kernel in kernels}.values()))


def _make_launcher(kernel: Any) -> None:
    """Build the launcher of a compiled kernel, which Triton 3.6 makes with the C compiler; later ones need none."""
    from triton.backends.nvidia.driver import CudaLauncher

    with suppress(Exception):  # no CUDA driver is there to link to, or the kernel could not be compiled
        compiled = kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel
        CudaLauncher(compiled.src, compiled.metadata)

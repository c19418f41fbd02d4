"""Loads the library that fits this processor, and the parallel regions of torch's own OpenMP runtime."""

import ctypes
import functools
from pathlib import Path

import torch

from pagewise_kernels.cpu.build import FOLDER, VARIANTS, Variant, machine


class LibraryMissingError(Exception):
    """The library was not built, or does not run here; the text says which."""


_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "pagewise_rms_norm": [
        _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, ctypes.c_float, ctypes.c_int, _LONG, _POINTER
    ],
    "pagewise_silu_mul": [_POINTER, _LONG, _POINTER, _LONG, _LONG, ctypes.c_int, _LONG, _POINTER],
    "pagewise_linear": [
        _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER
    ],
    "pagewise_linear_int8": [
        _POINTER, _LONG, *[_POINTER] * 7, _LONG, _LONG, _LONG, _LONG, _POINTER
    ],
    "pagewise_attend": [_POINTER],
}  # fmt: skip


@functools.cache
def load_library(folder: Path = FOLDER) -> ctypes.CDLL:
    """Return the library in its widest variant that this processor runs.

    Raises:
        LibraryMissingError: there is none.
    """
    library = _open(folder / _variant().file)
    for function, arguments in _ARGUMENTS.items():
        getattr(library, function).argtypes = arguments
    return library


def floats_per_register() -> int:
    """Return how many float32 a vector register of the library's variant holds: 16 with AVX-512, 8 with AVX2, else 4.

    Raises:
        LibraryMissingError: there is no library.
    """
    load_library()
    return _variant().vec


def has_fast_products() -> bool:
    """Return whether the library's products are at least as fast as oneDNN's: with AVX2 and AVX-512 they are.

    Raises:
        LibraryMissingError: there is no library.
    """
    return floats_per_register() >= 8


@functools.cache
def parallel_regions() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch has loaded; None if there is none.

    LLVM's and Intel's runtimes have it as well as GNU's.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except AttributeError:
        return None


def threads() -> int:
    """Return the number of threads to compute with: torch's."""
    return torch.get_num_threads() if parallel_regions() is not None else 1


def _variant() -> Variant:
    name = machine()
    if name is None:
        raise LibraryMissingError("the CPU operations are built for Linux with glibc on x86_64 and aarch64 only")
    # torch has looked at what processor and operating system support; ATEN_CPU_CAPABILITY makes it look no further.
    widest = {"AVX2": 8, "AVX512": 16}.get(torch.backends.cpu.get_cpu_capability(), 4)
    vnni = widest == 16 and bool(torch.cpu._is_vnni_supported())
    return max(variant for variant in VARIANTS[name] if variant.vec <= widest and variant.vnni <= vnni)


def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise LibraryMissingError(
            f"{path.name} has not been built; python -m pagewise_kernels.cpu.build builds it, with ziglang"
        )
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryMissingError(f"{path.name} cannot be loaded: {error}") from error

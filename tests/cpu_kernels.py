"""Whether the CPU operations can be tested here, and in which builds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pagewise_kernels.cpu.build import VARIANTS, Variant, machine
from pagewise_kernels.cpu.library import LibraryMissingError, load_library


def auto_kernels() -> str:
    """The choice of ``--kernels auto`` on the CPU for the models of the tests."""
    try:
        load_library()
    except LibraryMissingError:
        return "torch"
    return "cpu"


def need_cpu_kernels() -> None:
    """Skip a test where the library has not been built: ``make setup`` reports that if it could not."""
    try:
        load_library()
    except LibraryMissingError as error:
        pytest.skip(str(error))


@contextmanager
def built_in(folder: Path) -> Iterator[None]:
    """Load the library from ``folder``, also in modules that are imported now, which keep ``load_library`` for ever."""
    function = load_library.__wrapped__
    before = function.__defaults__
    function.__defaults__ = (folder,)
    load_library.cache_clear()
    try:
        yield
    finally:
        function.__defaults__ = before
        load_library.cache_clear()


def variants() -> list[Variant]:
    """The builds that this processor runs, the best one last."""
    widest = {"AVX2": 8, "AVX512": 16}.get(torch.backends.cpu.get_cpu_capability(), 4)
    vnni = bool(torch.cpu.get_capabilities().get("avx512_vnni", False))
    return [one for one in VARIANTS[machine() or "x86_64"] if one.vec <= widest and one.vnni <= vnni]

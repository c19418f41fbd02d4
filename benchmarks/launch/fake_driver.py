"""Triton's own launch path on a fake of CUDA's driver, which records launches: the work of the host, without a GPU.

Everything up to the driver is real: Triton compiles for the device that the fake pretends to be, builds its launchers,
and calls ``cuLaunchKernelEx`` of ``fake_cuda.c``. Kernels compute nothing. Needs a C compiler, as Triton does.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from pagewise_kernels.launch import pretend_gpu

_MOST_PARAMETERS = 64
_BYTES = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "fp16": 2, "bf16": 2, "i64": 8, "u64": 8, "fp64": 8}
"""Of parameters; pointers have 8, others 4."""


class Launch(NamedTuple):
    """A launch that the driver got.

    ``function``: a compiled function. ``values``: the bytes of each parameter, as an integer. ``dependent``: it
    may begin before the kernel that was launched before it has ended.
    """

    kernel: str
    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    stream: int
    dependent: bool
    values: tuple[int, ...]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64), ("stream", ctypes.c_uint64), ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32), ("shared", ctypes.c_uint32), ("dependent", ctypes.c_uint32),
        ("parameters", ctypes.c_uint32), ("values", ctypes.c_uint64 * _MOST_PARAMETERS),
    ]  # fmt: skip


class FakeDriver:
    """Replaces ``triton.backends.nvidia.driver.CudaDriver``."""

    def __init__(self, library: ctypes.CDLL, capability: int) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self._library, self._target = library, GPUTarget("cuda", capability, 32)
        self._launcher_class = CudaLauncher
        self._signature: tuple[str, ...] = ()
        self.utils = CudaUtils()
        self._load = self.utils.load_binary
        self.utils.load_binary = self._load_binary
        self.stream = 7

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Make a launcher; the binary that it belongs to is loaded next."""
        self._signature = tuple(kind for kind in source.signature.values() if kind != "constexpr")
        return self._launcher_class(source, metadata)

    def _load_binary(self, *arguments: Any) -> Any:
        loaded = self._load(*arguments)
        sizes = bytes(8 if kind[0] == "*" else _BYTES.get(kind, 4) for kind in self._signature)
        self._library.fake_parameters(loaded[1], len(sizes), sizes)
        return loaded

    @contextmanager
    def recorded(self) -> Iterator[list[Launch]]:
        """Within it, launches are recorded; the list is filled at its end."""
        found: list[Launch] = []
        self._library.fake_reset(self._target.arch, 1)
        try:
            yield found
        finally:
            at = ctypes.cast(self._library.fake_launches(), ctypes.POINTER(_Launch))
            for one in at[: self.num_launches]:
                name = self._library.fake_name(one.function).decode()
                values = tuple(one.values[: one.parameters])
                found.append(
                    Launch(
                        name,
                        one.function,
                        tuple(one.grid),
                        one.threads,
                        one.shared,
                        one.stream,
                        bool(one.dependent),
                        values,
                    )
                )
            self._library.fake_reset(self._target.arch, 0)

    @property
    def num_launches(self) -> int:
        """Launches since ``recorded`` was entered or left last."""
        return int(self._library.fake_num_launches())


def missing() -> str:
    """Why there can be no fake driver in this process; empty if there can."""
    if torch.cuda.is_available():
        return "there is a GPU, and its driver"
    if triton.knobs.runtime.interpret:
        return "kernels are interpreted in this process"
    return "" if _compiler() else "no C compiler, which Triton needs as well"


@contextmanager
def fake_driver(folder: Path, capability: int = 90) -> Iterator[FakeDriver]:
    """Within it, Triton launches by the fake of a GPU of ``capability``, with tensors of the CPU.

    ``folder``: where the fake is built. Once built, it stays loaded.
    """
    path = folder / "libcuda.so.1"
    source, headers = Path(__file__).parent / "fake_cuda.c", Path(triton.__file__).parent / "backends/nvidia/include"
    compiler = _compiler()
    assert compiler is not None
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", f"-I{headers}", "-o", path, source],
        check=True,
    )
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.fake_num_launches.restype = ctypes.c_uint64
    library.fake_launches.restype = ctypes.c_void_p
    library.fake_name.restype = ctypes.c_char_p
    library.fake_name.argtypes = [ctypes.c_uint64]
    library.fake_parameters.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_char_p]
    library.fake_reset(capability, 0)
    driver = FakeDriver(library, capability)
    triton.runtime.driver.set_active(driver)
    pretend_gpu(capability)
    try:
        yield driver
    finally:
        pretend_gpu(None)
        triton.runtime.driver.set_active(None)  # Triton looks for a device again when it needs one


def _compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")

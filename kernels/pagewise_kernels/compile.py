"""Compiles kernels for a GPU that need not be there, and says what they take of it.

    python -m pagewise_kernels.compile --target 90 [--only TEXT] [--without TEXT ...] [--json]

The public functions are called with tensors that hold no data; every launch they would make is compiled instead, for
the device of the given compute capability, with the configuration that they choose for it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from pagewise_kernels.compile_cases import CASES
from pagewise_kernels.launch import interpreted, watch_launches


@dataclass(slots=True, frozen=True)
class Compiled:
    """A compiled kernel: ``registers`` per thread, ``spilled`` bytes per thread, ``shared`` bytes per program.

    ``mma``: how it multiplies matrices ("wgmma", "mma" or nothing).
    """

    case: str
    kernel: str
    constants: dict[str, Any]
    num_warps: int
    registers: int
    spilled: int
    shared: int
    mma: str


class _Target:
    """Stands in for Triton's driver where there is no device."""

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
def compiling(capability: int, case: str = "") -> Iterator[list[Compiled]]:
    """Within it, launches are compiled for ``capability`` (90 for Hopper) and listed instead of run.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    if interpreted():
        raise RuntimeError("kernels are interpreted in this process (TRITON_INTERPRET=1): they cannot be compiled")
    found: list[Compiled] = []
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(_Target(capability))

    def watch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.append(_compile(case, capability, kernel, arguments, options))

    watch_launches(watch, capability)
    try:
        yield found
    finally:
        watch_launches(None)
        driver._active = before


def _compile(case: str, capability: int, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Compiled:
    binary = kernel.warmup(*arguments, grid=(1,), **options)
    ptx: str = binary.asm["ptx"]
    registers, spilled = _resources(ptx, capability)
    constants = {name: str(value) for name, value in options.items() if name.isupper()}
    mma = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else ""
    return Compiled(
        case, kernel.__name__, constants, binary.metadata.num_warps, registers, spilled, binary.metadata.shared, mma
    )


def _resources(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes per thread, as ptxas reports them."""
    wanted = re.search(r"\.target\s+(\w+)", ptx)
    assert wanted is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={wanted[1]}", file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr  # noqa: S603  # nosec B603 # no shell
    registers = re.search(r"Used (\d+) registers", report)
    stores = re.search(r"(\d+) bytes spill stores", report)
    assert registers is not None
    return int(registers[1]), int(stores[1]) if stores else 0


def compile_case(name: str, capability: int) -> list[Compiled]:
    """Compile every launch of one case of ``compile_cases``."""
    run: Callable[[], None] = CASES[name]
    with compiling(capability, name) as found:
        run()
    return found


def compile_cases(names: list[str], capability: int, processes: int) -> list[Compiled]:
    """The same for many, in several processes."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        results = pool.map(compile_case, names, [capability] * len(names))
        return [compiled for result in results for compiled in result]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pagewise_kernels.compile", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", type=int, default=90, help="compute capability, 90 for Hopper (default: 90)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--without", nargs="+", default=[], help="no cases whose name contains one of these")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel instead of a table")
    args = parser.parse_args()
    names = [name for name in CASES if args.only in name and not any(text in name for text in args.without)]
    for compiled in compile_cases(names, args.target, len(os.sched_getaffinity(0))):
        if args.json:
            print(json.dumps(asdict(compiled)))
        else:
            print(
                f"{compiled.case:<34} {compiled.kernel:<20} {compiled.num_warps:>2} warps "
                f"{compiled.registers:>4} registers {compiled.spilled:>5} B spilled {compiled.shared:>7} B shared "
                f"{compiled.mma}"
            )
    sys.stdout.flush()


if __name__ == "__main__":
    main()

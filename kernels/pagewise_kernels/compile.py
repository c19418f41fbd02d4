"""Compiles kernels for a GPU that need not be there, and says what they take of it.

    python -m pagewise_kernels.compile --target 90 [--only TEXT] [--without TEXT ...] [--loops CASE] [--json]

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
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from pagewise_kernels.compile_cases import CASES
from pagewise_kernels.launch import NOMINAL_SMS, Watcher, interpreted, watch_launches
from pagewise_kernels.machine_code import disassembled, hidden_exponentials, innermost_loops, too_early


@dataclass(slots=True, frozen=True)
class Compiled:
    """A compiled kernel: ``registers`` per thread, ``spilled`` bytes per thread, ``shared`` bytes per program.

    ``mma``: how it multiplies matrices ("wgmma", "mma" or nothing). ``imprecise``: how many products of float8 tensor
    cores may sum up before the sum goes on in float32. ``loops``: instructions of its innermost loops in the order of
    the code, None where they were not asked for (the disassembler takes 0.4 s per kernel). ``too_early``: what it does
    before it waits for the kernel before it, in PTX, and in machine code where that is read; None if it does not begin
    early. ``lets_next``: it lets the next one begin early. Of the loops with ``wgmma``, where ``loops`` were asked for:
    ``hidden``, for each of them, see ``hidden_exponentials``; ``reloaded``, how often a thread reads what was spilled.
    """

    case: str
    kernel: str
    constants: dict[str, Any]
    num_warps: int
    registers: int
    spilled: int
    shared: int
    mma: str
    imprecise: int
    loops: list[int] | None = None
    too_early: list[str] | None = None
    lets_next: bool = False
    hidden: list[int] = field(default_factory=list)
    reloaded: int = 0


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
def compiling(capability: int, case: str = "", *, loops: bool = False) -> Iterator[list[Compiled]]:
    """Within it, launches are compiled for ``capability`` (90 for Hopper) and listed instead of run.

    ``loops``: the instructions of their loops are counted.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    found: list[Compiled] = []

    def watch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.append(_compile(case, capability, kernel, arguments, options, loops=loops))

    with _watching(watch, capability, NOMINAL_SMS):
        yield found


@contextmanager
def filling_cache(capability: int, sms: int, threads: int) -> Iterator[None]:
    """Within it, launches are compiled into Triton's cache instead of run, for a device of ``capability`` with ``sms``
    multiprocessors.

    They are compiled by ``threads``: Triton holds Python's lock for an eighth of the time only. At its end all are
    compiled, but for kernels that cannot be: their launch says why.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    kernels: list[Any] = []

    def watch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        kernels.append(kernel.warmup(*arguments, grid=(1,), **options))

    with ThreadPoolExecutor(threads) as pool, _watching(watch, capability, sms):
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            yield
        list(pool.map(_make_launcher, {id(kernel): kernel for kernel in kernels}.values()))


def _make_launcher(kernel: Any) -> None:
    """Build the launcher of a compiled kernel, which Triton 3.6 makes with the C compiler; later ones need none."""
    from triton.backends.nvidia.driver import CudaLauncher

    with suppress(Exception):  # no CUDA driver is there to link to, or the kernel could not be compiled
        compiled = kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel
        CudaLauncher(compiled.src, compiled.metadata)


@contextmanager
def _watching(watcher: Watcher, capability: int, sms: int) -> Iterator[None]:
    """Within it, Triton compiles for ``capability``, and launches are handed to ``watcher``."""
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


def _compile(
    case: str, capability: int, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], *, loops: bool
) -> Compiled:
    binary = kernel.warmup(*arguments, grid=(1,), **options)
    ptx: str = binary.asm["ptx"]
    registers, spilled = _resources(ptx, capability)
    constants = {name: str(value) for name, value in options.items() if name.isupper() or name == "maxnreg"}
    mma = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else ""
    code = disassembled(binary.asm["cubin"]) if loops else ""
    bodies = innermost_loops(code) if loops else []
    early = too_early(ptx)
    if early is not None and loops:
        early += too_early(code) or []
    return Compiled(
        case,
        kernel.__name__,
        constants,
        binary.metadata.num_warps,
        registers,
        spilled,
        binary.metadata.shared,
        mma,
        max([int(most) for most in re.findall(r"maxNumImpreciseAcc = (\d+)", binary.asm["ttgir"])], default=0),
        [len(body) for body in bodies] if loops else None,
        early,
        "griddepcontrol.launch_dependents" in ptx,
        [hidden_exponentials(body) for body in bodies if any("HGMMA" in each for each in body)],
        sum(" LDL" in f" {each}" for body in bodies if any("HGMMA" in each for each in body) for each in body),
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


def compile_case(name: str, capability: int, loops: bool = False) -> list[Compiled]:
    """Compile every launch of one case of ``compile_cases``, and count the instructions of their ``loops``."""
    run: Callable[[], None] = CASES[name]
    with compiling(capability, name, loops=loops) as found:
        run()
    return found


def compile_cases(names: list[str], capability: int, processes: int, loops: Collection[str] = ()) -> list[Compiled]:
    """The same for many, in several processes; ``loops``: the cases whose loops are counted."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        results = pool.map(compile_case, names, [capability] * len(names), [name in loops for name in names])
        return [compiled for result in results for compiled in result]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pagewise_kernels.compile", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", type=int, default=90, help="compute capability, 90 for Hopper (default: 90)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--without", nargs="+", default=[], help="no cases whose name contains one of these")
    parser.add_argument("--loops", action="append", default=[], metavar="CASE", help="count instructions of its loops")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel instead of a table")
    args = parser.parse_args()
    names = [name for name in CASES if args.only in name and not any(text in name for text in args.without)]
    for compiled in compile_cases(names, args.target, len(os.sched_getaffinity(0)), args.loops):
        if args.json:
            print(json.dumps(asdict(compiled)))
        else:
            print(
                f"{compiled.case:<34} {compiled.kernel:<20} {compiled.num_warps:>2} warps "
                f"{compiled.registers:>4} registers {compiled.spilled:>5} B spilled {compiled.shared:>7} B shared "
                f"{compiled.mma}{f' loops {compiled.loops}' if compiled.loops else ''}"
            )
    sys.stdout.flush()


if __name__ == "__main__":
    main()

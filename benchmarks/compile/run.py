"""Compiles kernels for a GPU that need not be there, and prints the registers and the memory that they take of it.

    python -m benchmarks.compile.run --target 90 [--only TEXT] [--without TEXT ...] [--loops CASE] [--json]

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
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any

from pagewise_kernels.compile import watching
from pagewise_kernels.launch import NOMINAL_SMS
from triton.backends.nvidia.compiler import get_ptxas

from benchmarks.compile.cases import CASES
from benchmarks.compile.machine_code import disassembled, hidden_exponentials, innermost_loops, too_early


@dataclass(slots=True, frozen=True)
class Compiled:
    """A compiled kernel: ``registers`` per thread, ``spilled`` bytes per thread, ``shared`` bytes per program.

    ``mma``: how it multiplies matrices ("wgmma", "mma" or nothing). ``imprecise``: how many products of float8 tensor
    cores may sum up before the sum continues in float32. ``loops``: instructions of its innermost loops in the order of
    the code, None where they were not asked for (the disassembler takes 0.4 s per kernel). ``too_early``: its
    instructions before it waits for the kernel before it, in PTX, and in machine code where that is read; None if it
    does not begin early. ``lets_next``: it lets the next one begin early. Of the loops with ``wgmma``, where ``loops``
    were asked for: ``hidden``, for each of them, see ``hidden_exponentials``; ``reloaded``, how often a thread reads
    spilled registers.
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

    with watching(watch, capability, NOMINAL_SMS):
        yield found


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
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr  # nosec B603 # no shell
    registers = re.search(r"Used (\d+) registers", report)
    stores = re.search(r"(\d+) bytes spill stores", report)
    assert registers is not None
    return int(registers[1]), int(stores[1]) if stores else 0


def compile_case(name: str, capability: int, loops: bool = False) -> list[Compiled]:
    """Compile every launch of one case of ``cases``, and count the instructions of their ``loops``."""
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
        prog="python -m benchmarks.compile.run", description=(__doc__ or "").splitlines()[0]
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

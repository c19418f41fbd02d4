"""Builds the library: ``python -m pagewise_kernels.cpu.build`` compiles it beside its sources.

The compiler is clang, as the wheel ``ziglang`` brings it to machines that have none. The package's build runs this
(``hatch_build.py``); in a checkout that was not installed, the command does. This module imports only the standard
library.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SOURCES = (
    "attention.c", "elementwise.c", "experts.c", "grouped_rows.c", "layer.c", "linear.c", "linear_grouped.c",
    "linear_int8.c", "mxfp4_experts.c", "quantised_experts.c", "recurrent.c", "router.c", "small_blocks.c", "team.c",
)  # fmt: skip
GLIBC = "2.17"
"""The oldest C library that the result runs with, that of manylinux2014."""


class Variant(NamedTuple):
    """A build for processors of one kind. ``vec``: how many float32 its vector registers hold. ``vnni``: whether they
    have AVX-512's instructions for products of eight bits."""

    vec: int
    vnni: bool
    flags: tuple[str, ...]

    @property
    def file(self) -> str:
        """The name of the library."""
        return f"_cpu_{self.vec}{'_vnni' if self.vnni else ''}.so"


VARIANTS: dict[str, tuple[Variant, ...]] = {
    "x86_64": (
        Variant(4, False, ("-mcpu=x86_64_v2",)),
        Variant(8, False, ("-mcpu=x86_64_v3",)),
        Variant(16, False, ("-mcpu=x86_64_v4", "-mprefer-vector-width=512")),
        Variant(16, True, ("-mcpu=x86_64_v4+avx512vnni", "-mprefer-vector-width=512")),
    ),
    "aarch64": (Variant(4, False, ("-mcpu=generic",)),),
}
_PATIENCE = 900.0
"""Seconds that the compiler may take for a variant."""
_FLAGS = ("-O3", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fno-math-errno", "-shared", "-fPIC", "-s")


def machine() -> str | None:
    """Return the architecture to build for; None where the library is not supported: only Linux with glibc has it."""
    glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    return platform.machine() if glibc and platform.machine() in VARIANTS else None


def compile_command(name: str, variant: Variant, target: Path, extra: Sequence[str] = ()) -> list[str]:
    """Return the command that compiles one variant for the architecture ``name`` into ``target``."""
    sources = [str(FOLDER / source) for source in SOURCES]
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", f"{name}-linux-gnu.{GLIBC}"]
    checks = () if extra else ("-fno-sanitize=undefined",)  # which zig would add otherwise
    return [
        *compiler,
        *_FLAGS,
        "-fvisibility=hidden",
        *checks,
        *variant.flags,
        *extra,
        f"-DVEC={variant.vec}",
        *sources,
        "-lm",
        "-lpthread",
        "-o",
        str(target),
    ]


def build(folder: Path = FOLDER, name: str | None = None, extra: Sequence[str] = ()) -> list[Path]:
    """Compile all variants for an architecture, by default this machine's, into ``folder``; return the files.

    Raises:
        subprocess.SubprocessError: the compiler failed, and has printed why; or it took too long.
    """
    name = name or machine()
    built: list[Path] = []
    if name is None:
        return built
    with tempfile.TemporaryDirectory() as cache:
        # Where the compiler cannot write to its usual cache, in the home folder, it tries for ever.
        environ = os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
        for variant in VARIANTS[name]:
            target = folder / variant.file
            partial = target.with_suffix(".partial")
            command = compile_command(name, variant, partial, extra)
            subprocess.run(command, check=True, env=environ, timeout=_PATIENCE)  # noqa: S603 # nosec B603 # our own arguments
            partial.replace(target)  # a process may have the old one loaded
            built.append(target)
    return built


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the libraries go")
    parser.add_argument("--machine", choices=list(VARIANTS), help="build for another architecture")
    args = parser.parse_args()
    for file in build(args.folder, args.machine):
        print(file)

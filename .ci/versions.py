"""Tests of Pagewise with other versions of its dependencies than constraints.txt has.

    python .ci/versions.py lowest|newest|cuda [options of pytest]

Each kind has an environment of its own in ~/.cache/pagewise-versions (VERSIONS=DIR takes another folder), which uv
updates to the present versions of the package index. TORCH_INDEX_URL selects the build of torch, as for
``make setup``; without it, the index's own, which on Linux has CUDA and takes 5 GiB of disk.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROOMS = ("shared", "kernels", "services/scheduler", "services/executor", "services/gateway", "services/cli")

SERVED = (
    "tests/shared", "tests/scheduler", "tests/gateway", "tests/versions", "tests/executor/models",
    "tests/executor/cuda_graphs/test_model_body.py", "tests/executor/test_greedy_equality.py",
)  # fmt: skip
"""Tests of the parts that depend on package versions: the wire, HTTP, text, and the loading of every model family."""
WITHOUT_A_DEVICE = (
    "tests/versions", "tests/executor/attention", "tests/executor/cuda_graphs/test_captures.py",
    "tests/executor/cuda_graphs/test_model_body.py", "tests/executor/kv", "tests/executor/models/test_launches.py",
    "tests/executor/models/test_loader.py", "tests/kernels/test_compile.py", "tests/kernels/test_dependent_launch.py",
    "tests/executor/test_compile_ahead.py", "tests/kernels/test_launch.py",
)  # fmt: skip
"""Tests of torch's CUDA build that need no device: imports, names, compiled kernels, and fakes of the driver."""

KINDS: dict[str, tuple[list[str], list[str], tuple[str, ...]]] = {
    "lowest": (["--resolution=lowest-direct"], [], SERVED),
    "newest": ([], [], SERVED),
    # The versions of a machine with an H200 on which Pagewise has run. The interpreter of Triton 3.6 fails with NumPy
    # 2.4.
    "cuda": ([], ["torch==2.11.0", "triton==3.6.0", "transformers==5.17.0", "numpy<2.4"], WITHOUT_A_DEVICE),
}
"""By kind: options of uv's resolver, versions that are given, and the tests."""

# The interpreter of Triton 3.6 makes integers of arrays of one element.
INTERPRETER = ("-W", "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
NOT_HERE = "not long and not chaos and not gpu and not compose and not packaging and not observability and not browser"


def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command, from the root of the repository."""
    return subprocess.run(command, cwd=ROOT, text=True, **options)  # noqa: S603


def resolve(
    uv: list[str], options: list[str], given: list[str], source: str = "pyproject.toml", lines: str = ""
) -> str:
    """Return the versions of all packages that Pagewise needs, as the lines of a requirements file.

    ``given``: versions that are given. ``source``: "-" for the requirements of ``lines`` instead of Pagewise's own.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(given))
        constraints.flush()
        extras = [] if source == "-" else ["--extra=executor", "--extra=dev"]
        command = [*uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", f"--python={sys.executable}"]
        command += [*options, *extras, f"--constraints={constraints.name}", source]
        return run(command, input=lines, check=True, stdout=subprocess.PIPE).stdout


def install(kind: str, folder: Path) -> Path:
    """Bring the environment of a kind up to date; return its Python."""
    options, given, _ = KINDS[kind]
    own, python = folder / "uv", folder / kind / "bin" / "python"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", f"--target={own}", "uv"], check=True)
    uv = [str(own / "bin" / "uv")]
    if not python.exists():
        run([sys.executable, "-m", "venv", str(folder / kind)], check=True)
    indexes: list[str] = []
    if url := os.environ.get("TORCH_INDEX_URL"):
        # Of torch alone: such an index has other packages as well, in older versions.
        (torch,) = set(re.findall(r'"(torch\b.*)"', (ROOT / "pyproject.toml").read_text()))
        only = resolve(uv, [*options, f"--default-index={url}"], given, "-", torch)
        given = [*given, *re.findall(r"^torch==.+$", only, re.MULTILINE)]
        indexes = [f"--index={url}", "--index-strategy=unsafe-best-match"]
    versions = folder / f"{kind}.txt"
    versions.write_text(resolve(uv, [*options, *indexes], given))
    run([*uv, "pip", "sync", "--quiet", f"--python={python}", *indexes, str(versions)], check=True)
    return python


def main(kind: str, options: list[str]) -> int:
    """Install and test one kind; returns the exit code of the tests."""
    folder = Path(os.environ.get("VERSIONS") or Path.home() / ".cache" / "pagewise-versions")
    began = time.monotonic()
    python = install(kind, folder)
    print(f"installed in {time.monotonic() - began:.0f} s: the versions are in {folder}/{kind}.txt", flush=True)
    paths = [ROOT, *(ROOT / room for room in ROOMS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, filter(None, paths)))}
    command = [str(python), "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", NOT_HERE]
    return run([*command, *INTERPRETER, *KINDS[kind][2], *options], env=environment).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(KINDS)} [options of pytest]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))

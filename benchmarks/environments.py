"""Environments of packages that cannot be installed beside Pagewise, and models in other formats. All are kept.

An environment is a folder below ``~/.cache/pagewise-benchmarks`` (``XDG_CACHE_HOME`` is respected), made anew when its
list of packages changes.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def _kept() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewise-benchmarks"


def python(packages: Path, torch: bool = False) -> Path:
    """The interpreter of the environment with the packages that a file lists, made if it is not there.

    ``torch``: whether the tested version of torch is installed first.

    Raises:
        subprocess.CalledProcessError: a package cannot be installed.
    """
    name = packages.stem
    folder = _kept() / f"{name}-{hashlib.sha256(packages.read_bytes()).hexdigest()[:12]}"
    found = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        print(f"making an environment for {name}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(found), "-m", "pip", "install", "--quiet"]
        if torch:  # by itself, as in the Makefile: pip's settings choose its build
            build = next(line for line in _CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
            subprocess.run([*install, build], check=True)
        # The list is complete: pip would add dependencies that it omits on purpose.
        subprocess.run([*install, "--no-deps", "-r", str(packages)], check=True)
        done.touch()
    return found


def packages(listed: Path) -> Path:
    """The folder with the packages that a file lists, without their dependencies, for a process's PYTHONPATH.

    Raises:
        subprocess.CalledProcessError: a package cannot be installed.
    """
    folder = _kept() / f"{listed.stem}-{hashlib.sha256(listed.read_bytes()).hexdigest()[:12]}"
    done = folder / "installed"
    if not done.exists():
        print(f"installing what {listed.name} lists", file=sys.stderr)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", str(folder)]
        subprocess.run([*install, "-r", str(listed)], check=True)
        done.touch()
    return folder


def openvino_model(interpreter: Path, model: Path, weights: str = "fp32") -> Path:
    """A model exported to OpenVINO, with weights in ``fp32`` or ``int4``."""
    exported = _converted(model, "openvino" if weights == "fp32" else f"openvino-{weights}")
    if not (exported / "openvino_model.bin").exists():
        print(f"exporting {model} to OpenVINO in {weights}", file=sys.stderr)
        command = ["export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
        subprocess.run(
            [str(interpreter.with_name("optimum-cli")), *command, "--weight-format", weights, str(exported)],
            check=True,
            stdout=sys.stderr,
        )
    return exported


def gguf_model(interpreter: Path, model: Path, kind: str) -> Path:
    """A Llama as a GGUF file that llama.cpp has quantised: ``Q4_0``, ``Q4_K_M`` or another of its formats."""
    written = _converted(model, f"gguf-{kind}").with_suffix(".gguf")
    if not written.exists():
        print(f"writing {model} as GGUF in {kind}", file=sys.stderr)
        script = Path(__file__).parent / "serving" / "peers" / "llama_cpp_model.py"
        partial = written.with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([str(interpreter), str(script), str(model), kind, str(partial)], check=True, stdout=sys.stderr)
        partial.replace(written)
    return written


def _converted(model: Path, form: str) -> Path:
    """Where a model is kept in another form, by the hash of its files."""
    weights = hashlib.sha256()
    for path in [*sorted(model.glob("*.safetensors")), model / "config.json"]:
        weights.update(path.read_bytes())
    return _kept() / "models" / f"{form}-{weights.hexdigest()[:12]}"

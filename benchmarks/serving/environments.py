"""Environments of peers that cannot be installed beside Pagewise, and models in their formats. All of it is kept.

An environment is a folder below ``~/.cache/pagewise-benchmarks`` (``XDG_CACHE_HOME`` is respected), made anew when its
list of packages changes.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

_LISTS = Path(__file__).parent / "peers"
_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def _kept() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewise-benchmarks"


def python(name: str) -> Path:
    """The interpreter of the environment whose packages are listed in ``peers/NAME.txt``, made if it is not there."""
    packages = _LISTS / f"{name}.txt"
    folder = _kept() / f"{name}-{hashlib.sha256(packages.read_bytes()).hexdigest()[:12]}"
    found = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        print(f"making an environment for {name}", file=sys.stderr)
        torch = next(line for line in _CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(found), "-m", "pip", "install", "--quiet"]
        # torch by itself, as in the Makefile: whoever installs chooses its build by pip's settings.
        subprocess.run([*install, torch], check=True)
        # The list is complete, and pip would add what it leaves out.
        subprocess.run([*install, "--no-deps", "-r", str(packages)], check=True)
        done.touch()
    return found


def openvino_model(interpreter: Path, model: Path) -> Path:
    """A model exported to OpenVINO in float32."""
    weights = hashlib.sha256()
    for path in [*sorted(model.glob("*.safetensors")), model / "config.json"]:
        weights.update(path.read_bytes())
    exported = _kept() / "models" / f"openvino-{weights.hexdigest()[:12]}"
    if not (exported / "openvino_model.bin").exists():
        print(f"exporting {model} to OpenVINO", file=sys.stderr)
        command = ["export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
        subprocess.run(
            [str(interpreter.with_name("optimum-cli")), *command, "--weight-format", "fp32", str(exported)],
            check=True,
            stdout=sys.stderr,
        )
    return exported

"""Write requirements/*.lock: the packages of each image, with the hashes of all their files in the package index.

Versions come from constraints.txt. ``make lock`` runs this, with uv and the network.

torch itself is not locked. Which build an image gets, and from which index, is an argument of its build (CPU, a version
of CUDA, a mirror's own), and every build has hashes of its own. The dependencies of its CPU build are locked.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = {"build": None, "scheduler": "", "gateway": "gateway", "executor": "executor-service"}
"""The locks: None for the packages of the build, otherwise the extra of the project that an image installs."""

HEAD = "# Made by `make lock` from pyproject.toml and constraints.txt. torch is not here: .ci/lock.py says why.\n"


def lock_file(name: str) -> Path:
    """Return where a lock is."""
    return ROOT / "requirements" / f"{name}.lock"


def requirements(name: str) -> list[str]:
    """Return the requirements of a lock in pyproject.toml."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = LOCKS[name]
    if extra is None:
        hook = table["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
        return [*table["build-system"]["requires"], *hook["dependencies"]]
    optional = table["project"]["optional-dependencies"][extra] if extra else []
    return [*table["project"]["dependencies"], *optional]


def main(uv: list[str]) -> int:
    """Write the locks by this uv; returns the exit code."""
    # The dependencies of torch's CPU build are wanted: of PyTorch's own, or of pip's in a local folder.
    torch = f"--find-links={links}" if (links := os.environ.get("PIP_FIND_LINKS")) else "--torch-backend=cpu"
    for name in LOCKS:
        command = [*uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
        command += ["--python-version=3.11", "--python-platform=linux", "--no-emit-package=torch", torch]
        command += ["--constraints=constraints.txt", "-"]
        given = "\n".join(requirements(name))
        done = subprocess.run(command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True)  # noqa: S603
        if done.returncode:
            return done.returncode
        lock_file(name).write_text(HEAD + done.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["uv"]))

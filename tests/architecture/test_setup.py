"""What ``make setup`` does where the CPU operations cannot be compiled, with a pip that installs nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPERATIONS = Path("kernels/pagewise_kernels/cpu")

PYTHON = """#!/bin/sh
echo "$*" >> calls
case "$*" in *" -e "*)
    if test -n "$HATCH_BUILD_NO_HOOKS"; then exit 0; fi
    test -e network || exit 1
    touch kernels/pagewise_kernels/cpu/_cpu_4.so
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that setup depends on, and a virtual environment whose Python writes down what it is called with."""
    (tmp_path / OPERATIONS).mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "hatch_build.py", str(OPERATIONS / "build.py")):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "pagewise"):
        (tmp_path / ".venv/bin" / name).write_text(PYTHON)
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    return tmp_path


def make(checkout: Path, target: str) -> tuple[str, int]:
    """Run ``make``; return what it said on standard error, and how many times pip was to install the checkout."""
    (checkout / "calls").unlink(missing_ok=True)
    command = ["make", f"PYTHON={sys.executable}", target, "ARGS=model"]
    environ = {"PATH": os.environ["PATH"]}  # nothing of the make that runs the tests
    done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    calls = (checkout / "calls").read_text() if (checkout / "calls").exists() else ""
    assert ("serve model" in calls) == (target == "serve")
    return done.stderr, calls.count(" -e ")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_setup_without_cpu_operations_says_so_each_time_and_how_to_try_again(checkout: Path) -> None:
    assert make(checkout, "serve")[1] == 2, "with the compiler, and without it"
    for target in ("serve", "setup"):
        said, installs = make(checkout, target)
        assert "The CPU operations are not compiled" in said
        assert "rm .venv/.installed && make setup" in said
        assert installs == 0, "serving needs no network"
    (checkout / "network").touch()
    (checkout / ".venv/.installed").unlink()
    said, installs = make(checkout, "setup")
    assert (said, installs) == ("", 1)
    assert make(checkout, "serve") == ("", 0)

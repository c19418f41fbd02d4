"""The calls of ``make setup``, also where the CPU operations cannot be compiled; with a fake pip and a fake uv."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPERATIONS = Path("kernels/pagewise_kernels/cpu")

PYTHON = """#!/bin/sh
echo "${0##*/} $*" >> calls
case "$0 $*" in *uv\\ *) test -e uv-fails && exit 1; esac
case "$*" in *" -e "*)
    if test -n "$HATCH_BUILD_NO_HOOKS"; then exit 0; fi
    test -e network || exit 1
    touch kernels/pagewise_kernels/cpu/_cpu_4.so
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that setup depends on, and a virtual environment whose Python records its calls."""
    (tmp_path / OPERATIONS).mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "hatch_build.py", str(OPERATIONS / "build.py")):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "pagewise"):
        (tmp_path / ".venv/bin" / name).write_text(PYTHON)
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    return tmp_path


def make(checkout: Path, target: str, uv: str = "", **variables: str) -> tuple[str, int]:
    """Run ``make``; return its standard error, and how many times pip was to install the checkout."""
    (checkout / "calls").unlink(missing_ok=True)
    command = ["make", f"PYTHON={sys.executable}", f"UV={uv}", target, "ARGS=model"]
    environ = {"PATH": os.environ["PATH"]} | variables  # nothing of the make that runs the tests
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


@pytest.fixture
def uv(checkout: Path) -> str:
    """It calls its Python, and fails if there is a file ``uv-fails``."""
    file = checkout / "uv"
    file.write_text(PYTHON)
    file.chmod(0o755)
    (checkout / "network").touch()
    return str(file)


def calls(checkout: Path) -> list[str]:
    return (checkout / "calls").read_text().splitlines()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_uv_installs_what_pip_would_from_the_same_sources(checkout: Path, uv: str) -> None:
    sources = {
        "PIP_FIND_LINKS": "/wheels",
        "PIP_INDEX_URL": "https://mirror/simple",
        "PIP_EXTRA_INDEX_URL": "https://own",
    }
    assert make(checkout, "setup", uv, TORCH_INDEX_URL="https://torch/cpu", **sources) == ("", 1)
    torch, package = calls(checkout)
    assert all(
        f"--python .venv/bin/python --index-strategy unsafe-best-match --find-links {sources['PIP_FIND_LINKS']} "
        f"--index {sources['PIP_EXTRA_INDEX_URL']}" in one
        for one in (torch, package)
    )
    assert torch.startswith("uv pip install")
    assert "--default-index https://torch/cpu torch==" in torch
    assert package.startswith("uv pip install")
    assert package.endswith("--default-index https://mirror/simple -c constraints.txt -e .[executor,dev]")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_pip_installs_what_uv_cannot(checkout: Path, uv: str) -> None:
    (checkout / "uv-fails").touch()
    assert make(checkout, "setup", uv, TORCH_INDEX_URL="https://torch/cpu") == ("", 2)
    by = [one.split(" ")[0] for one in calls(checkout)]
    assert by == ["uv", "python", "uv", "python"]
    assert "python -m pip install --quiet --index-url https://torch/cpu torch==" in calls(checkout)[1]
    assert calls(checkout)[3].endswith("-m pip install --quiet -c constraints.txt -e .[executor,dev]")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_uv_installs_without_the_cpu_operations_if_they_cannot_be_compiled(checkout: Path, uv: str) -> None:
    (checkout / "network").unlink()
    said, _ = make(checkout, "serve", uv)
    assert "The CPU operations are not compiled" in said
    by = [one.split(" ")[0] for one in calls(checkout) if " -e " in one]
    assert by == ["uv", "python", "uv"], "with the compiler by both, and without it"

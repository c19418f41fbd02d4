"""The facts in every result file beside its numbers: the commit, the command and the machine."""

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMIT_VARIABLE = "BENCHMARKED_COMMIT"
"""The environment variable that names the commit where the repository came without .git, or with another one."""

_ROOT = Path(__file__).resolve().parents[1]


def record_file(name: str) -> str:
    """Return the argument of ``--json``. The kept results belong to a commit, so the tree is checked before the run: if
    it has uncommitted changes, the numbers must be written to a file elsewhere.

    Raises:
        argparse.ArgumentTypeError: the file is one of the kept results, and there are such changes.
    """
    if Path(name).resolve().is_relative_to(_ROOT / "benchmarks" / "results") and _is_changed():
        raise argparse.ArgumentTypeError("results are of a commit, and there are changes: commit, or write elsewhere")
    return name


def write_record(path: str, numbers: dict[str, Any], *, command: str | None = None, **machine: str | int) -> None:
    """Write ``numbers`` to a JSON file, which is never there in part: a benchmark that writes after each row may be
    killed.

    ``command``: the command that has measured them, by default the module that runs. ``machine``: more facts about it,
    the device for instance.
    """
    record = {
        "commit": _commit(),
        "command": command if command is not None else _command(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version(), **machine},
        **numbers,
    }
    written = Path(f"{path}.part")
    written.write_text(json.dumps(record, indent=1) + "\n")
    written.replace(path)


@functools.cache  # for the life of a process: its code does not change
def _commit() -> str:
    if (named := os.environ.get(COMMIT_VARIABLE)) is not None:
        return named
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD")
    return commit + ("+changes" if _is_changed() else "") if commit else "unknown"


def _command() -> str:
    module = Path(sys.argv[0]).resolve().relative_to(_ROOT).with_suffix("")
    return " ".join(["python -m", ".".join(module.parts), *map(shown, sys.argv[1:])])


def _is_changed() -> bool:
    """Whether the code differs from the commit. Results and documents are no code."""
    ours = ("--", ":/", ":/!benchmarks/results", ":/!docs")
    return bool(_output("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no", *ours))


def shown(argument: str) -> str:
    """An argument without the folders of this machine."""
    option, equals, value = argument.rpartition("=")
    return option + equals + (Path(value).name if value.startswith("/") else value)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""

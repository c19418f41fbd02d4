"""What every result file says beside its numbers: the commit, the command and the machine."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def write_record(path: str, numbers: dict[str, Any], **machine: str | int) -> None:
    """Write ``numbers`` to a JSON file. ``machine``: what else to say of it, the device for instance."""
    commit = _output("git", "rev-parse", "--short", "HEAD") or "unknown"
    if _output("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs"):
        commit += "+changes"
    module = Path(sys.argv[0]).resolve().relative_to(Path(__file__).resolve().parents[1]).with_suffix("")
    record = {
        "commit": commit,
        "command": " ".join(["python -m", ".".join(module.parts), *sys.argv[1:]]),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version(), **machine},
        **numbers,
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


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

"""How long ``make setup`` takes in a fresh checkout, by pip and by uv, in turns.

    python -m benchmarks.start.setup [--rounds 2] [--uv uv] [--json FILE]

Each turn copies the files of this checkout, makes a virtual environment there, and installs everything, the operations
in C included. The first round starts with an empty cache of uv and of pip, the following ones use the caches that it
has filled, as on a machine that has set up another project with the same packages.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.record import record_file, write_record

ROOT = Path(__file__).parents[2]


def copy_of(folder: Path) -> Path:
    """The files of this checkout, as git lists them, in a folder."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def one_setup(place: Path, uv: str) -> float:
    """Seconds of ``make setup``; with pip if ``uv`` is empty."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        checkout = copy_of(Path(name))
        environ = os.environ | {"UV_CACHE_DIR": str(place / "uv-cache"), "PIP_CACHE_DIR": str(place / "pip-cache")}
        began = time.perf_counter()
        command = ["make", "--no-print-directory", "setup", f"UV={uv}"]
        subprocess.run(command, cwd=checkout, env=environ, check=True)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--uv", default=shutil.which("uv"), required=shutil.which("uv") is None)
    parser.add_argument("--json", type=record_file)
    options = parser.parse_args()
    results: dict[str, list[float]] = {"pip": [], "uv": []}
    with tempfile.TemporaryDirectory() as place:
        for number in range(options.rounds):
            for name, uv in (("uv", options.uv), ("pip", "")):
                results[name].append(one_setup(Path(place), uv))
                cache = "empty" if not number else "filled"
                print(f"{name}: {results[name][-1]:.0f} s, caches {cache}", flush=True)
    if options.json:
        write_record(options.json, {"setup_s": results})


if __name__ == "__main__":
    main()

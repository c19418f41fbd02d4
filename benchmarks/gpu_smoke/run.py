"""The first hour on a GPU, in calls of at most four minutes each: the tests, and the figures that matter.

    make gpu-smoke [PART=1]
    python3 -m benchmarks.gpu_smoke.run [--part 1 2] [--wheels DIR] [--out DIR] [--commit HASH] [--dry-run]

It needs a Python with PyTorch, Triton, transformers and pytest, such as a machine has that is lent with a GPU, and no
network: the few packages that are missing come from ``--wheels``. Nothing of Pagewise has to be installed.

Each step is a process with a limit of its own. It writes every row when it has been measured, to a file that is named
after the device, so whatever ends it costs only the missing rows. ``gpu-smoke-DEVICE.json`` has the outcomes of the
steps, and the end of their output. Last comes a table of goals, measurements, and predictions.
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_smoke.goals import results, table
from benchmarks.gpu_smoke.plan import CARRIED, PARTS, ROOMS, Step, device_label
from benchmarks.record import COMMIT_VARIABLE, record_file, write_record

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".gpu-smoke"
"""The folder that later calls on the same machine use again: installed wheels, and compiled kernels."""
_LAST_LINES = 40
_FREE_SHARE = 0.9
"""How much of the memory of a device without other users is free: a context takes some."""
_FREEING_SECONDS = 15


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", type=int, nargs="+", choices=sorted(PARTS), help="only these (default: all)")
    parser.add_argument("--wheels", type=Path, help=f"folder of wheels of what is missing: {', '.join(CARRIED)}")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the records")
    parser.add_argument("--commit", help="commit that the records name, where the repository came without .git")
    parser.add_argument("--dry-run", action="store_true", help="only print what would run")
    args = parser.parse_args()
    parts = {number: PARTS[number] for number in args.part or PARTS}
    if args.dry_run:
        print(described(parts))
        return 0
    if args.commit:
        os.environ[COMMIT_VARIABLE] = args.commit  # of the steps' records, and of the summary
    try:
        device = device_name()
        environment = prepared(args.wheels)
        args.out.mkdir(parents=True, exist_ok=True)
        record_file(str(args.out / "new.json"))
    except (SmokeError, argparse.ArgumentTypeError) as error:
        print(f"gpu-smoke: {error}", file=sys.stderr)
        return 1
    print(f"on {device}", flush=True)
    return run_parts(parts, device, args.out, environment)


class SmokeError(Exception):
    """Nothing can be run; the text has the reason."""


def described(parts: Mapping[int, Sequence[Step]]) -> str:
    """The plan as text."""
    lines = []
    for number, steps in parts.items():
        lines.append(f"part {number}, at most {sum(step.seconds for step in steps)} s:")
        lines += [f"  {step.name}, {step.seconds} s: python -m {shlex.join(step.arguments)}" for step in steps]
    return "\n".join([*lines, "goals:", table(results(Path("none"), "", ""))])


def device_name() -> str:
    """The name of the CUDA device, which a process of its own asks for: this one must not take memory there.

    Raises:
        SmokeError: there is none, or PyTorch is missing or sees none.
    """
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SmokeError(f"PyTorch does not work in {sys.executable}: {last}")
    if not (name := done.stdout.strip()):
        raise SmokeError("there is no GPU here: torch sees no CUDA device")
    return name


def prepared(wheels: Path | None) -> dict[str, str]:
    """The environment of the steps, with missing wheels installed into a folder of its own.

    Raises:
        SmokeError: packages are missing, and there are no wheels of them.
    """
    site = KEPT / "site"
    missing = [
        name
        for name, module in CARRIED.items()
        if importlib.util.find_spec(module) is None and not (site / module).exists()
    ]
    if missing and wheels is None:
        raise SmokeError(f"packages are missing: {', '.join(missing)}. Bring wheels of them along, and name --wheels")
    if missing:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
        done = subprocess.run(
            [*install, "--no-deps", "--upgrade", "--target", str(site), *missing],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SmokeError(f"{wheels} lacks wheels for this Python of {', '.join(missing)}:\n{done.stderr.strip()}")
    paths = [str(site), *(str(ROOT / room) for room in ROOMS), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(KEPT / "triton"),  # one for all calls: kernels are compiled once
        "HF_HUB_OFFLINE": "1",
    }
    return dict(os.environ) | environment


def run_parts(parts: Mapping[int, Sequence[Step]], device: str, out: Path, environment: Mapping[str, str]) -> int:
    """Run the steps one after the other, and record the outcome of each; returns the exit status."""
    label = device_label(device)
    summary = out / f"gpu-smoke-{label}.json"
    rows: list[dict[str, Any]] = json.loads(summary.read_text())["rows"] if summary.exists() else []
    failed = False
    for number, steps in parts.items():
        for step in steps:
            record = out / f"{step.name}-{label}.json"
            print(f"== {step.name}, at most {step.seconds} s", flush=True)
            began = time.monotonic()
            if step.waits:
                wait_for_memory(environment)
                step = step._replace(seconds=max(1, step.seconds - int(time.monotonic() - began)))
            missing = [name for name in step.needs if not _is_there(name, environment)]
            if missing:
                outcome, last_lines = f"left out: {', '.join(missing)} missing", list[str]()
            else:
                outcome, last_lines = run_step(step, record, environment)
            seconds = round(time.monotonic() - began, 1)
            print(f"== {step.name}: {outcome} after {seconds} s", flush=True)
            failed |= outcome != "done"
            # Steps of former calls stay; one that runs again replaces its row.
            rows = [row for row in rows if row["step"] != step.name]
            rows.append({"part": number, "step": step.name, "outcome": outcome, "seconds": seconds})
            if outcome != "done":
                rows[-1]["last_lines"] = last_lines
            write_record(str(summary), {"rows": rows}, command="python -m benchmarks.gpu_smoke.run", device=device)
    print("\n".join(f"part {row['part']} {row['step']:<30} {row['outcome']:<12}{row['seconds']:>7} s" for row in rows))
    print(table(results(out, label, json.loads(summary.read_text())["commit"])))
    return int(failed)


def wait_for_memory(environment: Mapping[str, str], seconds: float = _FREEING_SECONDS) -> None:
    """Wait until the memory of the device is free, which it is some time after a process has ended, for ``seconds``."""
    ask = (
        "import sys, time, torch\nend = time.monotonic() + float(sys.argv[1])\n"
        f"while (m := torch.cuda.mem_get_info())[0] < {_FREE_SHARE} * m[1] and time.monotonic() < end:\n"
        "    time.sleep(0.2)\n"
        "print(f'{m[0] / 2**30:.1f} of {m[1] / 2**30:.1f} GiB of the device are free', flush=True)"
    )
    subprocess.run([sys.executable, "-c", ask, str(seconds)], env=dict(environment), check=False)


def _is_there(module: str, environment: Mapping[str, str]) -> bool:
    """Whether the steps can import a module, installed or carried."""
    carried = (Path(folder) / module for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder)
    return importlib.util.find_spec(module) is not None or any(path.exists() for path in carried)


def run_step(step: Step, record: Path, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Run a step; returns "done", "failed (status)" or "cut off", and the last lines that it has printed.

    It has a process group of its own, which is ended with it, or with this process if that gets a signal to stop. No
    session of its own: that would outlive a caller that ends all processes of a command.
    """
    command = [sys.executable, "-m", *step.arguments, step.record, str(record)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", process_group=0,
    )  # fmt: skip
    lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)

    def show() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip().replace(str(ROOT), "."))

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        status = process.wait(step.seconds)
        outcome = "done" if status == 0 else f"failed ({status})"
    except subprocess.TimeoutExpired:
        outcome = "cut off"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _end(process)
        reader.join()
        assert process.stdout is not None
        process.stdout.close()
    return outcome, list(lines)


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _end(process: "subprocess.Popen[str]") -> None:
    """End the group of a process; some of it may be left though the process itself has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())

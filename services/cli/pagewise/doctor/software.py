"""Checks of Python, packages, torch with its devices, and environment variables."""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pagewise_shared.config import VARIABLE_PREFIX, misspelt_variables
from pagewise_shared.version import package_version

from pagewise.doctor.machine import Finding, gib, noted
from pagewise.preflight import EXECUTOR, GATEWAY

_SECONDS = 120
_KERNEL_SECONDS = 300
"""For the kernels of all GPUs: where none is in Triton's cache, the first GPU compiles for half a minute."""
_KERNEL_ADVICE = "try the tested versions of torch and triton; --kernels torch serves without kernels, more slowly"
_EVERYWHERE = ("argcomplete", "msgspec", "prometheus_client", "pyzmq", "tqdm", "uvloop")
_SHOWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TRITON_INTERPRET", "LD_PRELOAD")
_NAMED_VARIABLES = ("HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy")
"""Variables without their values: tokens, folders of people, and hosts."""


def check_python() -> Iterator[Finding]:
    """Look at the interpreter and at Pagewise itself."""
    text = f"{platform.python_implementation()} {platform.python_version()}, {platform.system()} {platform.release()}, "
    text += f"{platform.machine()}, {' '.join(platform.libc_ver()) or 'unknown C library'}"
    advice = "the CPU operations are compiled for glibc: PyTorch computes without them"
    yield noted("python", text, advice if platform.libc_ver()[0] != "glibc" else "")
    yield Finding("pagewise", package_version())


def check_packages(constraints: Path | None = None) -> Iterator[Finding]:
    """Compare the installed versions with the tested ones."""
    tested = read_constraints(constraints)
    missing, others, same = [], [], 0
    for name in dict.fromkeys((*_EVERYWHERE, *GATEWAY, *EXECUTOR)):
        try:
            found = version(name)
        except PackageNotFoundError:
            missing.append(name)
            continue
        if found.partition("+")[0] == tested.get(_canonical(name), found.partition("+")[0]):
            same += 1
        else:
            others.append(f"{name} {found} (tested: {tested[_canonical(name)]})")
    if missing:
        advice = "pip install 'pagewise[executor]', or for a gateway alone 'pagewise[gateway]'"
        yield Finding("packages", f"not installed: {', '.join(missing)}", "problem", advice)
    if others:
        yield Finding("packages", ", ".join(others), "note", "if something fails, try the tested versions")
    yield Finding("packages", f"{same} in the tested version" if tested else f"{same} installed")


def read_constraints(file: Path | None = None) -> dict[str, str]:
    """Return the tested version of each package; none if the list is not here."""
    here = Path(__file__).parents[1]
    for path in (file,) if file else (here / "constraints.txt", here.parents[2] / "constraints.txt"):
        if path is not None and path.is_file():
            lines = (line.partition("==") for line in path.read_text().splitlines() if "==" in line)
            return {_canonical(name): version for name, _, version in lines}
    return {}


def check_torch() -> Iterator[Finding]:
    """Look at torch, its devices, and the compiled operations, in a process of their own."""
    command = [sys.executable, "-m", "pagewise_executor.devices"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)  # noqa: S603  # nosec B603 # no shell
    except subprocess.TimeoutExpired:
        advice = "nvidia-smi says whether the driver answers; is the disk of the packages slow?"
        yield Finding("torch", f"not imported after {_SECONDS} s", "problem", advice)
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        yield Finding("torch", last, "problem", "pip install --force-reinstall 'pagewise[executor]'")
        return
    found = json.loads(done.stdout.splitlines()[-1])
    yield from torch_findings(found)
    if found["devices"] or "TRITON_INTERPRET" in os.environ:
        yield from check_kernels()


def check_kernels() -> Iterator[Finding]:
    """Run each Triton kernel once on each GPU, or in Triton's interpreter, in a process that one of them may end."""
    command = [sys.executable, "-m", "pagewise_executor.kernel_checks.run"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_KERNEL_SECONDS)  # noqa: S603  # nosec B603 # no shell
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode()  # bytes, also if text was requested
        yield from kernel_findings(printed, f"it had not ended after {_KERNEL_SECONDS} s")
        return
    last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
    ended = f"it ended the process by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else last
    yield from kernel_findings(done.stdout, ended if done.returncode else "")


def kernel_findings(printed: str, ended: str) -> Iterator[Finding]:
    """Return the kernels of each device that do not work, from the output of ``kernel_checks``.

    ``ended``: the reason why the process ended before all kernels were checked; "" if it checked all.
    """
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    checked = [line for line in lines if "error" in line]
    passed: dict[str, list[float]] = {}
    for line in checked:
        seconds = passed.setdefault(line["device"], [])
        if not line["error"]:
            seconds.append(line["seconds"])
        else:
            yield Finding("kernels", f"{line['device']}: {line['kernel']}: {line['error']}", "problem", _KERNEL_ADVICE)
    if ended:
        running = f"{lines[-1]['device']}: {lines[-1]['kernel']}: " if lines and "error" not in lines[-1] else ""
        yield Finding("kernels", f"{running}{ended}", "problem", _KERNEL_ADVICE)
    for device, seconds in passed.items():
        yield Finding("kernels", f"{device}: {len(seconds)} compute what PyTorch does, checked in {sum(seconds):.1f} s")


def torch_findings(found: Mapping[str, Any]) -> Iterator[Finding]:
    """Return findings about the output of ``device_report``."""
    build = f"CUDA {found['cuda']}" if found["cuda"] else "CPU"
    yield Finding("torch", f"{found['torch']} ({build} build), CPU capability {found['capability']}")
    for number, gpu in enumerate(found["devices"]):
        free, size = gpu["free"], gpu["memory"]
        text = f"{number}: {gpu['name']}, capability {gpu['capability']}, {gib(free)} of {gib(size)} free"
        advice = "another process uses it: nvidia-smi shows which; CUDA_VISIBLE_DEVICES chooses another one"
        yield noted("gpu", text, advice if free < size / 2 else "")
    if found["no_gpu"]:
        reason, _, advice = found["no_gpu"].partition(": ")
        yield Finding("gpu", f"not used: {reason}", "problem", advice)
    elif not found["devices"]:
        yield Finding("gpu", "none; models are computed on the CPU")
    operations = found["operations"]
    build_again = "python -m pagewise_kernels.cpu.build, after pip install ziglang"
    if operations is None:
        yield Finding("cpu operations", f"none ({found['no_operations']})", "note", build_again)
        return
    narrower = ", narrower than this CPU" if operations["narrower"] else ""
    yield noted("cpu operations", operations["file"] + narrower, build_again if narrower else "")


def check_environment(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Name the variables that change how Pagewise works, with the values of variables that are never secret."""
    shown = [f"{name}={environ[name]}" for name in _SHOWN_VARIABLES if name in environ]
    shown += [f"{name} is set" for name in _NAMED_VARIABLES if environ.get(name)]
    shown += [f"{name} is set" for name in sorted(environ) if name.startswith(VARIABLE_PREFIX)]
    yield Finding("environment", ", ".join(shown) or "no variable that matters is set")
    for warning in misspelt_variables(environ):
        yield Finding("environment", warning, "note", "correct or unset it")


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")

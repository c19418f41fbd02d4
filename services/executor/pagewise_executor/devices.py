"""The CPU and the GPUs as torch sees them, and why torch does not use an NVIDIA GPU that this machine has.

``python -m pagewise_executor.devices`` prints a report in JSON for ``pagewise doctor``. It is a process of its own,
because importing torch takes seconds and may fail.
"""

import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pagewise_shared.cpu_threads import available_cores

_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""By the first number of CUDA's version: the first driver that runs programs built for it."""
_INDEX = "https://download.pytorch.org/whl"


def set_cpu_threads(threads: int | Literal["auto"]) -> int:
    """Give torch ``threads`` threads, or as many as this process has cores of its own; return the number."""
    count = available_cores() if threads == "auto" else threads
    torch.set_num_threads(count)
    return count


def device_name(device: torch.device) -> str:
    """Return the device with the product name of its GPU."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def median_milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call on the current GPU, after a call that compiled it."""
    times = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return float(statistics.median(times))


def computes_bfloat16() -> bool:
    """Return whether this processor has instructions for products of bfloat16: AVX-512 BF16, AMX, or Arm's BF16.

    Without them oneDNN converts to float32 and back, which takes longer than to compute in float32.
    """
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_tile", "bf16"))


def why_no_gpu(root: Path = Path("/"), built_for: str | None = torch.version.cuda) -> str:
    """Return why torch sees no CUDA device though there is an NVIDIA GPU, and the remedy; "" if there is no GPU.

    ``root``: the folder with /dev and /proc. ``built_for``: the version of CUDA that torch is built for.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not list((root / "dev").glob("nvidia[0-9]*")):
        return ""
    if built_for is None:
        return (
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} is built for the CPU alone: pip install "
            f"--force-reinstall --index-url {_INDEX}/cu130 torch=={torch.__version__.partition('+')[0]}"
        )
    driver = _driver_version(root / "proc/driver/nvidia/version")
    oldest = _OLDEST_DRIVER.get(int(built_for.partition(".")[0]), 0)
    if driver and int(driver.partition(".")[0]) < oldest:
        return (
            f"the NVIDIA driver {driver} is too old for CUDA {built_for}, which torch {torch.__version__} is built "
            f"for: install driver {oldest} or newer, or a torch that is built for an older CUDA ({_INDEX}/cu126)"
        )
    return f"torch sees no CUDA device though this machine has an NVIDIA GPU: {_error_of_cuda()}"


def why_unfit(device: torch.device) -> str:
    """Return why this torch has no code for a CUDA device; "" if it has."""
    major, minor = torch.cuda.get_device_capability(device)
    known = [int(name[3:]) for name in torch.cuda.get_arch_list() if re.fullmatch(r"sm_\d+", name)]
    if not known or 10 * major + minor >= min(known):
        return ""
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and torch {torch.__version__} "
        f"is built for {min(known) / 10} and newer: --device cpu computes without it"
    )


def _driver_version(file: Path) -> str:
    match = re.search(r"\s(\d{3,}\.\d+(\.\d+)?)\s", file.read_text()) if file.exists() else None
    return match[1] if match else ""


def _error_of_cuda() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        text = str(error).strip()
        return text.splitlines()[0] if text else type(error).__name__
    return "nvidia-smi says whether the driver sees it"


def device_report() -> dict[str, Any]:
    """Return the build of torch, its CUDA devices, why it uses no GPU, and the compiled CPU operations."""
    from pagewise_kernels.cpu.library import LibraryMissingError, load_library

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16": computes_bfloat16(),
        "no_gpu": "" if torch.cuda.is_available() else why_no_gpu(),
        "devices": [],
        "operations": None,
        "no_operations": "",
    }
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        found["devices"].append(
            {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "free": free, "memory": total}
        )
    try:
        library = load_library()
        found["operations"] = {"file": library.variant.file, "narrower": library.narrower}
    except (LibraryMissingError, OSError) as error:
        found["no_operations"] = f"{platform.machine()}: {error}"
    return found


if __name__ == "__main__":
    json.dump(device_report(), sys.stdout)

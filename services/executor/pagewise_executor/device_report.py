"""What ``pagewise doctor`` tells of torch and its devices: ``python -m pagewise_executor.device_report`` prints JSON.

It is a process of its own, because importing torch takes seconds and may fail.
"""

import json
import platform
import sys
from typing import Any


def device_report() -> dict[str, Any]:
    """Return the build of torch, its CUDA devices, why it uses no GPU, and the compiled CPU operations."""
    import torch
    from pagewise_kernels.cpu.library import LibraryMissingError, load_library

    from pagewise_executor.cpu import computes_bfloat16
    from pagewise_executor.gpu_check import why_no_gpu

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

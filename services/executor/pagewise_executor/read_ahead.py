"""Lets the operating system read the weight files of a model while Python imports torch.

It is a script for a process of its own, because in this one each call would wait for imports that hold Python's lock.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

_STEP = 128 * 2**10
"""Bytes of one request: the usual read-ahead of a device, beyond which the kernel cuts a request off."""


def read_ahead(folder: Path) -> None:
    """Begin to read the weight files in ``folder`` into the page cache, in their order.

    Nothing is read if they would take more than half of the available memory: pages might be evicted before their use.
    """
    patterns = ("*.safetensors", "*.gguf")
    files = sorted(file for pattern in patterns for file in folder.glob(pattern) if file.is_file())
    if not hasattr(os, "posix_fadvise") or 2 * sum(file.stat().st_size for file in files) > _available():
        return
    command = [sys.executable, "-I", "-S", __file__, *map(str, files)]
    threading.Thread(target=subprocess.call, args=(command,), name="read ahead", daemon=True).start()


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def main() -> None:
    """Ask the kernel for each part of the files that the arguments name. It waits for the device, not for the data."""
    for name in sys.argv[1:]:
        file = os.open(name, os.O_RDONLY)
        for start in range(0, os.fstat(file).st_size, _STEP):
            os.posix_fadvise(file, start, _STEP, os.POSIX_FADV_WILLNEED)
        os.close(file)


if __name__ == "__main__":
    main()

"""Processes that keep cores busy beside a measurement."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.processes import spawn


@contextlib.contextmanager
def busy_processes(count: int, *, on_last_cpu: bool = False) -> Iterator[None]:
    """So many processes, each of which computes without end, wherever the kernel puts them or all on the last CPU."""
    code = "while True: pass"
    if on_last_cpu:
        code = f"import os\nos.sched_setaffinity(0, {{{max(os.sched_getaffinity(0))}}})\n{code}"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += [spawn([sys.executable, "-c", code]) for _ in range(count)]
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()

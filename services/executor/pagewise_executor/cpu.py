"""How many CPU threads torch uses."""

import os
from pathlib import Path

import torch


def set_cpu_threads(threads: int | None) -> int:
    """Give torch ``threads`` threads, or as many as this process has cores of its own; returns the number."""
    count = threads or available_cores()
    torch.set_num_threads(count)
    return count


def available_cores() -> int:
    """Physical cores this process may use: its affinity and its control group's quota, hyper-threads counted once."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists() and (limit := quota.read_text().split())[0] != "max":
        return max(1, min(len(cores), int(limit[0]) // int(limit[1])))
    return max(1, len(cores))

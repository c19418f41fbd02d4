"""The CPU threads of an executor: their number, and how they wait for each other.

torch runs every operation on a team of OpenMP threads, which meet at a barrier behind it. By default, a thread that
arrives early spins for some milliseconds before it sleeps. This saves wake-ups between the short operations of a decode
step. But when another process needs one of the cores, the spinning threads keep the core from the thread that they wait
for, and steps take 30 times as long. docs/performance.md has the measurements. The OpenMP runtime reads the variables
when it is loaded with torch, so they must be in the environment before that.

This module does not import torch, because the command line uses it for the executors that it starts.
"""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_WAIT_VARIABLES = {"GOMP_SPINCOUNT": "0"}
"""For GNU's runtime, which comes with torch: its threads sleep at once. Intel's runtime yields while it spins, and was
slower with ``KMP_BLOCKTIME=0``."""
_CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

_ROOT = Path("/")


def wait_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that keep an executor's threads from spinning.

    Add them to ``environ``, the environment of an executor, before it imports torch. Nothing is returned if the user
    has set one of the variables of waiting there.
    """
    if any(name in environ for name in _CHOSEN_BY_USER):
        return {}
    return dict(_WAIT_VARIABLES)


def openmp_threads(environ: Mapping[str, str]) -> int | None:
    """Return the number of threads that the user has chosen by ``OMP_NUM_THREADS``; None if it is not set.

    The variable may have one number for each level of nesting, of which the first counts.
    """
    number = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(number) if number.isdecimal() and int(number) > 0 else None


def available_cores(root: Path = _ROOT) -> int:
    """Return the number of physical cores that this process may use, at least 1.

    A CPU quota of the cgroup limits the result, rounded down: with more threads than the quota has cores, the kernel
    would stop all of them for a part of every period. ``root``: the folder with proc/ and sys/.
    """
    return _within_quota(_physical_cores(root), root)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the CPU quota of this process in cores; None if it has none.

    The smallest quota of its cgroup and of all cgroups above counts. cgroup v2 has it in ``cpu.max``, v1 in
    ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us``.
    """
    quotas = [quota for folder in _cpu_cgroups(root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


class CpuTimes(NamedTuple):
    """CPU time up to a moment, in seconds: of all processes on the CPUs that this process may use, and its ``own``."""

    at: float
    everybody: float
    own: float

    @classmethod
    def now(cls, root: Path = _ROOT) -> "CpuTimes":
        """Read the times of this moment; without /proc/stat, other processes count as idle."""
        stat = root / "proc/stat"
        busy = 0
        allowed = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        for line in stat.read_text().splitlines() if stat.exists() else ():
            name, *ticks = line.split()
            if name in allowed:
                # user, nice, system, idle, iowait, irq, softirq, steal
                busy += sum(map(int, ticks[:8])) - int(ticks[3]) - int(ticks[4])
        return cls(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), time.process_time())

    def used_by_others(self, since: "CpuTimes") -> float:
        """Return the average number of CPUs that other processes have used since an earlier moment."""
        elapsed = self.at - since.at
        others = (self.everybody - since.everybody) - (self.own - since.own)
        return max(0.0, others / elapsed) if elapsed > 0 else 0.0


def choose_threads(since: CpuTimes, root: Path = _ROOT) -> int:
    """Return the number of threads for an executor: its cores, except cores that other processes keep busy.

    A core counts as busy if others have used it since ``since`` and over the last minute as well. So processes that
    have just ended do not count, such as an executor that this one replaces, nor do processes that have just begun,
    such as the services that start beside it. If half of the cores or more are busy, all are used: the kernel then
    gives a team on all cores at least as much time as a team on the others would have.
    """
    cores = _physical_cores(root)
    load = root / "proc/loadavg"
    last_minute = float(load.read_text().split()[0]) if load.exists() else 0.0
    free = cores - round(min(CpuTimes.now(root).used_by_others(since), last_minute))
    return _within_quota(free if 2 * free > cores else cores, root)


def share_of_cores(executors: int, root: Path = _ROOT) -> int:
    """Return the number of threads for each of several executors that are started together, at least 1."""
    return max(1, available_cores(root) // max(1, executors))


def _physical_cores(root: Path) -> int:
    """Return the number of physical cores for this process: hyper-threads of a core share its arithmetic units."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return len(cores)


def _within_quota(cores: int, root: Path) -> int:
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def _cpu_cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of the cgroups that may limit the CPU time of this process, for cgroup v1 and v2.

    A container often sees the path of its cgroup on the host, but has the cgroup itself mounted as the top: the caller
    skips folders that do not exist.
    """
    own, mounts = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            tops = [mounts, mounts / "unified"]
        elif "cpu" in controllers.split(","):
            tops = [mounts / controllers, mounts / "cpu"]
        else:
            continue
        for top in tops:
            folder = top / path.strip("/")
            while folder != top:
                yield folder
                folder = folder.parent
            yield top


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None

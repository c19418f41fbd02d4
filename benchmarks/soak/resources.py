"""Resources of every process, over its life: memory, file descriptors, sockets, threads, tasks, and log lines."""

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import psutil

from benchmarks.processes import Cluster, Process

_EVERY = 2.0
_FIRST, _LEAST_SETTLING = 0.1, 120.0
"""The share of all the time, and the least seconds, after which the memory of a process counts as settled. A process
that is started again later meets the same for the first time, and needs as long as the first ones."""
LEAST_SECONDS, LEAST_SHARE = 240.0, 0.2
"""Lives that are shorter, or take a smaller share of all the time, are not judged: in its first minutes, an executor
still makes the kernels of each new batch size, and writes blocks of its pool for the first time."""


class Sample(NamedTuple):
    """The resources of a process at a time (seconds): resident memory in MB (10^6 bytes), and numbers of others.

    ``sockets``: of its descriptors. ``tasks``: of its event loop, by its metric; None: it has not been read yet.
    """

    time: float
    memory: float
    descriptors: int
    sockets: int
    threads: int
    tasks: float | None = None


@dataclass
class Life:
    """One process, from when it was ready. ``settles``: seconds that its memory takes to settle, and in which clients
    rest at least once."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list)
    settles: float = _LEAST_SETTLING

    @property
    def seconds(self) -> float:
        return self.samples[-1].time - self.samples[0].time

    def before_and_after(self, of: Callable[[Sample], float | None]) -> tuple[float, float]:
        """The least of something just after its memory has settled, and at the end of its life.

        Requests hold memory for a moment only; a leak raises the least. 0 if it is not known of any sample.
        """
        settled = self.samples[0].time + self.settles
        known = [(one.time, value) for one in self.samples if (value := of(one)) is not None]
        early = [value for time, value in known if settled <= time <= settled + self.settles]
        late = [value for time, value in known if time >= self.samples[-1].time - self.settles]
        return min(early or late, default=0.0), min(late or early, default=0.0)

    @property
    def growth(self) -> float:
        """By which share its memory has grown between the two."""
        before, after = self.before_and_after(lambda one: one.memory)
        return after / before - 1.0


class Resources:
    """Samples all processes of a cluster that are ready while ``watch`` runs. ``lives``: by name and process id."""

    def __init__(self) -> None:
        self.lives: dict[tuple[str, int], Life] = {}
        self._began = monotonic()
        self._tasks: dict[str, float] = {}

    async def watch(self, cluster: Cluster) -> None:
        """Sample until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask_for_tasks(cluster))
            tasks.create_task(self._sample_all(cluster))

    async def _ask_for_tasks(self, cluster: Cluster) -> None:
        while True:
            self._tasks = await asyncio.to_thread(tasks_by_process, cluster)
            await asyncio.sleep(_EVERY)

    async def _sample_all(self, cluster: Cluster) -> None:
        while True:
            named: dict[str, Process] = {one.name: one for one in cluster.executors}
            named |= cluster.gateways | {"scheduler": cluster.scheduler}
            for name, process in named.items():
                self._sample(name, process, self._tasks.get(name))
            await asyncio.sleep(_EVERY)

    def _sample(self, name: str, process: Process, tasks: float | None) -> None:
        if process.exit_code is not None or process.frozen:
            return
        if (name, process.pid) not in self.lives and not process.is_ready():
            return
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            seen = psutil.Process(process.pid)
            sample = Sample(
                monotonic(),
                memory=seen.memory_info().rss / 1e6,
                descriptors=seen.num_fds(),
                sockets=num_sockets(process.pid),
                threads=seen.num_threads(),
                tasks=tasks,
            )
            if not sample.memory:  # it has just ended
                return
            self.lives.setdefault((name, process.pid), Life(name, process.pid)).samples.append(sample)

    def long(self) -> list[Life]:
        """The processes that have lived long enough to be judged."""
        elapsed = monotonic() - self._began
        judged = [life for life in self.lives.values() if life.seconds >= max(LEAST_SECONDS, LEAST_SHARE * elapsed)]
        for life in judged:
            life.settles = max(_LEAST_SETTLING, _FIRST * elapsed)
        return judged


def num_sockets(pid: int) -> int:
    """How many of a process's descriptors are sockets; listening ones and pairs within it count too."""
    number = 0
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it has been closed meanwhile
                number += os.readlink(descriptor.path).startswith("socket:")
    return number


def tasks_by_process(cluster: Cluster) -> dict[str, float]:
    """Tasks of the event loop of each process that the metrics tell of; none while no gateway and scheduler answers."""
    try:
        samples = cluster.scrape()
    except (OSError, HTTPException):
        return {}
    found = {}
    for sample in samples:
        if sample.name == "scheduler_tasks":
            found["scheduler"] = sample.value
        elif sample.name in ("gateway_tasks", "executor_tasks"):
            name = re.search(r'(?:gateway|executor)="([^"]*)"', sample.labels)
            assert name is not None
            found[name[1]] = sample.value
    return found


def repeated(folder: Path) -> Counter[tuple[str, str]]:
    """How often each process has logged each warning or error, by its name and by the text without its varying
    parts."""
    found: Counter[tuple[str, str]] = Counter()
    for path in folder.glob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            match = re.search(r"(?:WARNING|ERROR)\s+\S+ (\S+: .*)", line)
            if match:
                found[path.stem, re.sub(r"'[^']*'|[\w.-]*\d[\w.:/-]*", "#", match[1])[:120]] += 1
    return found

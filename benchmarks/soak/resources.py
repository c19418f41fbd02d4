"""What every process holds, over its life: memory, file descriptors, threads. And what it repeats in its log."""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import psutil

from benchmarks.processes import Cluster, Process

_EVERY = 2.0
_FIRST, _LEAST_SETTLING = 0.1, 60.0
"""The share of a life, and the least seconds of it, after which memory counts as settled."""
LEAST_SECONDS = 240.0
"""Shorter lives are not judged."""


class Sample(NamedTuple):
    """What a process held at a time (seconds): resident memory in MB (10^6 bytes), file descriptors, threads."""

    time: float
    memory: float
    descriptors: int
    threads: int


@dataclass
class Life:
    """One process, from when it was first seen."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.samples[-1].time - self.samples[0].time

    def before_and_after(self, of: Callable[[Sample], float]) -> tuple[float, float]:
        """The least of something just after its memory has settled, and in the last tenth of its life.

        What requests hold for a moment comes and goes; what leaks raises the least.
        """
        first, tenth = self.samples[0].time, _FIRST * self.seconds
        settled = first + max(tenth, _LEAST_SETTLING)
        early = [of(one) for one in self.samples if settled <= one.time <= settled + tenth]
        late = [of(one) for one in self.samples if one.time >= self.samples[-1].time - tenth]
        return min(early or late), min(late)

    @property
    def growth(self) -> float:
        """By which share its memory has grown between the two."""
        before, after = self.before_and_after(lambda one: one.memory)
        return after / before - 1.0


class Resources:
    """Samples all processes of a cluster while ``watch`` runs. ``lives``: by name and process id."""

    def __init__(self) -> None:
        self.lives: dict[tuple[str, int], Life] = {}

    async def watch(self, cluster: Cluster) -> None:
        """Sample until cancelled."""
        while True:
            named: dict[str, Process] = {one.name: one for one in cluster.executors}
            named |= cluster.gateways | {"scheduler": cluster.scheduler}
            for name, process in named.items():
                self._sample(name, process)
            await asyncio.sleep(_EVERY)

    def _sample(self, name: str, process: Process) -> None:
        if process.exit_code is not None or process.frozen:
            return
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            seen = psutil.Process(process.pid)
            sample = Sample(monotonic(), seen.memory_info().rss / 1e6, seen.num_fds(), seen.num_threads())
            self.lives.setdefault((name, process.pid), Life(name, process.pid)).samples.append(sample)

    def long(self) -> list[Life]:
        """Those that have lived long enough to be judged."""
        return [life for life in self.lives.values() if life.seconds >= LEAST_SECONDS]


def repeated(folder: Path) -> Counter[tuple[str, str]]:
    """How often each process has logged each warning or error, by its name and by the text without what varies."""
    found: Counter[tuple[str, str]] = Counter()
    for path in folder.glob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            match = re.search(r"(?:WARNING|ERROR)\s+\S+ (\S+: .*)", line)
            if match:
                found[path.stem, re.sub(r"'[^']*'|[\w.-]*\d[\w.:/-]*", "#", match[1])[:120]] += 1
    return found

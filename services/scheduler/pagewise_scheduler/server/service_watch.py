"""Watches the file that says which services keep failing."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
from pagewise_shared.logs import BoundedLog, printable
from pagewise_shared.service_status import ServiceStatus, read_status

from pagewise_scheduler.metrics import Metrics

log = logging.getLogger(__name__)

_SECONDS = 1.0
_MOST_PROBLEMS, _MOST_TEXT = 16, 300


class ServiceWatch:
    """Counts restarts, and calls ``on_problems`` with a sentence for each service that does not become ready."""

    def __init__(self, path: Path | None, metrics: Metrics, on_problems: Callable[[tuple[str, ...]], None]) -> None:
        """``path``: the file; None: there is none."""
        self._path, self._metrics, self._on_problems = path, metrics, on_problems
        self._known: dict[str, ServiceStatus] = {}
        self._looked = float("-inf")
        self._complaints = BoundedLog(log)

    def refresh(self, now: float) -> None:
        """Read the file if a second has passed since the last time. ``now``: seconds."""
        if self._path is None or now - self._looked < _SECONDS:
            return
        self._looked = now
        try:
            found = read_status(self._path)
        except (OSError, msgspec.DecodeError) as error:
            self._complaints.warning("the status of services cannot be read: %s", error)
            return
        if found == self._known:
            return
        for name, status in found.items():
            before = self._known.get(name, ServiceStatus())
            self._metrics.service_restarts(name).inc(max(0, status.restarts - before.restarts))
            self._metrics.service_failing(name).set(bool(status.problem))
        self._known = found
        problems = [f"{name}: {status.problem}" for name, status in sorted(found.items()) if status.problem]
        self._on_problems(tuple(printable(text, _MOST_TEXT) for text in problems[:_MOST_PROBLEMS]))

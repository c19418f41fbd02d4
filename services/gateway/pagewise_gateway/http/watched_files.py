"""Notices when files change that are read again then: API keys, certificates."""

import os
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

CHECK_SECONDS = 1.0
"""How often files are looked at: a ``stat`` each, when somebody asks after that time."""


class WatchedFiles:
    """Files of which it is known what they looked like when they were read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._signature()
        self._next_check = monotonic() + CHECK_SECONDS

    def changed(self) -> bool:
        """Whether they look different since this was told last; costs nothing within ``CHECK_SECONDS``."""
        now = monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + CHECK_SECONDS
        signature = self._signature()
        if signature == self._seen:
            return False
        self._seen = signature
        return True

    def _signature(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(_look, self._paths))


def _look(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino

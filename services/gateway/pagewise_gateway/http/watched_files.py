"""Notices changes of files that are then read again: API keys, certificates."""

import os
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

CHECK_SECONDS = 1.0
"""Files are checked, by one ``stat`` each, at most this often."""


class WatchedFiles:
    """Files whose state is remembered, so that a change can be noticed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._signature()
        self._next_check = monotonic() + CHECK_SECONDS

    def changed(self) -> bool:
        """Return whether a file has changed since the last check; there is one check in ``CHECK_SECONDS`` at most."""
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

"""Progress of long work as log lines, because ``pagewise serve`` relays the output of services line by line.

A program that owns its terminal draws tqdm's bars itself.
"""

import io
import logging
import time
from typing import Any

from tqdm import tqdm

SECONDS = 5.0
"""Time between two lines."""
_GI = 2**30


def progress_line(what: str, done: int, total: int, unit: str, seconds: float) -> str:
    """Return a line with the share of ``total`` that is done after ``seconds``, and an estimate of the remaining
    time."""
    scale, name = (_GI, "GiB") if unit == "B" else (1, unit)
    amount = f"{done / scale:.2f} of {total / scale:.2f}" if scale > 1 else f"{done} of {total}"
    left = f", {seconds * (total - done) / done:.0f} s left" if 0 < done < total else ""
    share = f" ({100 * done / total:.0f}%)" if total else ""
    return f"{what}: {amount}{' ' * bool(name)}{name}{share}{left}"


def logged_bar(log: logging.Logger, what: str, *, counts: str = "B", unit: str = "B") -> type:
    """Return a replacement for the class ``tqdm`` in a library's calls, whose bars become lines of ``log``.

    ``counts``: the unit of the bars to log, as the library names it; "it" if it names none. ``unit``: its name in log
    lines. Work that ends before the first line is due is not logged.
    """
    logged_at = time.monotonic()

    class LoggedBar(tqdm):  # type: ignore[type-arg]
        """A bar that is not drawn. All bars together write a line every few seconds."""

        monitor_interval = 0  # no thread

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._began = time.monotonic()
            super().__init__(*arguments, **options | {"file": io.StringIO(), "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            """Write a line, if the last one is some seconds old."""
            nonlocal logged_at
            now = time.monotonic()
            if msg is None and self.unit == counts and self.total and self.n and now - logged_at >= SECONDS:
                logged_at = now
                log.info("%s", progress_line(what, int(self.n), int(self.total), unit, now - self._began))

    return LoggedBar


def logged_progress(log: logging.Logger, what: str, total: int, unit: str) -> "tqdm[Any]":
    """Return a bar of ``total`` steps for ``update()``, which becomes lines of ``log``."""
    kind = logged_bar(log, what, counts=unit, unit=unit)
    bar: tqdm[Any] = kind(total=total, unit=unit, mininterval=0, miniters=1, leave=False)
    return bar

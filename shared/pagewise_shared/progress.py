"""Shows how far long work is: a bar on a terminal, elsewhere a line every few seconds.

Only a process that owns the terminal draws bars. The services write lines to their log, because ``pagewise serve``
prints their output line by line, with their names in front.
"""

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TextIO, TypeVar

SECONDS = 5.0
"""Between two lines."""
_GI = 2**30
Item = TypeVar("Item")


def draws_bars(stream: TextIO) -> bool:
    """Return whether bars may be drawn on a stream: it is a terminal with a cursor to move, and tqdm is installed."""
    if not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    try:
        import tqdm  # noqa: F401
    except ImportError:  # the scheduler's package does not bring it
        return False
    return True


class Progress:
    """Progress of work whose size is known. Its bar goes at the end, or with the context if the work breaks off.

    ``what``: what is being done. ``total``: how many steps, or bytes if ``unit`` is "B". ``tell``: takes each line
    where no bar is drawn; by default lines are printed to standard error. ``bars``: whether to draw one; None: on a
    terminal. Work that ends before the first line would be due is never mentioned.
    """

    def __init__(
        self,
        what: str,
        total: int,
        unit: str = "",
        *,
        tell: Callable[[str], None] | None = None,
        bars: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._clock = clock
        self._began = self._told = clock()
        self._done = 0
        self._tell = tell or _print
        self._bar: Any = None
        if draws_bars(sys.stderr) if bars is None else bars:
            from tqdm import tqdm

            scaled = unit == "B"
            self._bar = tqdm(
                total=total, desc=what, unit=unit or "it", unit_scale=scaled, unit_divisor=1024, leave=False
            )

    def update(self, count: int = 1) -> None:
        """Say that ``count`` more steps or bytes are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
            if self._done >= self._total:
                self.close()
            return
        now = self._clock()
        if now - self._told < SECONDS:
            return
        self._told = now
        self._tell(progress_line(self._what, self._done, self._total, self._unit, now - self._began))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        self.close()


def followed(items: Iterable[Item], total: int, what: str, unit: str = "") -> Iterator[Item]:
    """Yield the items, of which there are ``total``, and show how many of them have been dealt with."""
    with Progress(what, total, unit) as progress:
        for item in items:
            yield item
            progress.update()


def progress_line(what: str, done: int, total: int, unit: str, seconds: float) -> str:
    """Return a line that says how much of ``total`` is done after ``seconds``, and how long the rest will take."""
    scale, name = (_GI, "GiB") if unit == "B" else (1, unit)
    amount = f"{done / scale:.2f} of {total / scale:.2f}" if scale > 1 else f"{done} of {total}"
    left = f", {seconds * (total - done) / done:.0f} s left" if 0 < done < total else ""
    share = f" ({100 * done / total:.0f}%)" if total else ""
    return f"{what}: {amount}{' ' * bool(name)}{name}{share}{left}"


def logged_bar(log: logging.Logger, what: str, *, counts: str = "B", unit: str = "B") -> type:
    """Return a class that a library takes in the place of ``tqdm``, whose bars become lines of ``log``.

    ``counts``: the unit of the bars that do, as the library calls it; "it" where it gives none. ``unit``: what lines
    call it.
    """
    from tqdm import tqdm

    told = [time.monotonic()]

    class LoggedBar(tqdm):  # type: ignore[type-arg]
        """A bar that is not drawn. All bars together write a line every few seconds."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._began = time.monotonic()
            super().__init__(*arguments, **options | {"file": io.StringIO(), "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            """Write a line, if the last one is some seconds old."""
            now = time.monotonic()
            if self.unit == counts and self.total and self.n and now - told[0] >= SECONDS:
                told[0] = now
                log.info("%s", progress_line(what, int(self.n), int(self.total), unit, now - self._began))

    return LoggedBar


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

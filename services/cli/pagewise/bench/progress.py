"""Shows how much of a load is done: a bar in a terminal, lines elsewhere."""

import sys
import time
from typing import Never, TextIO

from tqdm import tqdm

from pagewise.bench.metrics import Outcome

_LINE_SECONDS = 10.0


class Progress:
    """Shows how many of ``total`` requests have ended: a bar if ``file`` is a terminal, else a line now and then.

    ``total``: None: as many as there are in ``seconds``, after which no request starts.

    A log that is no terminal thus gets a line every ten seconds instead of thousands of carriage returns.
    """

    def __init__(
        self,
        total: int | None,
        title: str,
        *,
        seconds: float | None = None,
        quiet: bool = False,
        file: TextIO | None = None,
    ) -> None:
        self._file = sys.stderr if file is None else file
        self._total, self._title = total, title
        self._seconds = "" if seconds is None else f" of {seconds:g}"
        self._ended = self._failed = 0
        self._began = self._told = time.monotonic()
        self._quiet = quiet
        self._bar: tqdm[Never] | None = None
        if not quiet and self._file.isatty():
            title += "" if seconds is None else f", {seconds:g} s"
            self._bar = tqdm(total=total, desc=title, unit="req", file=self._file, dynamic_ncols=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif not self._quiet:
            self._print_line()

    def ended(self, outcome: Outcome) -> None:
        """Count a request that has ended."""
        self._ended += 1
        self._failed += bool(outcome.error)
        if self._bar is not None:
            self._bar.update()
            if self._failed:
                self._bar.set_postfix_str(f"{self._failed} failed", refresh=False)
        elif not self._quiet and time.monotonic() - self._told >= _LINE_SECONDS:
            self._told = time.monotonic()
            self._print_line()

    def _print_line(self) -> None:
        failed = f", {self._failed} failed" if self._failed else ""
        total = "" if self._total is None else f" of {self._total}"
        seconds = time.monotonic() - self._began
        print(
            f"{self._title}: {self._ended}{total} requests{failed}, {seconds:.0f}{self._seconds} s",
            file=self._file,
            flush=True,
        )

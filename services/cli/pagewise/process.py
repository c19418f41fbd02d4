"""Runs a service as a child process that ends with its parent."""

import asyncio
import contextlib
import os
import signal
import subprocess  # nosec B404
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pagewise_shared.config import VARIABLE_PREFIX
from pagewise_shared.logs import relayed
from pagewise_shared.service_process import CANNOT_START, die_with_parent, reason_in

STOP_SECONDS = 10.0

_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds before a process that ended soon is started again; the last pause is repeated."""
_SETTLED_SECONDS = 30.0


@dataclass(slots=True)
class Restarts:
    """Counts the ends of a process that is started again after each of them.

    Fields:
        failures: ends in a row within ``_SETTLED_SECONDS`` of the start.
        early_ends: ends in a row before the process was ready.
    """

    failures: int = 0
    early_ends: int = 0

    def ended(self, seconds: float, *, ready: bool) -> float:
        """Count an end ``seconds`` after the start; return the seconds until the next start."""
        self.failures = 0 if seconds > _SETTLED_SECONDS else self.failures + 1
        self.early_ends = 0 if ready else self.early_ends + 1
        return _PAUSES[min(max(0, self.failures - 1), len(_PAUSES) - 1)]


class Service:
    """A child process. Each line of its standard error is printed with its name in front.

    ``variables`` are added to its environment. ``on_line`` is called with each line of its standard output, ``on_log``
    with each line of its standard error, which is printed all the same.
    """

    def __init__(
        self,
        name: str,
        module: str,
        argv: Sequence[str],
        on_line: Callable[[str], None] = lambda line: None,
        variables: Mapping[str, str] | None = None,
        on_log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name = name
        self._command = [sys.executable, "-m", module, *argv]
        self._on_line = on_line
        self._on_log = on_log
        self._variables = dict(variables or {})
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self.reason = ""
        """The reason why it cannot run, from its last log lines."""
        self.ready = False
        """Whether it has printed since its start that it listens, or has joined."""
        self.on_ready: Callable[[], None] = lambda: None

    async def run(self) -> int:
        """Start the process and wait for its end; returns its exit code, negative for a signal.

        If the machine lacks the memory, processes or files for another process, it is ``CANNOT_START``.
        """
        self.ready, self.reason = False, ""
        async with self._starting:
            try:
                process = self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=_environment() | self._variables,
                    # A session of its own, so that Ctrl-C reaches only the parent, which then stops services in order.
                    start_new_session=True,
                    preexec_fn=_prepare,
                )
            except (OSError, subprocess.SubprocessError) as error:
                self._log(f"the process cannot be started: {error}")
                self.reason = f"its process cannot be started: {error}"
                return CANNOT_START
        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(self._relay(process.stdout, self._print), self._relay(process.stderr, self._log))
        return await process.wait()

    @property
    def pid(self) -> int | None:
        """Process id, or None while it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float | None = None) -> None:
        """Stop it by a signal, and kill it if it has not ended after ``seconds`` (default: ``STOP_SECONDS``)."""
        async with self._starting:  # while it is being started there is no process yet
            process = self._process
        if process is None or process.returncode is not None:
            return
        self._send(number)
        try:
            async with asyncio.timeout(STOP_SECONDS if seconds is None else seconds):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """Kill it, if it runs."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs.

        The methods of asyncio's ``Process`` read the exit code first. If the process has just ended, asyncio's own
        watcher then misses the code: it logs a warning and reports 255.
        """
        if (pid := self.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def _relay(self, stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the reader's limit
                continue
            if not line:
                return
            on_line(line.decode(errors="replace").rstrip())

    def _print(self, text: str) -> None:
        if text.startswith(("listening ", "joined ")) and not self.ready:
            self.ready = True
            self.on_ready()
        self._on_line(text)

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk, or a reader that has gone, ends no service
            print(relayed(self.name, text), file=sys.stderr, flush=True)
        self.reason = reason_in(text) or self.reason
        self._on_log(text)


def _environment() -> dict[str, str]:
    # Pagewise's variables have been read. A child must not read them again: its arguments leave out default values.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)}
    return kept | {"PYTHONUNBUFFERED": "1"}


def _prepare() -> None:
    """For ``preexec_fn``: die with the parent, and block SIGINT until the service handles it (``exit_code_of``).

    A SIGINT during imports would end in a traceback.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    die_with_parent()

"""A pseudo-terminal of the kernel, for full-screen programs; nothing but the standard library.

    python terminal.py TEXT COMMAND...

runs a command in a terminal until it has written TEXT, and then types ``q``, which has to end it.
"""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence


class Terminal:
    """A process in a terminal of 120 columns and 40 lines; ``written``: its output so far."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.written = bytearray()
        self._main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=dict(environment) | {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
            start_new_session=True,
        )
        os.close(terminal)

    def type(self, keys: bytes) -> None:
        """Type these keys."""
        os.write(self._main, keys)

    def read_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Read the output, as a terminal does: a process stops if its output is not read."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.written[-2000:]
            if select.select([self._main], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # it has closed its side
                    self.written += os.read(self._main, 65_536)

    def wait(self) -> int:
        """Wait until it ends; returns its exit code."""
        self.read_until(lambda: self.process.poll() is not None)
        return self.process.wait()

    def close(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._main)


def main(text: str, *command: str) -> int:
    """Run the command until it has written ``text``, and end it by ``q``; returns its exit code."""
    terminal = Terminal(command, os.environ)
    try:
        terminal.read_until(lambda: text.encode() in terminal.written or terminal.process.poll() is not None)
        if text.encode() not in terminal.written:
            print(f"it never wrote {text!r}, but: {terminal.written[-2000:]!r}", file=sys.stderr)
            return 1
        terminal.type(b"q")
        return terminal.wait()
    finally:
        terminal.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

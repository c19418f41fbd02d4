"""Compiles grammars in another process, where that can be ended.

Some grammars keep llguidance busy for hours, or take all memory, and nothing stops it once it has begun. So the process
ends itself when a grammar has taken ``SECONDS`` of its processor, and cannot have more than ``MEMORY_BYTES``.
"""

import logging
import signal
import socket
import subprocess  # nosec B404
import sys
from multiprocessing.connection import Connection

from pagewise_gateway.structured.errors import GrammarError

log = logging.getLogger(__name__)

SECONDS = 0.5
"""Of a processor, for one grammar. The largest of use take 0.2."""
MEMORY_BYTES = 1 << 30
"""Of address space, for the process."""
STACK_BYTES = 64 * 1024 * 1024
"""The library compiles rules recursively, about 8 KiB for each level."""
_READY_SECONDS = 60.0
_WALL_SECONDS = 60.0
"""In which a process that is alive answers on any machine: it takes ``SECONDS`` of a processor."""
NUMBER_BYTES = 8
"""Of the most symbols, before the text of a grammar."""
_REASONS = {
    -signal.SIGPROF: f"compiling it takes more than {SECONDS:g} s, the limit for a grammar",
    -signal.SIGABRT: f"compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory, the limit for a grammar",
    -signal.SIGSEGV: "compiling it takes more levels of recursion than there may be",
}


class Checker:
    """One such process. It is started when it is first needed, and again when it has ended. Not for several threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ready = False

    def validate(self, grammar: str, max_symbols: int) -> str:
        """Return the flaw of a grammar; empty: it has none. ``max_symbols``: the most that its rules may have.

        Raises:
            GrammarError: it takes too long, or too much memory.
            RuntimeError: the process cannot be started, or another process has killed it.
        """
        connection = self._started()
        try:
            if not self._ready:
                self._receive(connection, _READY_SECONDS)
                self._ready = True
            connection.send_bytes(max_symbols.to_bytes(NUMBER_BYTES, "little") + grammar.encode())
            return self._receive(connection, _WALL_SECONDS).decode()
        except (EOFError, OSError) as error:
            self._end()
            code = self._process.wait() if self._process is not None else 0
            if not self._ready:
                raise RuntimeError(f"the process that checks grammars cannot be started (exit code {code})") from error
            if code == -signal.SIGKILL:
                self.start()
                raise RuntimeError("the process that checks grammars was killed") from None
            reason = _REASONS.get(code, "it cannot be compiled: the library fails")
            log.info("a grammar was refused: %s (exit code %d)", reason, code)
            self.start()  # for the next one
            raise GrammarError(reason) from None

    def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        own, theirs = socket.socketpair()
        with theirs:
            # A session of its own keeps Ctrl-C from it: it ends when the connection is closed.
            self._process = subprocess.Popen(  # noqa: S603  # nosec B603 # our own module
                [sys.executable, "-m", "pagewise_gateway.structured.check_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection, self._ready = Connection(own.detach()), False

    def close(self) -> None:
        """End the process."""
        self._end()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _started(self) -> Connection:
        if self._process is None or self._connection is None or self._process.poll() is not None:
            self._end()
            self.start()
        assert self._connection is not None
        return self._connection

    def _receive(self, connection: Connection, seconds: float) -> bytes:
        if not connection.poll(seconds):
            assert self._process is not None
            self._process.kill()
        return connection.recv_bytes()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

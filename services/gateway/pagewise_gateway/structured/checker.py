"""Compiles grammars in another process, which can be ended. That process runs this module, too.

Some grammars keep llguidance busy for hours, or take all memory, and no call interrupts it. So the process ends itself
when a grammar has taken ``SECONDS`` of its processor, and cannot have more than ``MEMORY_BYTES``.
"""

import logging
import re
import resource
import signal
import socket
import subprocess  # nosec B404
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pagewise_gateway.structured.walk import GrammarError

log = logging.getLogger(__name__)

SECONDS = 0.5
"""CPU time for one grammar. The largest useful ones take 0.2."""
MEMORY_BYTES = 1 << 30
"""Address space of the process."""
STACK_BYTES = 64 * 1024 * 1024
"""The library compiles rules recursively, about 8 KiB for each level."""
_READY_SECONDS = 60.0
_WALL_SECONDS = 60.0
"""The time after which a process that has not answered is killed, although it has not had ``SECONDS`` of CPU time."""
_NUMBER_BYTES = 8
"""The limit on symbols, which is sent before the text of a grammar."""
_REASONS = {
    -signal.SIGPROF: f"compiling it takes more than {SECONDS:g} s, the limit for a grammar",
    -signal.SIGABRT: f"compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory, the limit for a grammar",
    -signal.SIGSEGV: "compiling it takes more levels of recursion than there may be",
}


class Checker:
    """One such process, for one thread. It is started when it is first needed, and again when it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ready = False

    def validate(self, grammar: str, max_symbols: int) -> str:
        """Return the error in a grammar; an empty text: it is valid. ``max_symbols``: the most that its rules may have.

        Raises:
            GrammarError: it takes too long, or too much memory.
            RuntimeError: the process cannot be started, or another process has killed it.
        """
        connection = self._started()
        try:
            if not self._ready:
                self._receive(connection, _READY_SECONDS)
                self._ready = True
            connection.send_bytes(max_symbols.to_bytes(_NUMBER_BYTES, "little") + grammar.encode())
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
            self.start()  # for the next grammar
            raise GrammarError(reason) from None

    def start(self) -> None:
        """Start the process; it is not ready at once."""
        own, theirs = socket.socketpair()
        with theirs:
            # A session of its own keeps Ctrl-C from it: it ends when the connection is closed.
            self._process = subprocess.Popen(  # noqa: S603  # nosec B603 # our own module
                [sys.executable, "-m", "pagewise_gateway.structured.checker", str(theirs.fileno())],
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


# ---- in the process ------------------------------------------------------------------------------------

_NUM_BYTES = 256
_SPECIAL = re.compile(r'<\[[^\]"]*\]>')
"""A special token by its id in the model's tokenizer."""


class _Bytes:
    """A tokenizer with a token for each byte: which bytes may follow does not depend on the model's tokenizer."""

    eos_token_id, bos_token_id = _NUM_BYTES, None
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(_NUM_BYTES)), b"<eos>")
    special_token_ids = (_NUM_BYTES,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _main() -> None:
    """Answer each grammar with its error until the socket is closed, whose number is the only argument."""
    for limit, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (most, most))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(Connection(int(sys.argv[1])),))
    thread.start()
    thread.join()


def _serve(connection: Connection) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=_NUM_BYTES + 1, eos_token=[_NUM_BYTES])
    connection.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            asked = connection.recv_bytes()
            max_symbols, grammar = int.from_bytes(asked[:_NUMBER_BYTES], "little"), asked[_NUMBER_BYTES:].decode()
            # The signal of this timer has no handler, so that it ends the process inside the library, too.
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            error = _error_of(tokenizer, grammar, max_symbols)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send_bytes(error.encode())


def _error_of(tokenizer: LLTokenizer, grammar: str, max_symbols: int) -> str:
    limits = LLParserLimits(verbose_errors=False, max_grammar_size=max_symbols)
    if error := LLMatcher.validate_grammar(grammar, limits=limits):
        return error
    # An output is begun too, as executors do, because that may take long. The special tokens of the grammar, which this
    # tokenizer does not have, make no difference to it.
    named = _SPECIAL.sub(f"<[{_NUM_BYTES}]>", grammar)
    LLMatcher(tokenizer, named, log_level=0, limits=limits).compute_bitmask()
    return ""


if __name__ == "__main__":
    _main()

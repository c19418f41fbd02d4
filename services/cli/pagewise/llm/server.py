"""The services of an ``LLM``: a child process that ends with this one in any case."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

from pagewise.llm.types import LLMError

_LAST_LINES = 15
_STOP_SECONDS = 30.0


class Server:
    """A scheduler, a gateway and executors, on a free port of the loopback interface, for this process alone.

    Fields:
        url: where the gateway listens.
        api_key: a random key, without which other users of this machine cannot use it.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Start the services and wait until they are ready. ``options``: of ``pagewise serve``, by name.

        Raises:
            LLMError: they cannot start; the text has the last lines that they logged.
        """
        self.url, self.api_key = "", secrets.token_urlsafe(24)
        self._owner = os.getpid()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._spawned, self._url_known = threading.Event(), threading.Event()
        self._log: threading.Thread | None = None
        # The kernel ends a child with the thread that has started it: this one lives as long as the child.
        self._thread = threading.Thread(target=self._run, args=(dict(options),), name="pagewise", daemon=True)
        self._thread.start()
        try:
            self._url_known.wait()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if not self.url:
            self.close()
            raise LLMError("the services could not be started. Their last log lines:\n" + self.last_lines())

    @property
    def exit_code(self) -> int | None:
        """The exit code of the child process; None while it runs."""
        return None if self._process is None else self._process.poll()

    def last_lines(self) -> str:
        """Return the last lines that the services have logged."""
        return "\n".join(self._lines)

    def owns_thread(self) -> bool:
        """Whether the calling thread is one of this object's own."""
        return threading.current_thread() in (self._thread, self._log)

    def close(self) -> None:
        """Stop the services, and wait for their end. It does nothing if they have ended, or in a forked process."""
        if os.getpid() != self._owner:
            return
        self._spawned.wait()
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._thread.join()

    def _run(self, options: dict[str, Any]) -> None:
        """Start the child, and relay its log until its end."""
        try:
            with subprocess.Popen(  # nosec B603 # no shell
                [sys.executable, "-m", "pagewise.llm.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=os.environ | {"PAGEWISE_API_KEYS": self.api_key},
                start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the services
            ) as process:
                self._process = process
                self._spawned.set()
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stderr is not None
                self._log = log = threading.Thread(
                    target=self._relay, args=(process.stderr,), name="pagewise-log", daemon=True
                )
                log.start()
                with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                    stdin.write(json.dumps({"parent": os.getpid(), "options": options}) + "\n")
                for line in process.stdout:
                    if line.startswith("{"):
                        self.url = json.loads(line)["url"]
                        self._url_known.set()
                log.join()
        finally:
            self._spawned.set()
            self._url_known.set()

    def _relay(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.append(line.rstrip())
            with contextlib.suppress(OSError, ValueError):  # our own standard error may be closed
                print(line, end="", file=sys.stderr, flush=True)

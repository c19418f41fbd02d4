"""Logging: one line per event on standard error."""

import logging
import sys
import threading
import time


def configure_logging(level: str, service: str) -> None:
    """Log to standard error as ``time level service module: text``; ``level`` is a ``--log-level``."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for chatty in ("httpx", "httpcore", "urllib3", "filelock", "transformers", "huggingface_hub", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


class BoundedLog:
    """Logs warnings that other processes can cause at will, but at most ``burst`` of them in ``seconds``.

    The first one after that says how many were left out. May be used from any thread.
    """

    def __init__(self, log: logging.Logger, burst: int = 5, seconds: float = 60.0) -> None:
        self._log = log
        self._burst, self._seconds = burst, seconds
        self._lock = threading.Lock()
        self._since = float("-inf")
        self._count = 0

    def warning(self, text: str, *arguments: object) -> None:
        """Log ``text % arguments`` as a warning, unless there have been too many."""
        with self._lock:
            now = time.monotonic()
            left_out = 0
            if now - self._since > self._seconds:
                left_out = max(0, self._count - self._burst)
                self._since, self._count = now, 0
            self._count += 1
            if self._count > self._burst:
                return
        if left_out:
            self._log.warning("%d warnings like the next one were left out", left_out)
        self._log.warning(text, *arguments)


def printable(text: str, limit: int = 200) -> str:
    """Return foreign text in a form for a line of the log: shortened, with control characters replaced."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])

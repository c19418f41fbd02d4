"""Logging: one line per event on standard error."""

import logging
import sys
import threading
import time
from datetime import datetime


def configure_logging(level: str, service: str) -> None:
    """Log to standard error as ``time level service module: text``; ``level`` is a ``--log-level``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "urllib3", "filelock", "transformers", "huggingface_hub", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


class _Formatter(logging.Formatter):
    """Writes times as in ISO 8601: local time to the millisecond, with its offset from UTC."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


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

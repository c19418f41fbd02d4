"""Logging: one line per event on standard error."""

import json
import logging
import sys
import threading
import time
from datetime import datetime


def configure_logging(level: str, service: str, log_format: str = "text") -> None:
    """Log to standard error. ``level`` is a ``--log-level``, ``log_format`` a ``--log-format``.

    A line of text is ``time level service module: text``; a line of JSON is an object with these fields and the fields
    of ``about``.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(service))
    else:
        handler.setFormatter(_Formatter(f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in (
        "httpx", "httpcore", "urllib3", "filelock", "transformers", "huggingface_hub", "asyncio", "opentelemetry",
    ):  # fmt: skip
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


def about(request_id: str = "", traceparent: str = "", **fields: object) -> dict[str, object]:
    """Return the ``extra`` of a log call about a request: the fields of its JSON line besides the text.

    ``traceparent``: of its trace, if it has one. ``fields``: further fields; ``message`` replaces the text.
    """
    if request_id:
        fields["request_id"] = request_id
    if traceparent:
        _, fields["trace_id"], fields["span_id"], _ = traceparent.split("-", 3)
    return {"fields": fields}


def relayed(process: str, line: str) -> str:
    """Return a line of another process's log as a line of this process's log, with the name of that process."""
    handlers = logging.getLogger().handlers
    if not handlers or not isinstance(handlers[0].formatter, JsonFormatter):
        return f"{process:<10} | {line}"
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):  # such as a traceback of a process that could not log
        entry = {"time": _iso_time(time.time()), "level": "info", "message": line}
    return json.dumps({"process": process} | entry)


def _iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


class _Formatter(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        return _iso_time(record.created)


class JsonFormatter(logging.Formatter):
    """Formats each record as a JSON object on one line. ``service``: the name of this process."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line: time, level, service, logger and message, the fields of ``about``, and the exception."""
        entry: dict[str, object] = {
            "time": _iso_time(record.created),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class BoundedLog:
    """Logs warnings that other processes can cause at will, but at most ``burst`` of them in ``seconds``.

    The first one after that has the number of suppressed warnings before it. May be used from any thread.
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
    """Return foreign text for a log line: shortened, with control characters replaced."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])

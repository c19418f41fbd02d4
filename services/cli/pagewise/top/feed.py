"""Reads the console's stream, and reads on when the server has gone and come back."""

import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from pagewise.client import UnreachableError, connect, events

_PATH = "/console/stream?parts=fleet,requests"
_TIMEOUT = 10.0
"""Seconds without an event, of which there are two each second, after which a server counts as gone."""

_PAUSE = 1.0


class Feed:
    """A thread that hands over each event of a server's stream, until it is closed.

    ``on_event`` is called with the name of an event and its data; ``on_lost`` with the reason when the stream ends or
    cannot be opened. The thread then tries again every second.
    """

    def __init__(
        self, url: str, on_event: Callable[[str, dict[str, Any]], None], on_lost: Callable[[str], None]
    ) -> None:
        self._url = url.rstrip("/")
        self._on_event, self._on_lost = on_event, on_lost
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Hand over no further events. The thread ends with the next one, or with the process."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                for name, data in stream(self._url):
                    if self._closed.is_set():
                        return
                    self._on_event(name, data)
                reason = f"{self._url} has ended the stream"
            except UnreachableError as error:
                reason = str(error)
            if self._closed.is_set():
                return
            self._on_lost(reason)
            self._closed.wait(_PAUSE)


def stream(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the data of each event of the console's stream.

    Raises:
        UnreachableError: it cannot be opened, or broke.
    """
    try:
        with connect(url, _PATH, timeout=_TIMEOUT) as answer:
            for name, data in events(answer):
                yield name, json.loads(data)
    except UnreachableError as error:
        if error.status != 404:
            raise
        raise UnreachableError(f"{url} has no console: it runs with --no-console, or is no Pagewise gateway") from error


def abort(url: str, request_id: str) -> bool:
    """Abort a request; returns whether there was such a request.

    Raises:
        UnreachableError: the server does not answer, or refuses.
    """
    try:
        with connect(url, f"/console/requests/{urllib.parse.quote(request_id, safe='')}/abort", b"", _TIMEOUT):
            return True
    except UnreachableError as error:
        if error.status == 404:
            return False
        raise

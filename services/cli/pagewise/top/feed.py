"""Reads the console's stream, and reads on when the server has gone and come back."""

import http.client
import json
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from pagewise.memory import UnreachableError

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
                for name, data in events(self._url):
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


def events(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the data of each event of the console's stream.

    Raises:
        UnreachableError: it cannot be opened, or broke.
    """
    try:
        with urllib.request.urlopen(_request(url + _PATH), timeout=_TIMEOUT) as answer:  # noqa: S310  # nosec B310 # the user's own --url
            name = ""
            for line in answer:
                if line.startswith(b"event:"):
                    name = line[6:].decode().strip()
                elif line.startswith(b"data:"):
                    yield name, json.loads(line[5:])
    except urllib.error.HTTPError as error:
        error.close()
        raise UnreachableError(_refusal(url, error.code)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnreachableError(f"{url} does not answer: {error}") from error


def abort(url: str, request_id: str) -> bool:
    """Abort a request; returns whether there was such a request.

    Raises:
        UnreachableError: the server does not answer, or refuses.
    """
    path = f"/console/requests/{urllib.parse.quote(request_id, safe='')}/abort"
    try:
        with urllib.request.urlopen(_request(url.rstrip("/") + path, b""), timeout=_TIMEOUT):  # noqa: S310  # nosec B310 # as above
            return True
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return False
        raise UnreachableError(_refusal(url, error.code)) from error
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"{url} does not answer: {error}") from error


def _refusal(url: str, status: int) -> str:
    if status in (401, 403):
        return f"{url} wants an operator's key: set PAGEWISE_API_KEY"
    if status == 404:
        return f"{url} has no console: it runs with --no-console, or is no Pagewise gateway"
    return f"{url} answers {status}"


def _request(url: str, body: bytes | None = None) -> urllib.request.Request:
    request = urllib.request.Request(url, body)  # noqa: S310
    if body is not None:  # without keys, a server takes no type that a page could send
        request.add_header("Content-Type", "application/json")
    if key := os.environ.get("PAGEWISE_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    return request

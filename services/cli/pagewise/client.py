"""HTTP requests to a running gateway, for ``vmstat``, ``pmap``, ``explain``, ``top`` and ``chat``."""

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CommandError(Exception):
    """``pagewise`` prints its text behind the name of the command, and ends with exit code 1."""


class UnreachableError(CommandError):
    """A URL does not answer, or answers with the error ``status``."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add the option of a gateway's URL."""
    default = os.environ.get("PAGEWISE_URL", "http://127.0.0.1:8000")
    parser.add_argument(
        "--url", default=default, help=f"URL of a gateway, also set by PAGEWISE_URL (default: {default})"
    )


@contextmanager
def connect(
    url: str, path: str, body: bytes | None = None, timeout: float = 10.0
) -> Iterator[http.client.HTTPResponse]:
    """Send a GET, or a POST of a JSON ``body``, with the key in PAGEWISE_API_KEY if there is one.

    ``timeout``: seconds without any byte.

    Raises:
        UnreachableError: the gateway does not answer, breaks off while the response is read, or answers with an error.
    """
    headers = {} if body is None else {"Content-Type": "application/json"}
    if key := os.environ.get("PAGEWISE_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    try:
        request = urllib.request.Request(url.rstrip("/") + path, body, headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310  # nosec B310 # the user's own --url
            yield answer
    except BrokenPipeError:  # of the terminal; a broken connection comes as a URLError
        raise
    except urllib.error.HTTPError as error:
        raise UnreachableError(_refusal(error), error.code) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        text = f"{url} does not answer ({reason}): --url or PAGEWISE_URL names another gateway"
        raise UnreachableError(text) from error


def get(url: str, path: str) -> dict[str, Any]:
    """Return the JSON object that a gateway answers to a GET.

    Raises:
        UnreachableError: it does not answer, or with an error.
    """
    with connect(url, path) as answer:
        result = json.loads(answer.read())
    if not isinstance(result, dict) or not result.keys() & {"executors", "sequences", "sentences", "data"}:
        raise UnreachableError(f"{url} answers, but it is no Pagewise gateway")
    return result


def events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, str]]:
    """Yield the name ("" without one) and the data of each server-sent event, as it comes."""
    name = ""
    for line in answer:
        if line.startswith(b"event:"):
            name = line[6:].decode().strip()
        elif line.startswith(b"data:"):
            yield name, line[5:].decode().strip()


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        message = str(json.loads(error.read())["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        message = f"{error.code} {error.reason}"
    if error.code in (401, 403):
        kind = "an operator's key" if error.code == 403 else "a key"
        message = f"{message.rstrip('.')}; put {kind} into the variable PAGEWISE_API_KEY"
    return message

"""Requests of an abuser: many at once, from threads, and what was answered."""

import contextlib
import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from tests.abuse.bystander import ABUSER

_PATIENCE = 120.0


def post(url: str, path: str, body: bytes | dict[str, Any], key: str = ABUSER) -> tuple[int, Any]:
    """The status and the JSON body of the answer to one request."""
    address = urlsplit(url)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with contextlib.closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=_PATIENCE)) as one:
        one.request("POST", path, data, {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
        answer = one.getresponse()
        return answer.status, json.loads(answer.read())


def at_once(url: str, path: str, body: bytes | dict[str, Any], count: int) -> list[tuple[int, Any]]:
    """The same request ``count`` times at the same time."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: post(url, path, body), range(count)))

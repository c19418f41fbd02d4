"""A closed loop over HTTP that costs little: streams that send their next request as soon as the last is answered."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128
TEXT_TOKENS = (10, 4000)
"""Ids of the demo tokenizer that stand for text."""


def random_prompt(rng: random.Random) -> list[int]:
    """A prompt that shares its beginning with no other."""
    return [rng.randrange(*TEXT_TOKENS) for _ in range(PROMPT_TOKENS)]


@dataclass
class Load:
    """``streams`` clients of the server at ``host``:``port``, each on its own connection, until closed.

    ``events``: pieces of answers that have come, several in one read count as one. ``failures``: answers that are not
    a 200, and connections that were lost.
    """

    host: str
    port: int
    streams: int
    stream: bool
    events: int = 0
    answers: int = 0
    failures: list[str] = field(default_factory=list)

    async def __aenter__(self) -> "Load":
        loop = asyncio.get_running_loop()
        rng = random.Random(self.streams)
        self._connections = [
            (await loop.create_connection(lambda: _Client(self, rng), self.host, self.port))[0]
            for _ in range(self.streams)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for transport in self._connections:
            transport.abort()

    def request(self, rng: random.Random) -> bytes:
        """One request, as it is sent."""
        body = json.dumps(
            {
                "prompt": random_prompt(rng),
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": self.stream,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


class _Client(asyncio.Protocol):
    def __init__(self, load: Load, rng: random.Random) -> None:
        self._load, self._rng = load, rng
        self._ended: Callable[[bytes], bool] = _stream_ended if load.stream else self._answer_ended
        self._received = b""
        self._length: int | None = None
        self._fresh = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self._send()

    def data_received(self, data: bytes) -> None:
        self._load.events += 1
        if self._fresh:
            self._fresh = False
            if not data.startswith(b"HTTP/1.1 200"):
                self._load.failures.append(data.split(b"\r\n", 1)[0].decode(errors="replace"))
                self._transport.abort()
                return
        if self._ended(data):
            self._load.answers += 1
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._load.failures.append(str(exc))

    def _send(self) -> None:
        self._fresh, self._received, self._length = True, b"", None
        self._transport.write(self._load.request(self._rng))

    def _answer_ended(self, data: bytes) -> bool:
        self._received += data
        if self._length is None and (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            self._length = end + 4 + int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        return self._length is not None and len(self._received) >= self._length


def _stream_ended(data: bytes) -> bool:
    """The last chunk of chunked coding is empty; it comes in one piece with the rest of a small write."""
    return data.endswith(b"0\r\n\r\n")

"""The Redis tier: a server that speaks the Redis protocol, such as Redis or Valkey."""

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import redis
from pagewise_shared.block_hash import BlockName, root_hash
from pagewise_shared.errors import ConfigError
from pagewise_shared.start_checks import connect_store

from pagewise_executor.tiers.block_names import (
    HEADER_BYTES,
    descendants,
    fingerprint_of,
    header,
    is_sound,
    short_hash,
)
from pagewise_executor.tiers.hashed import HashedTier
from pagewise_executor.tiers.small_copies import SmallCopies
from pagewise_executor.tiers.tier import Rows

T = TypeVar("T")

_PIECE_BYTES = 16 * 2**20
"""About the bytes of one request or answer."""
_IDENTITY = "pagewise:identity"
_REST_SECONDS = 5.0
"""The pause after a server has not answered: each try would wait for a time-out."""


class RedisTier(HashedTier):
    """A server's blocks of one ``content``, which names the model and the block format.

    The server has its own bound, ``maxmemory``, with the policy ``allkeys-lru``. ``expire``: seconds after which it
    deletes a block that was not written again; None: never. ``small``: see ``HashedTier``.
    """

    def __init__(
        self, url: str, content: str, bytes_per_block: int, expire: int | None = None, small: SmallCopies | None = None
    ) -> None:
        """Connect to ``url``, such as redis://host:6379/0, or rediss:// with TLS.

        Raises:
            ConfigError: there is no such server, or it does not let us in.
        """
        self._prefix = f"pagewise:{content}:".encode()
        self._expire = expire
        sizes = {bytes_per_block} | ({small.num_bytes} if small is not None else set())
        self._value_bytes = {HEADER_BYTES + size for size in sizes}
        self._per_piece = max(1, _PIECE_BYTES // bytes_per_block)
        self._rests_until = 0.0
        try:
            self._client = connect_store(url)
            self._client.set(_IDENTITY, uuid.uuid4().hex, nx=True)
            identity = self._client.get(_IDENTITY)
            assert isinstance(identity, bytes)
            super().__init__("redis", bytes_per_block, f"{identity.decode()} {content}", small)
        except (redis.RedisError, ValueError, OSError) as error:
            raise ConfigError(f"--store: {error}") from error

    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        """Return for each block whether the server has it, which counts as a use of it."""

        def lengths() -> list[bool]:
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.strlen(self._key(name))  # counts as a use; EXISTS does not
            pipeline.get(_IDENTITY)  # a use of the identity, which must not become the least recently used key
            return [length in self._value_bytes for length in pipeline.execute()[:-1]]

        return self._ask(lengths, [False] * len(names))

    def load(self, names: Sequence[BlockName], rows: Rows) -> list[bool]:
        """Read blocks into ``rows``. Return for each whether it was there and is sound; delete corrupt blocks."""
        found: list[bool] = []
        for start in range(0, len(names), self._per_piece):
            part = slice(start, start + self._per_piece)
            keys = [self._key(name) for name in names[part]]
            values: list[Any] = self._ask(partial(self._client.mget, keys), [None] * len(keys))
            found += map(self._take, names[part], rows[part], values)
        return found

    def _take(self, name: BlockName, row: Rows, value: Any) -> bool:
        if value is None:
            return False
        if len(value) in self._value_bytes:
            stored = np.frombuffer(value, np.uint8, offset=HEADER_BYTES)
            if is_sound(value[:HEADER_BYTES], name, stored) and self.restore(stored, row):
                return True
        self.failed("a block in the store is corrupt: its checksum does not match")
        self._ask(lambda: self._client.delete(self._key(name)), 0)
        return False

    def store(self, names: Sequence[BlockName], rows: Rows) -> list[bool]:
        """Write blocks. Return for each whether the server has taken it."""
        written: list[bool] = []
        for start in range(0, len(names), self._per_piece):
            part = slice(start, start + self._per_piece)
            written += self._send(names[part], rows[part])
        return written

    def _send(self, names: Sequence[BlockName], rows: Rows) -> list[bool]:
        def send() -> list[bool]:
            pipeline = self._client.pipeline(transaction=False)
            for name, row in zip(names, rows, strict=True):
                stored = self.stored(row)
                pipeline.set(self._key(name), header(name, stored) + stored.tobytes(), ex=self._expire)
            answers = pipeline.execute(raise_on_error=False)
            errors = [answer for answer in answers if isinstance(answer, Exception)]
            if errors:  # the server answers, but it is full or read-only
                self.failed("the store does not take a block: %s", errors[0])
            return [not isinstance(answer, Exception) for answer in answers]

        return self._ask(send, [False] * len(names))

    def close(self) -> None:
        """Void all jobs, end all threads, and disconnect."""
        super().close()
        self._client.close()

    def _key(self, name: BlockName) -> bytes:
        return self._prefix + name.hash.hex().encode() + b"." + short_hash(name.parent).encode()

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Return the server's answer, or ``otherwise`` if there is none."""
        if time.monotonic() < self._rests_until:
            return otherwise
        try:
            return question()
        except (redis.RedisError, OSError) as error:
            self.failed("the store does not answer: %s", error)
            self._rests_until = time.monotonic() + _REST_SECONDS
            return otherwise


def wipe(url: str, salt: str | None) -> int:
    """Delete all blocks of requests with a cache salt, of every model; returns how many there were.

    Raises:
        RedisError: the server does not answer, or does not let us in.
    """
    client = connect_store(url)
    contents: dict[str, dict[str, str]] = {}  # the parent of each block
    keys: dict[tuple[str, str], list[str]] = {}
    for key in client.scan_iter("pagewise:*:*", count=1000):
        _, content, block = key.decode().split(":")
        own, _, parent = block.partition(".")
        own = own[: len(parent)]
        contents.setdefault(content, {})[own] = parent
        keys.setdefault((content, own), []).append(key)
    num_wiped = 0
    for content, parents in contents.items():
        root = short_hash(root_hash(fingerprint_of(content), salt))
        for own in descendants(parents, root):
            num_wiped += client.delete(*keys[content, own])
    client.close()
    return num_wiped

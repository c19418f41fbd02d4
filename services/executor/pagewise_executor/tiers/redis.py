"""The Redis tier: a server that speaks the Redis protocol, such as Redis or Valkey."""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import redis
from pagewise_shared.block_hash import BlockHash, BlockName, root_hash
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import REDIS
from pagewise_shared.start_checks import connect_store

from pagewise_executor.tiers.block_names import (
    HEADER_BYTES,
    SALTS_BYTES,
    descendants,
    fingerprint_of,
    header,
    is_sound,
    of_salt,
    short_hash,
    stored_bytes,
)
from pagewise_executor.tiers.hashed import NO_SALTS, HashedTier
from pagewise_executor.tiers.small_copies import SmallCopies
from pagewise_executor.tiers.tier import Rows

T = TypeVar("T")

_PIECE_BYTES = 16 * 2**20
"""About the bytes of one request or answer."""
_IDENTITY = "pagewise:identity"
_SCANNED = 1000
"""About the keys of one answer of the server to a scan, and of one request to delete."""
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
            return [self._is_whole(length) for length in pipeline.execute()[:-1]]

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
        if self._is_whole(len(value)):
            begin = value[:HEADER_BYTES]
            stored = np.frombuffer(value, np.uint8)[HEADER_BYTES : HEADER_BYTES + stored_bytes(begin)]
            if is_sound(begin, name, stored) and self.restore(stored, row):
                return True
        self.failed("a block in the store is corrupt: its checksum does not match")
        self._ask(lambda: self._client.delete(self._key(name)), 0)
        return False

    def _is_whole(self, length: int) -> bool:
        """Whether a value of this length has a header and a block; the tags of a salt may follow."""
        return any(size <= length <= size + SALTS_BYTES for size in self._value_bytes)

    def store(self, names: Sequence[BlockName], rows: Rows, salts: Mapping[BlockHash, bytes] = NO_SALTS) -> list[bool]:
        """Write blocks. Return for each whether the server has taken it."""
        written: list[bool] = []
        for start in range(0, len(names), self._per_piece):
            part = slice(start, start + self._per_piece)
            written += self._send(names[part], rows[part], salts)
        return written

    def _send(self, names: Sequence[BlockName], rows: Rows, salts: Mapping[BlockHash, bytes]) -> list[bool]:
        def send() -> list[bool]:
            pipeline = self._client.pipeline(transaction=False)
            for name, row in zip(names, rows, strict=True):
                stored = self.stored(name, row)
                value = header(name, stored) + stored.tobytes() + salts.get(name.hash, b"")
                pipeline.set(self._key(name), value, ex=self._expire)
            answers = pipeline.execute(raise_on_error=False)
            errors = [answer for answer in answers if isinstance(answer, Exception)]
            if errors:  # the server answers, but it is full or read-only
                self.failed("the store does not take a block: %s", errors[0])
            return [not isinstance(answer, Exception) for answer in answers]

        return self._ask(send, [False] * len(names))

    def delete(self, names: Iterable[BlockName]) -> int:
        """Delete blocks. Return how many there were.

        Raises:
            RedisError: the server does not answer.
        """
        return self._delete(map(self._key, names))

    def delete_salt(self, tag: bytes) -> int:
        """Delete the blocks of a ``salt_tag``, or all (empty). Return how many there were.

        Raises:
            RedisError: the server does not answer.
        """
        keys: dict[str, list[bytes]] = {}
        parents: dict[str, str] = {}
        for key in self._client.scan_iter(self._prefix + b"*", count=_SCANNED):
            own, parent = _block_of(key)
            keys.setdefault(own, []).append(key)
            parents[own] = parent

        def tags_of(owns: Sequence[str]) -> list[bytes]:
            pipeline = self._client.pipeline(transaction=False)
            for own in owns:
                pipeline.getrange(keys[own][0], 0, HEADER_BYTES - 1)
            for own, begin in zip(owns, pipeline.execute(), strict=True):  # short: it is gone, or no block
                size = stored_bytes(begin) if len(begin) == HEADER_BYTES else 0
                pipeline.getrange(keys[own][0], HEADER_BYTES + size, -1)
            return list(pipeline.execute())

        return self._delete(key for own in of_salt(parents, tags_of, tag) for key in keys[own])

    def _delete(self, keys: Iterable[bytes]) -> int:
        keys, num_deleted = iter(keys), 0
        while some := list(islice(keys, _SCANNED)):
            num_deleted += int(self._client.unlink(*some))
            self.gone(REDIS, [bytes.fromhex(key[len(self._prefix) :].partition(b".")[0].decode()) for key in some])
        return num_deleted

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


def _block_of(key: bytes) -> tuple[str, str]:
    """Return the short hashes of the block of a key, and of its parent."""
    own, _, parent = key.decode().rpartition(":")[2].partition(".")
    return own[: len(parent)], parent


def wipe(url: str, salt: str | None) -> int:
    """Delete all blocks of requests with a cache salt, of every model; returns how many there were.

    Raises:
        RedisError: the server does not answer, or does not let us in.
    """
    client = connect_store(url)
    contents: dict[str, dict[str, str]] = {}  # the parent of each block
    keys: dict[tuple[str, str], list[bytes]] = {}
    for key in client.scan_iter("pagewise:*:*", count=_SCANNED):
        content = key.decode().split(":")[1]
        own, parent = _block_of(key)
        contents.setdefault(content, {})[own] = parent
        keys.setdefault((content, own), []).append(key)
    num_wiped = 0
    for content, parents in contents.items():
        root = short_hash(root_hash(fingerprint_of(content), salt))
        for own in descendants(parents, [root]):
            num_wiped += client.delete(*keys[content, own])
    client.close()
    return num_wiped

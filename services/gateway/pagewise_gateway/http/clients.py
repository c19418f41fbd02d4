"""Who sends requests: API keys, and what each of them may do."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Literal

from pagewise_shared.errors import ConfigError

from pagewise_gateway.http.errors import OverloadedError
from pagewise_gateway.http.key_file import KeyTable, Quota, digest_of, read_keys, read_variable
from pagewise_gateway.metrics import Metrics

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""How often the file of keys is looked at: a ``stat``, by the first request after that time."""

_MOST_FILE_BYTES = 4 * 1024 * 1024
_MOST_RETRY_SECONDS = 120
_SMOOTHING = 0.2


@dataclass(slots=True)
class _Bucket:
    """So much a minute, at most a minute's worth at once. ``level`` may fall below 0: then it is owed."""

    per_minute: int
    level: float
    updated: float

    def seconds_until(self, wanted: float, now: float) -> float:
        """Until the level is at least ``wanted``, 0 if it is."""
        self.level = min(self.per_minute, self.level + (now - self.updated) * self.per_minute / 60)
        self.updated = now
        return max(0.0, (wanted - self.level) * 60 / self.per_minute)


class Client:
    """Whoever holds keys of one name; without keys there is one, with the name "", who may do everything."""

    def __init__(self, name: str, quota: Quota, metrics: Metrics) -> None:
        self.name = name
        self._metrics = metrics
        self._running = 0
        self._seconds = 1.0
        self._requests: _Bucket | None = None
        self._tokens: _Bucket | None = None
        self.limit(quota)

    def limit(self, quota: Quota) -> None:
        """Set what the client may do from now on; what it has used is remembered where the limit stays the same."""
        self._quota = quota
        self._requests = _bucket(self._requests, quota.requests_per_minute)
        self._tokens = _bucket(self._tokens, quota.tokens_per_minute)

    def begin(self) -> float:
        """Count a request that begins; returns when, for ``end``.

        Raises:
            OverloadedError: it is over one of the client's limits; the text says which.
        """
        now, quota = monotonic(), self._quota
        if quota.concurrent is not None and self._running >= quota.concurrent:
            text = f"{self._running} requests are running, the limit of concurrent requests is {quota.concurrent}"
            raise self._refusal("key_concurrent", text, self._seconds / quota.concurrent)
        if self._requests is not None and (seconds := self._requests.seconds_until(1, now)):
            text = f"the limit of {quota.requests_per_minute} requests per minute is used up"
            raise self._refusal("key_requests_per_minute", text, seconds)
        if self._tokens is not None and (seconds := self._tokens.seconds_until(1, now)):
            text = f"the limit of {quota.tokens_per_minute} tokens per minute is used up"
            raise self._refusal("key_tokens_per_minute", text, seconds)
        if self._requests is not None:
            self._requests.level -= 1
        self._running += 1
        if self.name:
            self._metrics.key_requests(self.name).inc()
        return now

    def end(self, began: float) -> None:
        """A request that began then has ended."""
        self._running -= 1
        self._seconds += _SMOOTHING * (monotonic() - began - self._seconds)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A request that runs, from beginning to end.

        Raises:
            OverloadedError: as in ``begin``.
        """
        began = self.begin()
        try:
            yield
        finally:
            self.end(began)

    def use(self, kind: Literal["prompt", "generation"], tokens: int) -> None:
        """Count tokens of a request."""
        if self._tokens is not None:
            self._tokens.level -= tokens
        if self.name:
            self._metrics.key_tokens(self.name, kind).inc(tokens)

    def _refusal(self, reason: str, text: str, seconds: float) -> OverloadedError:
        self._metrics.requests_refused(reason).inc()
        return OverloadedError(f"API key {self.name}: {text}", retry_after=min(_MOST_RETRY_SECONDS, ceil(seconds)))


class Keyring:
    """The keys that are good, and the clients that hold them. The file is read again when it changes.

    A file that cannot be read or understood leaves the keys as they were: that is logged, and counted.
    """

    def __init__(self, variable: str | None, path: str | None, usual: Quota, metrics: Metrics) -> None:
        """``variable``: keys as in the environment, ``path``: of a file of them; at least one of both.

        Raises:
            ConfigError: there is no key, or a line cannot be understood.
        """
        self._variable, self._path, self._usual = variable, Path(path) if path else None, usual
        self._metrics = metrics
        self._clients: dict[str, Client] = {}
        self._keys: dict[bytes, Client] = {}
        self._seen = self._signature()
        self._next_check = monotonic() + CHECK_SECONDS
        self._load()

    def find(self, key: str) -> Client | None:
        """Who holds this key. The time it takes tells nothing about the keys that are good."""
        if self._path is not None and monotonic() >= self._next_check:
            self._refresh()
        return self._keys.get(digest_of(key))

    def _refresh(self) -> None:
        self._next_check = monotonic() + CHECK_SECONDS
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._load()
        except ConfigError as error:
            self._metrics.key_reloads("failed").inc()
            log.error("the API keys stay as they were: %s", error)
            return
        self._metrics.key_reloads("done").inc()
        log.info("API keys read again: %d keys of %d names", len(self._keys), len(self._clients))

    def _signature(self) -> tuple[int, ...]:
        if self._path is None:
            return ()
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino

    def _load(self) -> None:
        table = KeyTable()
        if self._variable:
            read_variable(self._variable, "PAGEWISE_API_KEYS", self._usual, table)
        if self._path is not None:
            try:
                with self._path.open(encoding="utf-8") as file:
                    text = file.read(_MOST_FILE_BYTES + 1)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{self._path} cannot be read: {error}") from error
            if len(text) > _MOST_FILE_BYTES:
                raise ConfigError(f"{self._path} is longer than {_MOST_FILE_BYTES} characters")
            read_keys(text, str(self._path), self._usual, table)
        if not table.names:
            raise ConfigError(f"there is no API key in {self._path or 'PAGEWISE_API_KEYS'}")
        clients = {}
        for name, quota in table.quotas.items():
            if (client := self._clients.get(name)) is None:
                client = Client(name, quota, self._metrics)
            client.limit(quota)
            clients[name] = client
        self._clients = clients
        self._keys = {digest: clients[name] for digest, name in table.names.items()}


def _bucket(before: _Bucket | None, per_minute: int | None) -> _Bucket | None:
    if per_minute is None:
        return None
    if before is not None and before.per_minute == per_minute:
        return before
    return _Bucket(per_minute, float(per_minute), monotonic())

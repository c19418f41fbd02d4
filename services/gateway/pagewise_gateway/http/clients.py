"""Who sends requests: API keys, and the limits of those who hold them. The scheduler counts, over all gateways."""

import logging
from dataclasses import dataclass
from pathlib import Path

from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import KeyLimits

from pagewise_gateway.http.key_file import KeyTable, digest_of, read_keys, read_variable
from pagewise_gateway.http.watched_files import WatchedFiles
from pagewise_gateway.metrics import Metrics

log = logging.getLogger(__name__)

_MOST_FILE_BYTES = 4 * 1024 * 1024


@dataclass(slots=True, frozen=True)
class Client:
    """Whoever holds keys of one name; without keys there is one, with the name "", who may do everything."""

    name: str
    limits: KeyLimits

    @property
    def limited(self) -> bool:
        """Whether there is anything this client may not do as much as it likes."""
        return self.limits != KeyLimits()


class Keyring:
    """The keys that are good, and the clients that hold them. The file is read again when it changes.

    A file that cannot be read or understood leaves the keys as they were: that is logged, and counted.
    """

    def __init__(self, variable: str | None, path: str | None, usual: KeyLimits, metrics: Metrics) -> None:
        """``variable``: keys as in the environment, ``path``: of a file of them; at least one of both. ``usual``: the
        limits of clients that have none of their own.

        Raises:
            ConfigError: there is no key, or a line cannot be understood.
        """
        self._variable, self._path, self._usual = variable, Path(path) if path else None, usual
        self._metrics = metrics
        self._file = WatchedFiles([self._path] if self._path else [])
        self._keys = self._load()

    def find(self, key: str) -> Client | None:
        """Who holds this key. The time it takes tells nothing about the keys that are good."""
        if self._file.changed():
            self._reload()
        return self._keys.get(digest_of(key))

    def _reload(self) -> None:
        try:
            self._keys = self._load()
        except ConfigError as error:
            self._metrics.key_reloads("failed").inc()
            log.error("the API keys stay as they were: %s", error)
            return
        self._metrics.key_reloads("done").inc()
        log.info("API keys read again: %d keys", len(self._keys))

    def _load(self) -> dict[bytes, Client]:
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
        clients = {name: Client(name, limits) for name, limits in table.limits.items()}
        return {digest: clients[name] for digest, name in table.names.items()}

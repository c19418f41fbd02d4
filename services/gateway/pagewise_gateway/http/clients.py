"""API keys, and the clients that hold them. The scheduler holds clients to their limits, over all gateways."""

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
    """Whoever holds the API keys of one name.

    If no keys are configured, there is a single client: its name is empty, and it has no limits.
    """

    name: str
    limits: KeyLimits

    @property
    def limited(self) -> bool:
        """Whether this client has any limit."""
        return self.limits != KeyLimits()


class Keyring:
    """The valid API keys, and the clients that hold them. The key file is read again when it changes.

    If a changed file cannot be read or understood, the keys stay as they were, which is logged and counted.
    """

    def __init__(self, variable: str | None, path: str | None, usual: KeyLimits, metrics: Metrics) -> None:
        """Read the keys.

        ``variable``: the value of PAGEWISE_API_KEYS. ``path``: of the key file. At least one of the two is given.
        ``usual``: the limits of clients for which no others are set.

        Raises:
            ConfigError: there is no key, or a line cannot be understood.
        """
        self._variable, self._path, self._usual = variable, Path(path) if path else None, usual
        self._metrics = metrics
        self._file = WatchedFiles([self._path] if self._path else [])
        self._keys = self._load()

    def find(self, key: str) -> Client | None:
        """Return the client that holds ``key``, or None. How long this takes reveals nothing about the valid keys."""
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

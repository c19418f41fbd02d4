"""API keys, and the clients that hold them. The scheduler holds clients to their limits, over all gateways."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import KeyLimits

from pagewise_gateway.http.key_file import KeyTable, Rights, digest_of, read_keys, read_variable
from pagewise_gateway.http.watched_files import WatchedFiles
from pagewise_gateway.metrics import Metrics

log = logging.getLogger(__name__)

_MOST_FILE_BYTES = 4 * 1024 * 1024
_NAMED = 10
"""Operators that are named in the log."""


@dataclass(slots=True, frozen=True)
class Client:
    """Whoever holds the API keys of one name.

    ``shares``: whether it shares cached KV with all other clients, because the gateway was started so.
    """

    name: str
    rights: Rights
    shares: bool = False

    @property
    def limits(self) -> KeyLimits:
        """What the scheduler holds this client to."""
        return self.rights.limits

    @property
    def limited(self) -> bool:
        """Whether this client has any limit."""
        return self.limits != KeyLimits()

    @property
    def view(self) -> str:
        """The name whose requests this client may see in ``/debug``; empty: those of everybody."""
        return "" if self.rights.operator else self.name

    def cache_salt(self, given: str | None) -> str | None:
        """Return the salt of a request's cached KV. ``given``: the one in its body, which separates further.

        The part before the first ``/`` says who shares the cache: all, one group, or one name. Names contain no ``/``
        and clients choose only what follows it, so no choice leads to the cache of others. Gateways without API keys
        put their part there too, because they may serve the same fleet.
        """
        own = f"group:{self.rights.share}" if self.rights.share else f"key:{self.name}"
        sharing = "all" if self.shares else own
        if given is not None:
            return f"{sharing}/{given}"
        return None if self.shares else sharing


EVERYBODY = Client("", Rights(priority=None, operator=True), shares=True)
"""The only client there is if no API keys are configured."""


class Keyring:
    """The valid API keys, and the clients that hold them. The key file is read again when it changes.

    If a changed file cannot be read or understood, the keys stay as they were, which is logged and counted.
    """

    def __init__(
        self,
        variable: str | None,
        path: str | None,
        usual: KeyLimits,
        metrics: Metrics,
        *,
        share_cache: bool = False,
    ) -> None:
        """Read the keys.

        ``variable``: the value of PAGEWISE_API_KEYS. ``path``: of the key file. At least one of the two is given.
        ``usual``: the limits of clients for which no others are set. ``share_cache``: all share cached KV.

        Raises:
            ConfigError: there is no key, or a line cannot be understood.
        """
        self._variable, self._path, self._usual = variable, Path(path) if path else None, usual
        self._metrics, self._share_cache = metrics, share_cache
        self._warned = False
        self._file = WatchedFiles([self._path] if self._path else [])
        self._keys = self._load()
        names = {client.name: client.rights.operator for client in self._keys.values()}
        operators = [name for name, operator in names.items() if operator]
        log.info(
            "API keys of %d clients; /metrics and /debug of all are shown to %s",
            len(names),
            ", ".join(operators[:_NAMED]) + ("" if len(operators) <= _NAMED else ", ...")
            if operators
            else "none of them: write operator=yes behind a key",
        )

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
                    self._check_mode(os.fstat(file.fileno()), self._path)
                    text = file.read(_MOST_FILE_BYTES + 1)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{self._path} cannot be read: {error}") from error
            if len(text) > _MOST_FILE_BYTES:
                raise ConfigError(f"{self._path} is longer than {_MOST_FILE_BYTES} characters")
            read_keys(text, str(self._path), self._usual, table)
        if not table.names:
            raise ConfigError(f"there is no API key in {self._path or 'PAGEWISE_API_KEYS'}")
        clients = {name: Client(name, rights, self._share_cache) for name, rights in table.rights.items()}
        return {digest: clients[name] for digest, name in table.names.items()}

    def _check_mode(self, status: os.stat_result, path: Path) -> None:
        """Warn once if others can read the keys.

        A file of another owner is read through its group, as in a pod, where secrets belong to root.
        """
        own = status.st_uid == os.geteuid()
        if status.st_mode & (0o044 if own else 0o004) and not self._warned:
            self._warned = True
            log.warning(
                "%s holds API keys, and %s can read it: chmod %d %s",
                path,
                "its group or everybody" if own else "everybody",
                600 if own else 640,
                path,
            )

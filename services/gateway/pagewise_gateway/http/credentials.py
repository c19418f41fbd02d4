"""API keys, the clients that hold them, and the TLS certificate. Their files are read again when they change.

The scheduler enforces the limits of clients, over all gateways.
"""

import hmac
import logging
import os
import re
import secrets
import ssl
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import KeyLimits, MemoryBudget

from pagewise_gateway.http import key_budgets
from pagewise_gateway.metrics import Metrics

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""Files are checked, by one ``stat`` each, at most this often."""
SOLE_NAME = "default"
"""The name of a key that the environment variable holds without a name. It is an operator's key."""
_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})(?:\s*:\s*|\s+)(?P<key>[\x21-\x7e]+)(?P<rights>(?:\s+\S+)*)"
)
_LIMITS = {
    "concurrent": "concurrent",
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
}
_LEAST_PRIORITY = -(2**31)
_RIGHTS = {
    **dict.fromkeys(_LIMITS, (r"none|(?=.{1,12}$)0*[1-9][0-9]*", "a whole number from 1, or none")),
    "priority": (r"0|-[0-9]{1,10}", f"a whole number from {_LEAST_PRIORITY} to 0, the lowest one allowed"),
    "share": (r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a name of up to 64 letters, digits, dots, - and _"),
    "operator": ("yes|no", "yes or no"),
    **key_budgets.RIGHTS,
}
"""Right -> the pattern of its value, and the value in words."""
LOWEST_PRIORITY = 0
"""The lowest priority that a client may ask for whose line grants none."""
MOST_KEYS = 10_000
"""The maximum number of keys."""
_SECRET = secrets.token_bytes(32)
_MOST_FILE_BYTES = 4 * 1024 * 1024
_NAMED = 10
"""Operators that are named in the log."""


class Client(Struct, frozen=True):
    """The holder of the API keys of one name, and its rights.

    Fields:
        limits: enforced by the scheduler, over all gateways.
        priority: the lowest priority that its requests may ask for; the lowest runs the earliest. None: any.
        share: the group of names whose requests share cached KV; empty: requests of this name share it with each other.
        operator: whether it sees the requests of all keys in ``/debug``, and ``/metrics``.
        shares: whether it shares cached KV with all other clients, which is an option of the gateway.
        memory: the budgets of its cached KV, or of the cached KV of its group.
    """

    name: str
    limits: KeyLimits = KeyLimits()
    priority: int | None = LOWEST_PRIORITY
    share: str = ""
    operator: bool = False
    shares: bool = False
    memory: tuple[MemoryBudget, ...] = ()

    @property
    def owner(self) -> str:
        """The owner of its cached KV: the group with which it shares the cache, or the client."""
        return f"group:{self.share}" if self.share else f"key:{self.name}"

    @property
    def view(self) -> str:
        """The name whose requests this client may see in ``/debug``; empty: the requests of all names."""
        return "" if self.operator else self.name

    def cache_salt(self, given: str | None) -> str | None:
        """Return the salt of a request's cached KV. ``given``: the salt in its body, which separates further.

        The part before the first ``/`` names the clients that share the cache: all, one group, or one name. Names
        contain no ``/``, and clients choose only the part behind it, so no choice leads to the cache of others.
        Gateways without API keys put their part there too, because they may serve the same executors.
        """
        sharing = "all" if self.shares else self.owner
        if given is not None:
            return f"{sharing}/{given}"
        return None if self.shares else sharing


ANONYMOUS = Client("", priority=None, operator=True, shares=True)
"""The only client if no API keys are configured."""


def digest_of(key: str) -> bytes:
    """Return the digest by which a key is stored and looked up.

    Only this process can compute the digest of a guessed key. So the time that a lookup takes reveals nothing about the
    valid keys, in whichever way it compares digests.
    """
    return hmac.digest(_SECRET, key.encode(errors="surrogateescape"), "sha256")


def read_keys(text: str, source: str, usual: Client, clients: dict[bytes, Client]) -> None:
    """Add the keys in ``text`` to ``clients``, by digest. ``usual``: a client with the default rights.

    Raises:
        ConfigError: a line cannot be understood. The text names ``source`` and the line, never a key.
    """
    by_name = {client.name: client for client in clients.values()}
    set_in: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{source}, line {number}"
        if (match := _matched(line, where)) is None:
            continue
        name, digest = match["name"], digest_of(match["key"])
        if digest in clients:
            raise ConfigError(f"{where}: the key of {name} is there already")
        if len(clients) >= MOST_KEYS:
            raise ConfigError(f"{where}: more than {MOST_KEYS} keys")
        clients[digest] = by_name.setdefault(name, replace(usual, name=name))
        if match["rights"]:
            if name in set_in:
                raise ConfigError(f"{where}: what {name} may do is set already, in {set_in[name]}")
            set_in[name] = where
            by_name[name] = replace(usual, name=name, **_rights(match["rights"].split(), usual.limits, where))
    # A name may have several keys, and its rights may follow any of them.
    clients.update({digest: by_name[client.name] for digest, client in clients.items()})


def _matched(line: str, where: str) -> re.Match[str] | None:
    line = re.sub(r"(^|\s)#.*", "", line).strip()
    if not line:
        return None
    match = _LINE.fullmatch(line)
    if match is None or match["key"].partition("=")[0] in _RIGHTS:
        raise ConfigError(f"{where}: write NAME: KEY, then what it may do, such as concurrent=4")
    return match


def read_variable(text: str, source: str, usual: Client, clients: dict[bytes, Client]) -> None:
    """Add the keys of an environment variable: lines as in a file, entries between commas, or one key without a name.

    Raises:
        ConfigError: as in ``read_keys``.
    """
    text = text.strip()
    if re.fullmatch(r"[^\s,:#]+", text):
        text = f"{SOLE_NAME}: {text} operator=yes"
    read_keys(text.replace(",", "\n"), source, usual, clients)


def _rights(words: list[str], usual: KeyLimits, where: str) -> dict[str, Any]:
    limits: dict[str, int | None] = {}
    others: dict[str, Any] = {}
    budgets: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in _RIGHTS:
            key_budgets.check_tier(name, where)
            raise ConfigError(f"{where}: what follows the key has to be one of {', '.join(_RIGHTS)}, = and a value")
        pattern, form = _RIGHTS[name]
        if not re.fullmatch(pattern, value) or (name == "priority" and int(value) < _LEAST_PRIORITY):
            raise ConfigError(f"{where}: {name} takes {form}")
        if name in key_budgets.RIGHTS:
            budgets[name] = value
        elif name in _LIMITS:
            limits[_LIMITS[name]] = None if value == "none" else int(value)
        elif name == "priority":
            others[name] = int(value)
        else:
            others[name] = value == "yes" if name == "operator" else value
    memory = key_budgets.budgets_of(budgets, where)
    return {"limits": replace(usual, **limits), "memory": memory, **others}


def _shared_budgets(clients: dict[bytes, Client], source: str) -> dict[bytes, Client]:
    """Give all clients of a group the budgets of the group.

    Raises:
        ConfigError: budgets contradict each other, or belong to clients that share one cache (``--share-cache``).
    """
    by_name = {client.name: client for client in clients.values()}
    budgets = key_budgets.budgets_by_owner(((one.name, one.owner, one.memory) for one in by_name.values()), source)
    if any(by_name[name].shares and by_name[name].memory for name in by_name):
        raise ConfigError(f"{source}: with --share-cache all keys have one cache, so none has a budget of memory")
    return {digest: replace(one, memory=budgets.get(one.owner, ())) for digest, one in clients.items()}


class WatchedFiles:
    """Notices changes of files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._seen = [_file_state(path) for path in paths]
        self._next_check = monotonic() + CHECK_SECONDS

    def changed(self) -> bool:
        """Return whether a file has changed since the last check. Checks are ``CHECK_SECONDS`` or more apart."""
        now = monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + CHECK_SECONDS
        before, self._seen = self._seen, [_file_state(path) for path in self._paths]
        return self._seen != before


def _file_state(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


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
        """``variable``: the value of PAGEWISE_API_KEYS. ``path``: of the key file. At least one of the two is given.
        ``usual``: the default limits of clients. ``share_cache``: all clients share cached KV.

        Raises:
            ConfigError: there is no key, or a line cannot be understood.
        """
        self._variable, self._path = variable, Path(path) if path else None
        self._usual, self._metrics = Client("", usual, shares=share_cache), metrics
        self._warned = False
        self._file = WatchedFiles([self._path] if self._path else [])
        self._keys = self._load()
        names = {client.name: client.operator for client in self._keys.values()}
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
            try:
                self._keys = self._load()
            except ConfigError as error:
                self._metrics.key_reloads("failed").inc()
                log.error("the API keys stay as they were: %s", error)
            else:
                self._metrics.key_reloads("done").inc()
                log.info("API keys read again: %d keys", len(self._keys))
        return self._keys.get(digest_of(key))

    def _load(self) -> dict[bytes, Client]:
        clients: dict[bytes, Client] = {}
        if self._variable:
            read_variable(self._variable, "PAGEWISE_API_KEYS", self._usual, clients)
        if self._path is not None:
            try:
                with self._path.open(encoding="utf-8") as file:
                    self._check_mode(os.fstat(file.fileno()), self._path)
                    text = file.read(_MOST_FILE_BYTES + 1)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{self._path} cannot be read: {error}") from error
            if len(text) > _MOST_FILE_BYTES:
                raise ConfigError(f"{self._path} is longer than {_MOST_FILE_BYTES} characters")
            read_keys(text, str(self._path), self._usual, clients)
        if not clients:
            raise ConfigError(f"there is no API key in {self._path or 'PAGEWISE_API_KEYS'}")
        return _shared_budgets(clients, str(self._path or "PAGEWISE_API_KEYS"))

    def _check_mode(self, status: os.stat_result, path: Path) -> None:
        """Warn once if other users can read the keys.

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


class Certificate:
    """A server's certificate chain and private key, in two files or in one.

    They are read again when a file changes, so that renewing a certificate needs no restart. If the files cannot be
    read or do not belong together, the certificate stays as it was, which is logged and counted.

    Fields:
        context: the TLS context of a listening socket. New connections get the newest certificate, and open ones keep
            theirs.
    """

    def __init__(self, certfile: str, keyfile: str | None, metrics: Metrics) -> None:
        """Raises:
        ConfigError: the files cannot be read, or do not belong together.
        """
        self._certfile, self._keyfile = certfile, keyfile
        self._metrics = metrics
        self._files = WatchedFiles([Path(file) for file in (certfile, keyfile) if file])
        self._newest = self.context = self._load()
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        if self._files.changed():
            try:
                self._newest = self._load()
            except ConfigError as error:
                self._metrics.certificate_reloads("failed").inc()
                log.error("the TLS certificate stays as it was: %s", error)
            else:
                self._metrics.certificate_reloads("done").inc()
                log.info("TLS certificate read again from %s", self._certfile)
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without this password, OpenSSL would ask on the terminal for the password of an encrypted key, and block.
            context.load_cert_chain(self._certfile, self._keyfile, password=lambda: b"")
        except (OSError, ValueError) as error:  # also ssl.SSLError
            files = self._certfile if self._keyfile is None else f"{self._certfile} and {self._keyfile}"
            raise ConfigError(f"{files} cannot be used as a TLS certificate: {error}") from error
        return context


def load_certificate(certfile: str | None, keyfile: str | None, metrics: Metrics) -> Certificate | None:
    """Return the certificate that the options name, or None if they name none: HTTP is not encrypted then.

    Raises:
        ConfigError: there is a key without a certificate, or the files cannot be used.
    """
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    return Certificate(certfile, keyfile, metrics)

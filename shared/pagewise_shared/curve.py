"""CURVE between processes: key pairs in a folder, and allow-lists of executors and gateways.

``pagewise keys`` makes the folder. A process needs ``public/`` and the folder of its own name::

    keys/
        public/scheduler.key        the scheduler's public key
        public/NAME.key             public keys of executors: their allow-list
        public/gateways/NAME.key    public keys of gateways: their allow-list
        NAME/NAME.key_secret        key pair of NAME, readable by its owner alone

Files are ZeroMQ certificates (``zmq.auth``). The allow-lists are read again when files change, so adding or revoking a
key needs no restart. Files and folders that another user or a group can write are refused, because a writer could add
keys. A key is of one kind: the socket for gateways refuses the key of an executor, and vice versa.
"""

import contextlib
import ipaddress
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import zmq
from zmq.auth import load_certificate
from zmq.auth.thread import ThreadAuthenticator

from pagewise_shared.errors import ConfigError
from pagewise_shared.logs import BoundedLog
from pagewise_shared.ownership import foreign_writers

log = logging.getLogger(__name__)

SCHEDULER = "scheduler"
"""Name of the scheduler's key."""
EXECUTOR = "executor"
"""Default name of an executor's key."""
GATEWAY = "gateway"
"""Default name of a gateway's key."""
PUBLIC = "public"
"""Name of the folder of public keys."""
GATEWAYS = "gateways"
"""Name of the folder of gateways' keys inside it."""

Kind = Literal["executor", "gateway"]
"""The kind of process that a key belongs to; the scheduler's own key has none."""
KINDS: tuple[Kind, ...] = get_args(Kind)

_LOOPBACK_NAMES = ("localhost", "lo")


class _KeyFile(NamedTuple):
    """A file with a public key, and the properties that change with its content."""

    kind: Kind
    name: str
    inode: int
    size: int
    changed: int


class _AllowLists(NamedTuple):
    """Names by public key, for each kind, and the files that they were read from."""

    names: dict[Kind, dict[str, str]]
    files: frozenset[_KeyFile]


class Keys:
    """The key pair of a process, and the public keys of its peers. May be used from any thread.

    ``name``: of the pair. ``public``, ``secret``: the pair in Z85 text, as ZeroMQ takes it.
    """

    def __init__(self, directory: Path, name: str) -> None:
        """Read the pair of ``name`` and the public keys.

        Raises:
            ConfigError: a file is missing or is no certificate, or other users can change a file or a folder; the text
                names it.
        """
        self.name = name
        self._directory = directory
        path = secret_file(directory, name)
        self.public, secret = _load(path, name)
        _check_writers(path.parent)
        if secret is None:
            raise ConfigError(f"{path} holds no secret key")
        if path.stat().st_mode & 0o004:
            log.warning("%s can be read by everybody on this machine: chmod 600 it", path)
        self.secret = secret
        self.scheduler = _load(public_file(directory, SCHEDULER), SCHEDULER)[0]
        for folder in (directory, *filter(Path.exists, (_public_folder(directory, kind) for kind in KINDS))):
            _check_writers(folder)
        self._complaints = BoundedLog(log)
        self._allowed = _AllowLists({kind: {} for kind in KINDS}, frozenset())
        self._refresh()

    def allowed(self, kind: Kind = "executor") -> Mapping[str, str]:
        """Return the current allow-list of a kind: names by public key (Z85 text)."""
        self._refresh()
        return self._allowed.names[kind]

    def kind(self, public_key: str) -> Kind | None:
        """Return whether a public key is an executor's or a gateway's; None if it is on no allow-list now."""
        self._refresh()
        return next((kind for kind, names in self._allowed.names.items() if public_key in names), None)

    def secure_client(self, socket: "zmq.Socket[Any]", server_key: bytes | None = None) -> None:
        """Let ``socket`` connect to the owner of ``server_key`` only, by default the scheduler. Call it before
        connect."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = server_key or self.scheduler

    def _refresh(self) -> None:
        """Read the allow-lists again if files have changed. They stay as they were if the files cannot be listed."""
        try:
            files = frozenset(_list_keys(self._directory))
        except (OSError, ConfigError) as error:
            self._complaints.warning("the allow-lists cannot be read and stay as they were: %s", error)
            return
        if files == self._allowed.files:
            return
        names: dict[Kind, dict[str, str]] = {kind: {} for kind in KINDS}
        for file in files:
            try:
                public, _ = _load(public_file(self._directory, file.name, file.kind), file.name)
                names[file.kind][public.decode()] = file.name
            except ConfigError as error:
                self._complaints.warning("not on the allow-list: %s", error)
        # A single assignment, so that other threads see either the old lists or the new ones.
        self._allowed = _AllowLists(names, files)


class Authenticator(ThreadAuthenticator):
    """Makes the secured sockets of one ZeroMQ context accept the keys on their allow-list, and no others.

    The User-Id of a message is then the public key of its sender (Z85 text). ``on_refused``: called for every refused
    connection, on the authenticator's thread. A context has at most one authenticator; without it, secured sockets
    accept no connection.
    """

    def __init__(self, context: "zmq.Context[Any]", keys: Keys, on_refused: Callable[[], None]) -> None:
        super().__init__(context)
        self._keys, self._on_refused = keys, on_refused
        self._address = ""
        self._complaints = BoundedLog(log)
        for kind in KINDS:
            self.configure_curve_callback(kind, self)
        self.start()

    def secure_server(self, socket: "zmq.Socket[Any]", kind: Kind = "executor") -> None:
        """Let ``socket`` accept only keys on the allow-list of ``kind``. Call it before bind."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        # ZeroMQ's requests to authenticate have the domain of the socket.
        socket.zap_domain = kind.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def close(self) -> None:
        """Stop. Call it before the context is terminated."""
        self.stop()

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Answer ZeroMQ's request to authenticate a connection."""
        self._address = msg[3].decode(errors="replace") if len(msg) > 3 else ""
        await super().handle_zap_message(msg)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether ``key`` (Z85) may connect to a socket whose ``domain`` is a kind of process."""
        kind = self._keys.kind(key.decode())
        if kind == domain:
            return True
        problem = "unknown key" if kind is None else f"key of the wrong kind ({kind}, not {domain})"
        self._complaints.warning("refused a connection from %s: %s %s", self._address, problem, key.decode())
        self._on_refused()
        return False


def load_keys(directory: str | None, name: str, endpoint: str, plaintext: bool) -> Keys | None:
    """Return the keys of the process ``name`` for ``endpoint``, or None if it communicates in plain text.

    Raises:
        ConfigError: the keys cannot be read; or there are none, ``endpoint`` leaves this host, and ``plaintext`` is not
            set.
    """
    if directory is not None:
        return Keys(Path(directory), name)
    if not leaves_host(endpoint):
        return None
    if not plaintext:
        raise ConfigError(
            f"{endpoint} leaves this machine and there are no keys: make some with `pagewise keys init` and give "
            "--keys, or say --plaintext if nobody else can reach that network"
        )
    log.warning("%s is plain text: whoever reaches that network can join, read prompts, and forge outputs", endpoint)
    return None


def leaves_host(endpoint: str) -> bool:
    """Whether traffic of a ZeroMQ endpoint can come from or go to another machine."""
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("ipc", "inproc"):
        return False
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host not in _LOOPBACK_NAMES


def public_file(directory: Path, name: str, kind: Kind = "executor") -> Path:
    """Return the file of the public key of ``name``. The scheduler's is in the folder of executors' keys."""
    return _public_folder(directory, kind) / f"{name}.key"


def secret_file(directory: Path, name: str) -> Path:
    """Return the file of the key pair of ``name``."""
    return directory / name / f"{name}.key_secret"


def _load(path: Path, name: str) -> tuple[bytes, bytes | None]:
    """Return the public and the secret key of a certificate."""
    if not path.exists():
        raise ConfigError(f"there is no key of {name!r}: no file {path}")
    _check_writers(path)
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a key: {error}") from error
    for key in (public, secret):
        if key is not None and len(key) != 40:
            raise ConfigError(f"{path} holds no CURVE key: 40 characters are one, not {len(key)}")
    return public, secret


def _check_writers(path: Path) -> None:
    """Refuse a file or folder of keys that another user can change."""
    try:
        problem = foreign_writers(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if problem is not None:
        raise ConfigError(f"keys in {path} would not be safe: {problem}")


def _public_folder(directory: Path, kind: Kind) -> Path:
    return directory / PUBLIC / GATEWAYS if kind == "gateway" else directory / PUBLIC


def _list_keys(directory: Path) -> Iterator[_KeyFile]:
    """Yield the files of the public keys of executors and gateways."""
    for kind in KINDS:
        folder = _public_folder(directory, kind)
        if kind == "gateway" and not folder.exists():  # there is no key of a gateway yet
            continue
        _check_writers(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name.removesuffix(".key")
                if name in (entry.name, SCHEDULER):
                    continue
                with contextlib.suppress(FileNotFoundError):  # it was removed since the folder was listed
                    stat = entry.stat()
                    yield _KeyFile(kind, name, stat.st_ino, stat.st_size, stat.st_mtime_ns)

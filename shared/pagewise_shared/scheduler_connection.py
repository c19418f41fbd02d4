"""The connection of executors and gateways to the scheduler: their socket, and its recovery."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import zmq
import zmq.asyncio

from pagewise_shared.connections import Broken, Connections, HandshakeFailure
from pagewise_shared.curve import Keys
from pagewise_shared.errors import ConfigError
from pagewise_shared.logs import BoundedLog

log = logging.getLogger(__name__)

HELLO_PAUSES = (1.0, 1.0, 2.0, 5.0)
"""Seconds to wait for an answer to each Hello before the next one; the last pause repeats."""
RESTART_HELLOS = 3
"""Hellos without an answer that are usual while a scheduler restarts, and are logged without a warning."""

LEAST_SILENCE, MOST_SILENCE = 3.0, 5.0
"""Bounds of the seconds of silence after which the scheduler is given up. ZeroMQ closes the connection at the lower
bound too: a scheduler that continues after a shorter pause still has all state, and joining it again costs each request
its place."""

HANDSHAKE_MS = 3000
"""Time-out of a handshake in milliseconds, which takes three round trips, with encryption."""

_RETRY_SECONDS = 2.0
_GREETING_SECONDS = 2.0
_OWN_SECONDS = 0.5
"""A connection that breaks so soon after reconnecting is the old one, which reconnecting has closed."""
_MOVED_SECONDS = 0.25
"""Pause between two reads of a file with the scheduler's address."""


class SchedulerAddress:
    """The address of the scheduler: a ZeroMQ endpoint, or ``file:PATH`` of a file that contains one.

    Moving the scheduler to another host replaces this file atomically, by renaming another one.
    """

    def __init__(self, given: str) -> None:
        """Read the file, if it is one.

        Raises:
            ConfigError: the file cannot be read, or is empty.
        """
        self._file = Path(given.removeprefix("file:")) if given.startswith("file:") else None
        self.endpoint = given if self._file is None else self._read()

    async def moved(self) -> str:
        """Wait until the file contains another endpoint, set ``endpoint`` to it, and return the one before."""
        while True:
            await asyncio.sleep(_MOVED_SECONDS if self._file is not None else 3600.0)
            with contextlib.suppress(ConfigError):  # the file is being replaced
                before, self.endpoint = self.endpoint, self._read() if self._file is not None else self.endpoint
                if self.endpoint != before:
                    return before

    def _read(self) -> str:
        assert self._file is not None
        try:
            text = self._file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"--scheduler: {self._file} cannot be read: {error.strerror}") from error
        if not text:
            raise ConfigError(f"--scheduler: {self._file} is empty and should hold the scheduler's endpoint")
        return text


def make_dealer(context: zmq.asyncio.Context, keys: Keys | None, max_frame_bytes: int) -> zmq.asyncio.Socket:
    """Return a socket for the scheduler, not connected yet. A frame above ``max_frame_bytes`` breaks the connection."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
    socket.setsockopt(zmq.LINGER, 1000)  # milliseconds, so that a Goodbye is sent even if the machine is busy
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    # Sending waits while there is no connection. Otherwise a scheduler that comes back would get all Hellos since.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 300)
    # No high-water mark: a full queue and a ping abort the process (libzmq's issue 4364, as in ``RouterSocket``).
    socket.setsockopt(zmq.RCVHWM, 0)
    # Reconnect when nothing comes through: TCP alone would keep trying the old connection, ever more slowly.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * LEAST_SILENCE))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 1000)
    # Heartbeats begin after the handshake. If the network fails during it, only this ends the attempt: by default after
    # 30 s, or when TCP tries again, which it does ever more slowly.
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if keys is not None:
        keys.secure_client(socket)
    return socket


async def watch_connection(
    connections: Connections,
    socket: zmq.asyncio.Socket,
    address: SchedulerAddress,
    keys: Keys | None,
    on_broken: Callable[[], None],
) -> None:
    """Watch the connection to the scheduler at ``address``, and restore it. Runs until cancelled.

    A broken connection is made again, and ``on_broken`` is called. If the scheduler refuses this process's key, or has
    no keys itself, that is logged and repeated after a pause, because its keys may change.

    Raises:
        ConfigError: the scheduler requires a key and this process has none.
    """
    complaints = BoundedLog(log, burst=1)
    renewed = 0.0
    while True:
        failure = await connections.next()
        endpoint = address.endpoint
        if isinstance(failure, Broken):
            if monotonic() > renewed + _OWN_SECONDS:
                _reconnect(socket, endpoint)
                renewed = monotonic()
                on_broken()
            continue
        if complaint := await _complaint(failure, endpoint, keys):
            complaints.warning("%s", complaint)
        if failure.hung_up:
            # ZeroMQ tries again by itself, but under the same identity, and for the scheduler the handshake may have
            # succeeded: its last message was lost.
            if monotonic() > renewed + _OWN_SECONDS:
                _reconnect(socket, endpoint)
                renewed = monotonic()
        else:
            # ZeroMQ does not try again after a handshake in which it saw a fault itself; only a new connection does.
            await asyncio.sleep(_RETRY_SECONDS)
            with contextlib.suppress(zmq.ZMQError):
                socket.disconnect(endpoint)
            socket.connect(address.endpoint)
            renewed = monotonic()


async def _complaint(failure: HandshakeFailure, endpoint: str, keys: Keys | None) -> str:
    """Return why a handshake has probably failed; "" if there is nothing to log.

    Raises:
        ConfigError: the scheduler requires a key and there is none.
    """
    if keys is not None and failure.refused:
        key = f"the key {keys.name!r} of this process ({keys.public.decode()})"
        return f"the scheduler at {endpoint} does not accept {key}, trying again every {_RETRY_SECONDS:g} s"
    if keys is not None:
        reasons = f"it went away, speaks plain text, or its key is not {keys.scheduler.decode()}"
        return f"no handshake with the scheduler at {endpoint}: {reasons}"
    if failure.no_common_mechanism or (failure.hung_up and await asks_for_key(endpoint)):
        raise ConfigError(f"the scheduler at {endpoint} asks for a key and there is none: give --keys")
    return "" if failure.hung_up else f"no handshake with the scheduler at {endpoint}: it does not speak ZMTP"


async def follow_scheduler(
    socket: zmq.asyncio.Socket, address: SchedulerAddress, on_broken: Callable[[], None]
) -> None:
    """Reconnect whenever the scheduler's address changes, and call ``on_broken``. Runs until cancelled."""
    while True:
        before = await address.moved()
        log.info("the scheduler has moved from %s to %s", before, address.endpoint)
        with contextlib.suppress(zmq.ZMQError):
            socket.disconnect(before)
        _reconnect(socket, address.endpoint)
        on_broken()


async def asks_for_key(endpoint: str) -> bool:
    """Return whether the server at a ZeroMQ endpoint requires CURVE; False if there is no answer.

    The end that first has the whole greeting of the other (ZMTP 3.1: signature, version, mechanism) closes the
    connection if the mechanisms differ, often before it has sent its own greeting. The other end then cannot see the
    reason. This client sends the greeting only up to the major version: the server answers with its whole greeting, and
    cannot object to a mechanism yet.
    """
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(";")[2].rpartition(":")
    try:
        async with asyncio.timeout(_GREETING_SECONDS):
            if scheme == "ipc":
                reader, writer = await asyncio.open_unix_connection(address.replace("@", "\0", 1))
            else:
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(b"\xff" + bytes(8) + b"\x7f\x03")
                greeting = await reader.readexactly(64)
            finally:
                writer.close()
    except (OSError, ValueError, asyncio.IncompleteReadError):  # a timeout is an OSError
        return False
    return greeting[12:32].rstrip(b"\0") == b"CURVE"


def _reconnect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """Connect again, under another identity.

    The scheduler may not have noticed yet that the old connection is gone, and its socket never reads from a second
    connection of an identity that is still in use.
    """
    with contextlib.suppress(zmq.ZMQError):
        socket.disconnect(endpoint)
    socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
    socket.connect(endpoint)

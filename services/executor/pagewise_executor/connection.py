"""What an executor does when its connection to the scheduler breaks, or does not come about."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from time import monotonic

import zmq
import zmq.asyncio
from pagewise_shared.connections import Broken, Connections
from pagewise_shared.curve import Keys
from pagewise_shared.errors import ConfigError
from pagewise_shared.logs import BoundedLog

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_OWN_SECONDS = 0.5
"""What breaks so soon after a connection was made anew is the old one."""


async def mind_connection(
    connections: Connections,
    socket: zmq.asyncio.Socket,
    endpoint: str,
    keys: Keys | None,
    on_broken: Callable[[], None],
) -> None:
    """Tell ``on_broken`` of a connection that was lost; say why the scheduler at ``endpoint`` does not take one, and
    try again: its allow-list may have grown.

    Raises:
        ConfigError: the scheduler asks for a key and there is none, so that trying again is of no use.
    """
    complaints = BoundedLog(log, burst=1)
    renewed = 0.0
    while True:
        failure = await connections.next()
        if isinstance(failure, Broken):
            if monotonic() > renewed + _OWN_SECONDS:
                _connect_anew(socket, endpoint)
                renewed = monotonic()
                on_broken()
        elif keys is None:
            if failure.no_common_mechanism:
                raise ConfigError(f"the scheduler at {endpoint} asks for a key and there is none: give --keys")
        elif failure.refused:
            complaints.warning(
                "the scheduler at %s does not accept the key %r of this executor (%s), trying again every %g s",
                endpoint,
                keys.name,
                keys.public.decode(),
                _RETRY_SECONDS,
            )
            await asyncio.sleep(_RETRY_SECONDS)
            # ZeroMQ takes a refusal for final: only a new connection asks again.
            with contextlib.suppress(zmq.ZMQError):
                socket.disconnect(endpoint)
            socket.connect(endpoint)
        else:
            complaints.warning(
                "no handshake with the scheduler at %s: it went away, speaks plain text, or its key is not %s",
                endpoint,
                keys.scheduler.decode(),
            )


def _connect_anew(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """Connect under another identity: the scheduler may not know yet that the old connection is gone, and gives an
    identity that is in use to nobody else."""
    with contextlib.suppress(zmq.ZMQError):
        socket.disconnect(endpoint)
    socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
    socket.connect(endpoint)

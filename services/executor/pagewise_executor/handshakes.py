"""What an executor does when its connection to the scheduler does not come about."""

import asyncio
import contextlib
import logging

import zmq
import zmq.asyncio
from pagewise_shared.curve import Handshakes, Keys
from pagewise_shared.errors import ConfigError
from pagewise_shared.logs import BoundedLog

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


async def mind_handshakes(handshakes: Handshakes, socket: zmq.asyncio.Socket, endpoint: str, keys: Keys | None) -> None:
    """Say why the scheduler at ``endpoint`` does not take the connection, and try again: its allow-list may have grown.

    Raises:
        ConfigError: the scheduler asks for a key and there is none, so that trying again is of no use.
    """
    complaints = BoundedLog(log, burst=1)
    while True:
        failure = await handshakes.failure()
        if keys is None:
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

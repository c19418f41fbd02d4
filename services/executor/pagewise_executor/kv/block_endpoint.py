"""The endpoint on which an executor serves its blocks to other executors."""

import logging
import socket
import uuid
from urllib.parse import urlsplit

from pagewise_shared.config import ExecutorConfig

log = logging.getLogger(__name__)


def block_listener(config: ExecutorConfig) -> tuple[str, str]:
    """Return the endpoint to bind and the host name under which other executors find it.

    Without ``--block-listen`` the endpoint is next to the scheduler's: on the address of this machine that leads to the
    scheduler, or, with ipc, in the same folder.
    """
    listen, host = config.block_listen, config.advertise
    if config.scheduler.startswith("ipc:"):
        own = f"ipc://{config.scheduler.removeprefix('ipc://')}-blocks-{uuid.uuid4().hex[:8]}"
        return listen or own, host or "127.0.0.1"
    host = host or _address_towards(config.scheduler)
    shown = f"[{host}]" if ":" in host else host
    return listen or f"tcp://{shown}:*", shown


def _address_towards(endpoint: str) -> str:
    """Return the address of this machine from which a tcp endpoint is reached."""
    url = urlsplit(endpoint)
    try:
        family, kind, _, _, address = socket.getaddrinfo(url.hostname, url.port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        log.warning("%s does not resolve yet (%s): taking this machine's own name for its address", endpoint, error)
        return socket.gethostbyname(socket.gethostname())

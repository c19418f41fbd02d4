"""The endpoint on which an executor serves its blocks to other executors."""

import logging
import socket
import uuid
from urllib.parse import urlsplit

from pagewise_shared.config import ExecutorConfig
from pagewise_shared.scheduler_connection import SchedulerAddress

log = logging.getLogger(__name__)


def block_listener(config: ExecutorConfig, rank: int = 0) -> tuple[str, str]:
    """Return the endpoint to bind and the host name under which other executors find it.

    ``rank``: of this executor's ranks, each of which listens: with ``--block-listen`` on the ports that follow.

    Without ``--block-listen`` the endpoint is next to the scheduler's: on the address of this machine that leads to the
    scheduler, or, with ipc, in the same folder. Nodes other than node 0 of an executor take the address that leads to
    node 0, since only node 0 talks with the scheduler.

    Raises:
        ConfigError: ``--scheduler`` names a file that cannot be read.
    """
    listen, host = _of_rank(config.block_listen, rank), config.advertise
    if config.node_rank:
        scheduler = f"tcp://{in_brackets(config.master_addr)}:{config.master_port}"
    else:
        scheduler = SchedulerAddress(config.scheduler).endpoint
    if scheduler.startswith("ipc:"):
        own = f"ipc://{scheduler.removeprefix('ipc://')}-blocks-{uuid.uuid4().hex[:8]}"
        return listen or own, host or "127.0.0.1"
    shown = in_brackets(host or address_towards(scheduler))
    return listen or f"tcp://{shown}:*", shown


def in_brackets(host: str) -> str:
    """Return a host in the form of endpoints, where IPv6 addresses have brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def address_towards(endpoint: str) -> str:
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


def _of_rank(listen: str | None, rank: int) -> str | None:
    """Return the endpoint of a rank next to that of rank 0: the port, or the path, with another number."""
    if listen is None or rank == 0 or listen.endswith(":*"):
        return listen
    if listen.startswith("ipc:"):
        return f"{listen}-{rank}"
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + rank}"

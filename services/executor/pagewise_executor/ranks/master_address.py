"""Resolves ``--master-addr``, the name or the address of node 0 of an executor."""

import contextlib
import logging
import socket
import time

from pagewise_shared.logs import BoundedLog

from pagewise_executor.ranks.link import JOIN_SECONDS, SAY_SECONDS
from pagewise_executor.tiers.block_endpoint import address_towards, in_brackets

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0


def unresolved(master: str) -> str | None:
    """Return why the name in ``--master-addr`` does not resolve now; None if it resolves, or is an address."""
    try:
        socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"--master-addr {master} does not resolve: {error.strerror or error}"
    return None


def own_address(master: str, seconds: float = JOIN_SECONDS) -> str:
    """Return the address on which node 0 listens.

    It is the address of ``--master-addr`` if this host has that address. Otherwise, as behind network address
    translation, it is the address from which this host reaches that one. A name that does not resolve yet is tried
    again for ``seconds``, because an orchestrator may publish the name of a process after it has started the process.

    Raises:
        TimeoutError: the name has not resolved.
    """
    deadline = time.monotonic() + seconds
    complaints = BoundedLog(log, burst=1, seconds=SAY_SECONDS)
    attempts = 0
    while (reason := unresolved(master)) is not None:
        attempts += 1
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{reason} (after {attempts} attempts in {seconds:g} s)")
        complaints.warning("%s; trying again for up to %d s (attempt %d)", reason, left, attempts)
        time.sleep(min(left, _PAUSE_SECONDS))
    with contextlib.suppress(OSError):
        family, kind, _, _, (address, *_) = socket.getaddrinfo(master, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind((address, 0))
            return str(address)
    return address_towards(f"tcp://{in_brackets(master)}:1")

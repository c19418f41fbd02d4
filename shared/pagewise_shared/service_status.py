"""Restarts and problems of services, in a file that the scheduler reads.

The launcher of the services writes the file (``pagewise serve``, or under ``pagewise up`` the actor that holds the
scheduler). The scheduler counts restarts and sends the problems to gateways, which ``/health`` shows.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec


class ServiceStatus(msgspec.Struct, frozen=True):
    """Status of one service. ``problem``: why it does not become ready; empty if it does."""

    restarts: int = 0
    problem: str = ""


_decode = msgspec.json.Decoder(dict[str, ServiceStatus]).decode


def write_status(path: Path, services: Mapping[str, ServiceStatus]) -> None:
    """Write the status of each service by its name, atomically.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(msgspec.json.encode(services))
    unfinished.replace(path)


def read_status(path: Path) -> dict[str, ServiceStatus]:
    """Return the status of each service by its name; empty before the first write.

    Raises:
        OSError: the file cannot be read.
        msgspec.DecodeError: it has other content.
    """
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        return {}

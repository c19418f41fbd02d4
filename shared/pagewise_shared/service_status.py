"""How often services were started again, and which of them keep failing, in a file that the scheduler reads.

Whatever starts the services writes the file (``pagewise serve``, and under ``pagewise up`` the actor that holds the
scheduler). The scheduler counts restarts and tells gateways the problems, which ``/health`` shows.
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
    """Write the status of each service by its name, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(msgspec.json.encode(services))
    unfinished.replace(path)


def read_status(path: Path) -> dict[str, ServiceStatus]:
    """Return the status of each service by its name; empty while nothing was written.

    Raises:
        OSError: the file cannot be read.
        msgspec.DecodeError: it holds something else.
    """
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        return {}

"""The executor container's health check: exits 0 while a connection to the scheduler stands.

Executors have no port of their own, and whether one hangs is the scheduler's to find out, by its heartbeats.
"""

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from pagewise_shared.config import ExecutorConfig, build_config

_ESTABLISHED = "01"


def connected(port: int) -> bool:
    """Whether a TCP connection from here to a remote ``port`` is established (Linux)."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if not table.exists():
            continue
        for line in table.read_text().splitlines()[1:]:
            _, _, remote, state, *_ = line.split()
            if state == _ESTABLISHED and int(remote.rsplit(":", 1)[1], 16) == port:
                return True
    return False


if __name__ == "__main__":
    endpoint = urlsplit(build_config(ExecutorConfig, {}, os.environ).scheduler)
    sys.exit(endpoint.scheme == "tcp" and endpoint.port is not None and not connected(endpoint.port))

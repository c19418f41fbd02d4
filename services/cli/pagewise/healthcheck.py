"""Whether the service in this container is well: ``python -m pagewise.healthcheck scheduler|gateway|executor``.

A scheduler is well while it listens for executors and gateways, a gateway while it answers HTTP, an executor while its
connection to the scheduler stands; where that is comes from the environment, as for the service itself. Whether a
scheduler or an executor hangs is for the others to find out, by heartbeats.
"""

import os
import ssl
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pagewise_shared.config import ExecutorConfig, GatewayConfig, SchedulerConfig, build_config

_ESTABLISHED, _LISTENING = "01", "0A"


def scheduler_is_well(environ: Mapping[str, str]) -> bool:
    """Whether both of its endpoints are listened on; one that is not tcp is not judged."""
    config = build_config(SchedulerConfig, {}, environ)
    ports = [port for endpoint in (config.listen, config.listen_gateways) if (port := _port(endpoint)) is not None]
    listening = {local for local, _, state in _connections() if state == _LISTENING}
    return listening.issuperset(ports)


def gateway_is_well(environ: Mapping[str, str]) -> bool:
    """Whether it answers at all: it is well without a scheduler and without executors."""
    config = build_config(GatewayConfig, {}, environ)
    trusting = ssl.create_default_context()
    trusting.check_hostname = False  # the certificate is for the name that clients know
    trusting.verify_mode = ssl.CERT_NONE
    url = f"{'https' if config.ssl_certfile else 'http'}://127.0.0.1:{config.port}/version"
    try:
        with urllib.request.urlopen(url, timeout=2, context=trusting):  # noqa: S310  # nosec B310 # our own server
            return True
    except OSError:
        return False


def executor_is_well(environ: Mapping[str, str]) -> bool:
    """Whether its connection to the scheduler is established; one that is not tcp is not judged."""
    port = _port(build_config(ExecutorConfig, {}, environ).scheduler)
    return port is None or any(remote == port and state == _ESTABLISHED for _, remote, state in _connections())


def _port(endpoint: str) -> int | None:
    """The port of a ZeroMQ endpoint, if it is one of TCP."""
    parts = urlsplit(endpoint)
    return parts.port if parts.scheme == "tcp" else None


def _connections() -> Iterator[tuple[int, int, str]]:
    """Local port, remote port and state of each TCP socket in this network namespace (Linux)."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if not table.exists():
            continue
        for line in table.read_text().splitlines()[1:]:
            _, local, remote, state, *_ = line.split()
            yield int(local.rsplit(":", 1)[1], 16), int(remote.rsplit(":", 1)[1], 16), state


CHECKS = {"scheduler": scheduler_is_well, "gateway": gateway_is_well, "executor": executor_is_well}

if __name__ == "__main__":
    sys.exit(not CHECKS[sys.argv[1]](os.environ))

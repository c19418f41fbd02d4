"""Checks the service in this container: ``python -m pagewise.healthcheck scheduler|gateway|executor``.

A scheduler is healthy while it listens for executors and gateways, a gateway while it answers HTTP, an executor while
it is connected to the scheduler. Addresses come from the environment, as for the service itself. The check does not
notice a scheduler or an executor that is stuck; the other processes do, by its heartbeats.
"""

import os
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

from pagewise_shared.config import ExecutorConfig, GatewayConfig, SchedulerConfig, build_config

from pagewise.ports import ESTABLISHED, LISTENING, answers, tcp_sockets


def scheduler_is_healthy(environ: Mapping[str, str]) -> bool:
    """Return whether the scheduler listens on both of its endpoints. Endpoints other than TCP are not checked."""
    config = build_config(SchedulerConfig, {}, environ)
    ports = [port for endpoint in (config.listen, config.listen_gateways) if (port := _port(endpoint)) is not None]
    listening = {one.local for one in tcp_sockets() if one.state == LISTENING}
    return listening.issuperset(ports)


def gateway_is_healthy(environ: Mapping[str, str]) -> bool:
    """Return whether the gateway answers HTTP. It needs neither a scheduler nor executors to be healthy."""
    config = build_config(GatewayConfig, {}, environ)
    return answers(f"{'https' if config.ssl_certfile else 'http'}://127.0.0.1:{config.port}/version")


def executor_is_healthy(environ: Mapping[str, str]) -> bool:
    """Return whether the executor is connected to the scheduler. Endpoints other than TCP are not checked."""
    port = _port(build_config(ExecutorConfig, {}, environ).scheduler)
    return port is None or any(one.remote == port and one.state == ESTABLISHED for one in tcp_sockets())


def _port(endpoint: str) -> int | None:
    """Return the port of a ZeroMQ endpoint, or None if it is not TCP."""
    parts = urlsplit(endpoint)
    return parts.port if parts.scheme == "tcp" else None


CHECKS = {"scheduler": scheduler_is_healthy, "gateway": gateway_is_healthy, "executor": executor_is_healthy}

if __name__ == "__main__":
    sys.exit(not CHECKS[sys.argv[1]](os.environ))

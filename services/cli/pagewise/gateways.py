"""Several gateways on one port of this machine; ``pagewise gateways`` starts nothing else."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Iterator

from msgspec.structs import replace
from pagewise_shared.config import GatewayConfig, GatewaysConfig, secret_variables, to_argv

from pagewise.ports import answers, holder_of, next_free
from pagewise.process import STOP_SECONDS, Service
from pagewise.supervisor import Group, StartError, Supervisor

log = logging.getLogger(__name__)

_MODULE = "pagewise_gateway.main"


async def gateways(config: GatewaysConfig) -> int:
    """Run gateways until Ctrl-C or SIGTERM, or until one cannot start; returns the exit code."""
    try:
        with reserved_port(config.gateway) as port:
            gateway = replace(config.gateway, port=port, gateway_id=socket.gethostname())
            group = gateway_group(gateway, config.gateways)
            return await Supervisor([group], exit_on_failure=config.exit_on_failure).run(_announce(gateway))
    except StartError as error:
        log.error("%s", error)
        return 1


def gateway_group(config: GatewayConfig, count: int) -> Group:
    """Return ``count`` gateways that share the port of ``config``. Their names are its ``gateway_id`` and a number.

    A stop lets their streams continue for the ``shutdown_timeout``. Its signal is SIGINT, because after a SIGTERM each
    would leave the port to the others.
    """
    services = []
    for number in range(count):
        one = replace(config, reuse_port=count > 1, gateway_id=f"{config.gateway_id}-{number}")
        services.append(
            Service(f"{config.gateway_id}-{number}", _MODULE, to_argv(one), variables=secret_variables(one))
        )
    return Group(services, signal.SIGINT, max(STOP_SECONDS, config.shutdown_timeout + STOP_SECONDS / 2))


@contextlib.contextmanager
def reserved_port(config: GatewayConfig) -> Iterator[int]:
    """Reserve the port that gateways will listen on while the context lasts; port 0 stands for any free one.

    The port is bound here, but nothing listens on it, so that gateways can come and go. Gateways that share a port
    would also share it with another program of the same user; the bind fails if such a program listens already.

    Raises:
        StartError: the address cannot be bound.
    """
    with contextlib.ExitStack() as stack:
        port = config.port
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(
                config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                holder = stack.enter_context(socket.socket(family, kind, protocol))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                holder.bind((address[0], port, *address[2:]))
                port = holder.getsockname()[1]
        except OSError as error:
            raise StartError(_unusable(config.host, port, error)) from error
        yield port


def _unusable(host: str, port: int, error: OSError) -> str:
    """Return why no gateway can listen there, and a remedy."""
    text = f"cannot serve HTTP on {host} port {port}: {error.strerror or error}"
    if isinstance(error, socket.gaierror):
        return f"{text}; --host takes an address of this machine, or 0.0.0.0 for all"
    match error.errno:
        case errno.EADDRINUSE:
            holder = holder_of(port)
            free = next_free(host, port)
            taken = f", by {holder}" if holder else ""
            return f"{text}{taken}; " + (f"take another one: --port {free}" if free else "take another one with --port")
        case errno.EACCES:
            return f"{text}; ports below 1024 are root's: --port 8000"
        case errno.EADDRNOTAVAIL:
            return f"{text}; --host takes an address of this machine, or 0.0.0.0 for all"
    return text


def url_of(config: GatewayConfig) -> str:
    """Return the URL of gateways with this configuration."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if config.ssl_certfile else 'http'}://{host}:{config.port}"


async def _announce(config: GatewayConfig) -> None:
    while not await asyncio.to_thread(answers, f"{url_of(config)}/version"):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    log.info("%s is up", url_of(config))

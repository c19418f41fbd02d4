"""``pagewise serve``: a scheduler, gateways and executors on this machine; ``pagewise gateways``: gateways alone."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

from msgspec.structs import replace
from pagewise_shared.config import GatewayConfig, GatewaysConfig, ServeConfig, secret_variables, to_argv
from pagewise_shared.cpu_threads import openmp_threads, share_of_cores, wait_variables

from pagewise.fetch import fetch
from pagewise.ports import answers, holder_of, next_free
from pagewise.preflight import check_options
from pagewise.process import STOP_SECONDS, Service
from pagewise.supervisor import Group, StartError, Supervisor

log = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROGRESS_SECONDS = 5.0
_STATUS = "services.json"


async def serve(
    config: ServeConfig, announce: Callable[[ServeConfig], Coroutine[None, None, None]] | None = None
) -> int:
    """Run until Ctrl-C or SIGTERM, or until a service cannot start; returns the exit code.

    ``announce``: runs beside the services, with the endpoints and the port filled in (default: wait until an executor
    is ready, and print how to send a request).
    """
    try:
        found = visible_gpus()
        check_options(config, found)
        gpus = gpu_variables(config, found)
        with reserved_port(config.gateway) as port:
            await fetch(config)
            # Not before: until the supervisor runs, SIGTERM ends this process without removing the folder.
            with tempfile.TemporaryDirectory(prefix="pagewise-", ignore_cleanup_errors=True) as folder:
                config = _connected(config, folder, port)
                status = Path(folder, _STATUS)
                supervisor = Supervisor(_groups(config, gpus), status, exit_on_failure=config.exit_on_failure)
                return await supervisor.run((announce or _announce)(config))
    except StartError as error:
        log.error("%s", error)
        return 1


def _connected(config: ServeConfig, folder: str, port: int) -> ServeConfig:
    """Return the configuration with the endpoints between the processes and the HTTP port filled in."""
    executors = config.listen or f"ipc://{folder}/executors.sock"
    gateways = config.listen_gateways or f"ipc://{folder}/gateways.sock"
    return replace(
        config,
        scheduler=replace(
            config.scheduler,
            listen=executors,
            listen_gateways=gateways,
            service_status=f"{folder}/{_STATUS}",
            # Gateways of other operators can only join an endpoint that was given.
            gateways_end_any_request=config.scheduler.gateways_end_any_request or config.listen_gateways is None,
        ),
        gateway=replace(config.gateway, scheduler=gateways, port=port, gateway_id="gateway"),
        executor=replace(config.executor, scheduler=executors),
    )


def _groups(config: ServeConfig, gpus: list[dict[str, str]]) -> list[Group]:
    """Return the services in the order of their stop.

    Gateways stop first, so that running streams can end; the scheduler last, so that the others can leave it in good
    order.
    """
    scheduler = Service("scheduler", "pagewise_scheduler.main", to_argv(config.scheduler))
    threads = config.executor.threads
    processes = config.executors * config.executor.tensor_parallel
    if threads == "auto" and processes > 1 and openmp_threads(os.environ) is None:
        threads = share_of_cores(processes)
    executors = []
    for number, gpu in enumerate(gpus):
        name = f"executor-{number}"
        argv = to_argv(replace(config.executor, executor_id=name, threads=threads))
        executors.append(Service(name, "pagewise_executor.main", argv, variables=executor_variables(gpu)))
    return [
        gateway_group(config.gateway, config.gateways),
        Group(executors, signal.SIGINT),  # not SIGTERM, which drains
        Group([scheduler], signal.SIGTERM),
    ]


def executor_variables(gpu: dict[str, str]) -> dict[str, str]:
    """Return the environment variables of an executor: for its GPU, and for how its threads wait for each other."""
    return gpu | wait_variables(os.environ)


def visible_gpus() -> list[str]:
    """Return the GPUs that executors may use, as CUDA_VISIBLE_DEVICES names them. If that is not set, all of them."""
    named = os.environ.get(_VISIBLE)
    if named is None:
        # torch knows, but is not loaded here. CUDA numbers devices from 0, whatever the names of their files.
        return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    return [name for name in named.replace(" ", "").split(",") if name not in ("", "-1")]


def gpu_variables(config: ServeConfig, gpus: list[str]) -> list[dict[str, str]]:
    """Return the variables that give each rank of each executor a GPU of its own, while there are enough GPUs.

    Raises:
        StartError: one executor has more ranks than there are GPUs; or executors share a GPU without a limit, so that
            each would take most of its memory.
    """
    count, executor = config.executors, config.executor
    ranks = executor.tensor_parallel
    if not gpus or executor.device == "cpu" or executor.simulate:
        return [{}] * count
    if ranks > len(gpus):
        raise StartError(
            f"--tensor-parallel {ranks}: each executor needs {ranks} GPUs, and there are {len(gpus)} (--device cpu "
            "computes without them)"
        )
    if count < 2:
        return [{}] * count
    # Groups that follow each other: neighbours are often connected by faster links.
    groups = [gpus[first : first + ranks] for first in range(0, len(gpus) - ranks + 1, ranks)]
    _check_shares(config, -(-count // len(groups)), len(gpus))
    return [{_VISIBLE: ",".join(groups[number % len(groups)])} for number in range(count)]


def _check_shares(config: ServeConfig, on_each: int, num_gpus: int) -> None:
    """Check that executors have room on their GPUs, of which each has at most ``on_each`` executors."""
    executor = config.executor
    sized = executor.kv_memory is not None or executor.num_blocks is not None
    if sized or on_each * executor.gpu_memory_utilization <= 1:
        return
    each = f" of {executor.tensor_parallel} ranks each" if executor.tensor_parallel > 1 else ""
    text = (
        f"{config.executors} executors{each} share {num_gpus} GPUs, and each may take "
        f"{executor.gpu_memory_utilization:g} of one: give each less with --gpu-memory-utilization, or set the size of "
        "its KV pool with --kv-memory"
    )
    if executor.device == "cuda":
        raise StartError(text)
    # With --device auto, executors may still run on the CPU.
    log.warning("%s", text)


async def wait_until_ready(config: ServeConfig) -> float:
    """Wait until an executor is ready; returns the seconds that it took."""
    url = url_of(config.gateway)
    began = logged = time.monotonic()
    if not config.executors:
        log.info("to start executors: pagewise-executor --scheduler=%s", config.executor.scheduler)
    while not await asyncio.to_thread(answers, f"{url}/health"):
        await asyncio.sleep(0.1)
        if time.monotonic() - logged > _PROGRESS_SECONDS:
            logged = time.monotonic()
            waiting = "loading the model" if config.executors else "waiting for executors"
            log.info("%s, %.0f s so far", waiting, logged - began)
    return time.monotonic() - began


async def _announce(config: ServeConfig) -> None:
    seconds, url = await wait_until_ready(config), url_of(config.gateway)
    name = config.gateway.served_model_name or config.gateway.model
    body = json.dumps(
        {"model": name, "prompt": "class Point:\n    def __init__(self", "max_tokens": 64, "stream": True}
    )
    key = (
        '-H "Authorization: Bearer $PAGEWISE_API_KEY" '
        if config.gateway.api_keys or config.gateway.api_keys_file
        else ""
    )
    # The certificate is for the name that clients use, not for this address.
    curl = "curl -Nk" if config.gateway.ssl_certfile else "curl -N"
    with contextlib.suppress(OSError):  # as of the lines of services
        print(
            f"\nServing {name} at {url} (ready after {seconds:.1f} s). Try:\n\n"
            f"  {curl} {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{body}'\n",
            flush=True,
        )


async def gateways(config: GatewaysConfig) -> int:
    """Run gateways until Ctrl-C or SIGTERM, or until one cannot start; returns the exit code."""
    try:
        with reserved_port(config.gateway) as port:
            gateway = replace(config.gateway, port=port, gateway_id=socket.gethostname())
            group = gateway_group(gateway, config.gateways)
            return await Supervisor([group], exit_on_failure=config.exit_on_failure).run(_announce_gateways(gateway))
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
        name = f"{config.gateway_id}-{number}"
        one = replace(config, reuse_port=count > 1, gateway_id=name)
        services.append(Service(name, "pagewise_gateway.main", to_argv(one), variables=secret_variables(one)))
    return Group(services, signal.SIGINT, max(STOP_SECONDS, config.shutdown_timeout + STOP_SECONDS / 2))


@contextlib.contextmanager
def reserved_port(config: GatewayConfig) -> Iterator[int]:
    """Reserve the port that gateways will listen on while the context lasts; port 0 requests any free one.

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


async def _announce_gateways(config: GatewayConfig) -> None:
    while not await asyncio.to_thread(answers, f"{url_of(config)}/version"):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    log.info("%s is up", url_of(config))

"""The options of commands that start several services: those of their parts, and how many there are of each."""

from typing import Annotated

from msgspec import Meta, Struct

from pagewise_shared.config.kinds import Positive, Seconds
from pagewise_shared.config.kinds import described as _help
from pagewise_shared.config.options import (
    ExecutorConfig,
    Executors,
    ExecutorsEndpoint,
    GatewayConfig,
    Gateways,
    GatewaysEndpoint,
    SchedulerConfig,
)


def without(*names: str) -> Meta:
    """Marks a part of a composed configuration: the whole sets these options of it, and does not offer them."""
    return Meta(extra={"without": names})


OF_NODES = ("nnodes", "node_rank", "master_addr", "master_port")
"""Options of an executor on several nodes, whose processes are started one by one, or by ``pagewise up``."""


ExitOnFailure = Annotated[
    bool,
    _help(
        "stop everything when one process cannot start, or keeps ending, while the others serve",
        more="Without it, such a process is started again after pauses of up to a minute, and `/health` says so.",
    ),
]


class GatewaysConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise gateways``: those of each gateway, and how many to start."""

    gateway: Annotated[GatewayConfig, without("gateway_id", "reuse_port")] = GatewayConfig()
    gateways: Gateways = 1
    exit_on_failure: ExitOnFailure = False


class ServeConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise serve``: those of the services it starts, and how many of them to start."""

    scheduler: Annotated[SchedulerConfig, without("listen", "listen_gateways", "service_status")] = SchedulerConfig()
    gateway: Annotated[GatewayConfig, without("scheduler", "gateway_id", "key_name", "reuse_port")] = GatewayConfig()
    executor: Annotated[ExecutorConfig, without("scheduler", "executor_id", "key_name", "role", *OF_NODES)] = (
        ExecutorConfig()
    )
    gateways: Gateways = 1
    executors: Executors = 1
    listen: ExecutorsEndpoint = None
    listen_gateways: GatewaysEndpoint = None
    exit_on_failure: ExitOnFailure = False


class UpConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise up``: those of the services, and how a Ray cluster runs them."""

    scheduler: Annotated[
        SchedulerConfig, without("listen", "listen_gateways", "gateways_end_any_request", "service_status")
    ] = SchedulerConfig()
    gateway: Annotated[GatewayConfig, without("scheduler", "gateway_id", "key_name", "reuse_port", "host")] = (
        GatewayConfig()
    )
    executor: Annotated[
        ExecutorConfig,
        without("scheduler", "executor_id", "key_name", "role", "block_listen", "advertise", *OF_NODES),
    ] = ExecutorConfig()
    gateways: Gateways = 1
    executors: Executors = 1
    ray: Annotated[
        str,
        _help("the Ray cluster: HOST:PORT of its head, or auto for the one that this machine belongs to", "ADDRESS"),
    ] = "auto"
    name: Annotated[str, _help("name of what runs in the cluster; several may run beside each other", "NAME")] = (
        "pagewise"
    )
    executor_cpus: Annotated[
        Positive,
        _help(
            "CPUs that each rank of an executor takes in the cluster",
            "N",
            "It is also the number of its threads, unless `--threads` says otherwise.",
        ),
    ] = 1
    min_executors: Annotated[
        Positive | None, _help("executors that stay when there is nothing to do (default: --executors)", "N")
    ] = None
    max_executors: Annotated[
        Positive | None, _help("executors that there may be when many requests wait (default: --executors)", "N")
    ] = None
    scale_queue: Annotated[
        Positive, _help("waiting sequences per executor above which more executors are started", "N")
    ] = 16
    scale_up_after: Annotated[Seconds, _help("seconds that a queue has to stay before executors are started", "S")] = (
        30.0
    )
    scale_down_after: Annotated[
        Seconds, _help("seconds without a queue after which an executor that is not needed is drained", "S")
    ] = 600.0

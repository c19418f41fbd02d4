"""The options of commands that start several services: those of their parts, and how many there are of each."""

from typing import Annotated

from msgspec import Meta, Struct

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


class GatewaysConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise gateways``: those of each gateway, and how many to start."""

    gateway: Annotated[GatewayConfig, without("gateway_id", "reuse_port")] = GatewayConfig()
    gateways: Gateways = 1


class ServeConfig(Struct, frozen=True, kw_only=True):
    """Options of ``pagewise serve``: those of the services it starts, and how many of them to start."""

    scheduler: Annotated[SchedulerConfig, without("listen", "listen_gateways")] = SchedulerConfig()
    gateway: Annotated[GatewayConfig, without("scheduler", "gateway_id", "key_name", "reuse_port")] = GatewayConfig()
    executor: Annotated[ExecutorConfig, without("scheduler", "executor_id", "key_name", "role")] = ExecutorConfig()
    gateways: Gateways = 1
    executors: Executors = 1
    listen: ExecutorsEndpoint = None
    listen_gateways: GatewaysEndpoint = None

"""Puts the scheduler service together and runs it until it is told to stop."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal

from pagewise_shared.config import SchedulerConfig
from pagewise_shared.curve import SCHEDULER, load_keys

from pagewise_scheduler.actors.coordinator import Coordinator
from pagewise_scheduler.metrics import Metrics

log = logging.getLogger(__name__)

_COLLECT_AFTER = 100_000
"""Allocations between two looks for cycles. Every step makes objects, none of them in cycles, and the default of 700
spends its time looking through those of thousands of requests."""


async def serve(config: SchedulerConfig) -> None:
    """Run the service until SIGTERM or SIGINT.

    Prints ``listening GATEWAYS EXECUTORS`` on standard output, the two endpoints, once both are bound. Nothing is done
    for requests in progress: their gateways submit them again to the next scheduler.

    Raises:
        ConfigError: keys cannot be read, or are missing for an endpoint that leaves this host.
        zmq.ZMQError: an endpoint cannot be bound.
    """
    for endpoint in (config.listen, config.listen_gateways):  # both have keys, or neither
        keys = load_keys(config.keys, SCHEDULER, endpoint, config.plaintext)
    coordinator = Coordinator(config, Metrics(config.served_model_name or config.model), keys=keys)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(coordinator.run(), name="coordinator")
        calm_garbage_collector()
        log.info("gateways connect to %s, executors to %s", coordinator.gateway_endpoint, coordinator.executor_endpoint)
        print(f"listening {coordinator.gateway_endpoint} {coordinator.executor_endpoint}", flush=True)
        await stop.wait()
        log.info("stopping")
        running.cancel()


def calm_garbage_collector() -> None:
    """Leave what is there now out of collections, and collect seldom."""
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def raise_file_limit() -> None:
    """Let the process open as many files as it may: every executor and gateway takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(config: SchedulerConfig) -> None:
    """``serve`` on an event loop of its own (uvloop where it is installed)."""
    raise_file_limit()
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.run(serve(config))
        return
    asyncio.run(serve(config))

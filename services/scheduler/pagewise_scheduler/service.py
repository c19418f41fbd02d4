"""Puts the scheduler service together and runs it until it is told to stop."""

import asyncio
import contextlib
import gc
import logging
import signal

from pagewise_shared.config import SchedulerConfig
from pagewise_shared.curve import SCHEDULER, load_keys
from pagewise_shared.model_files import resolve_model

from pagewise_scheduler.actors.fleet import Fleet
from pagewise_scheduler.actors.gauges import keep_gauges_fresh
from pagewise_scheduler.actors.router import Router
from pagewise_scheduler.http import create_app, listening, raise_file_limit
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 5.0
"""How long requests in progress may go on after a SIGTERM."""

_COLLECT_AFTER = 100_000
"""Allocations between two looks for cycles. Every token makes objects, none of them in cycles, and the default of 700
spends its time looking through those of thousands of streams."""


async def serve(config: SchedulerConfig) -> None:
    """Run the service until SIGTERM or SIGINT.

    Prints ``listening http://HOST:PORT`` on standard output once requests can come in.

    Raises:
        ModelError: the model's tokenizer cannot be found or read.
        ConfigError: keys cannot be read, or are missing for an endpoint that leaves this host.
        OSError, zmq.ZMQError: an address cannot be bound.
    """
    tokenizer = Tokenizer.load(resolve_model(config.model, config.revision, tokenizer_only=True))
    metrics = Metrics(config.served_model_name or config.model)
    router = Router(
        tokenizer,
        metrics,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        routing=config.routing,
    )
    fleet = Fleet(
        config.listen,
        router,
        metrics,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        executor_timeout=config.executor_timeout,
        step_timeout=config.step_timeout,
        recovery=config.recovery,
        eviction=config.eviction,
        keys=load_keys(config.keys, SCHEDULER, config.listen, config.plaintext),
    )
    surface = listening(
        create_app(router, tokenizer, config, metrics),
        metrics,
        host=config.host,
        port=config.port,
        max_connections=raise_file_limit(config.max_connections),
        keepalive_timeout=config.keepalive_timeout,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        actors = [
            tasks.create_task(fleet.run(), name="fleet"),
            tasks.create_task(router.run(), name="router"),
            tasks.create_task(keep_gauges_fresh(router, metrics), name="gauges"),
        ]
        try:
            async with surface as (host, port):
                calm_garbage_collector()
                log.info("executors connect to %s", fleet.endpoint)
                print(f"listening http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
                await stop.wait()
                log.info("stopping")
        finally:
            for actor in actors:
                actor.cancel()


def calm_garbage_collector() -> None:
    """Leave what is there now out of collections, and collect seldom."""
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def run(config: SchedulerConfig) -> None:
    """``serve`` on an event loop of its own (uvloop where it is installed)."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.run(serve(config))
        return
    asyncio.run(serve(config))

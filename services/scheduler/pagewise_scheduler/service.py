"""Puts the scheduler service together and runs it until it is told to stop."""

import asyncio
import contextlib
import logging
import signal

from aiohttp import web
from pagewise_shared.config import SchedulerConfig
from pagewise_shared.model_files import resolve_model

from pagewise_scheduler.actors.fleet import Fleet
from pagewise_scheduler.actors.router import Router
from pagewise_scheduler.http import create_app
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 5.0
"""How long requests in progress may go on after a SIGTERM."""

_GAUGE_SECONDS = 1.0


async def serve(config: SchedulerConfig) -> None:
    """Run the service until SIGTERM or SIGINT.

    Prints ``listening http://HOST:PORT`` on standard output once requests can come in.

    Raises:
        ModelError: the model's tokenizer cannot be found or read.
        OSError, zmq.ZMQError: an address cannot be bound.
    """
    tokenizer = Tokenizer.load(resolve_model(config.model, config.revision, tokenizer_only=True))
    model_name = config.served_model_name or config.model
    metrics = Metrics(model_name)
    router = Router(tokenizer, metrics, max_waiting=config.max_waiting, routing=config.routing)
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
    )
    runner = web.AppRunner(
        create_app(router, tokenizer, config, metrics),
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_SECONDS,
        access_log=None,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        actors = [
            tasks.create_task(fleet.run(), name="fleet"),
            tasks.create_task(router.run(), name="router"),
            tasks.create_task(_refresh_gauges(router, metrics), name="gauges"),
        ]
        await runner.setup()
        try:
            site = web.TCPSite(runner, config.host, config.port)
            await site.start()
            host, port = runner.addresses[0][:2]
            shown = f"[{host}]" if ":" in host else host
            log.info("executors connect to %s", fleet.endpoint)
            print(f"listening http://{shown}:{port}", flush=True)
            await stop.wait()
            log.info("stopping")
        finally:
            await runner.cleanup()
            for actor in actors:
                actor.cancel()


async def _refresh_gauges(router: Router, metrics: Metrics) -> None:
    """Keep the gauges of queues and memory fresh: sampled, because they change in every step."""
    while True:
        engines = router.engines
        metrics.num_requests_running.set(sum(engine.scheduler.num_running for engine in engines))
        metrics.num_requests_waiting.set(router.num_waiting)
        in_use = sum(engine.scheduler.kv.pool.num_in_use for engine in engines)
        blocks = sum(engine.scheduler.kv.pool.num_blocks for engine in engines)
        metrics.kv_cache_usage_perc.set(in_use / blocks if blocks else 0.0)
        pools = [engine.scheduler.kv.pool for engine in engines]
        for state in ("free", "cached", "in_use"):
            metrics.kv_blocks("device", state).set(sum(getattr(pool, f"num_{state}") for pool in pools))
        used = sum(pool.host.num_used for pool in pools)
        metrics.kv_blocks("host", "cached").set(used)
        metrics.kv_blocks("host", "free").set(sum(pool.host.num_blocks for pool in pools) - used)
        await asyncio.sleep(_GAUGE_SECONDS)


def run(config: SchedulerConfig) -> None:
    """``serve`` on an event loop of its own (uvloop where it is installed)."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.run(serve(config))
        return
    asyncio.run(serve(config))

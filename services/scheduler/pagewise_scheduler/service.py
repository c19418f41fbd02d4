"""Assembles the scheduler service, and runs it until a signal stops it."""

import asyncio
import logging
import socket

from pagewise_shared.config import SchedulerConfig
from pagewise_shared.curve import SCHEDULER, load_keys
from pagewise_shared.service_process import StopSignal, raise_file_limit, tune_garbage_collector
from pagewise_shared.tracing import open_tracing

from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.coordinator import Coordinator

log = logging.getLogger(__name__)


async def serve(config: SchedulerConfig) -> None:
    """Run the service until SIGTERM or SIGINT.

    Prints ``listening GATEWAYS EXECUTORS`` on standard output, the two endpoints, once both are bound. Stopping does
    not wait for requests: their gateways submit them again to the next scheduler.

    Raises:
        ConfigError: keys cannot be read, or are missing for an endpoint that leaves this host; or OpenTelemetry is
            missing for the traces.
        zmq.ZMQError: an endpoint cannot be bound.
    """
    raise_file_limit()  # every connection takes a file
    for endpoint in (config.listen, config.listen_gateways):  # both have keys, or neither
        keys = load_keys(config.keys, SCHEDULER, endpoint, config.plaintext)
    metrics = Metrics(config.served_model_name or config.model)
    tracing = open_tracing(
        config.otlp_traces_endpoint,
        "pagewise-scheduler",
        socket.gethostname(),
        lambda outcome, spans: metrics.trace_spans(outcome).inc(spans),
    )
    on_traced = None
    if tracing is not None:
        from pagewise_scheduler.server.tracing import RequestTraces  # it imports OpenTelemetry

        on_traced = RequestTraces(tracing).ended
    coordinator = Coordinator(config, metrics, keys=keys, on_traced=on_traced)
    stop = StopSignal()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(coordinator.run(), name="coordinator")
        tune_garbage_collector()
        log.info("gateways connect to %s, executors to %s", coordinator.gateway_endpoint, coordinator.executor_endpoint)
        print(f"listening {coordinator.gateway_endpoint} {coordinator.executor_endpoint}", flush=True)
        await stop.wait()
        log.info("stopping")
        running.cancel()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)

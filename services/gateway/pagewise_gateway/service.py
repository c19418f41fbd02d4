"""Assembles the gateway and runs it until a signal stops it."""

import asyncio
import logging
import os
import signal
import socket

from pagewise_shared.config import GatewayConfig
from pagewise_shared.curve import Keys, load_keys
from pagewise_shared.generation_config import read_generation_config
from pagewise_shared.model_files import resolve_model
from pagewise_shared.service_process import StopSignal, tune_garbage_collector
from pagewise_shared.tracing import open_tracing

from pagewise_gateway.http import create_app, listening, load_certificate, most_connections, read_modules
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client import AdapterTable, SchedulerClient
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 2.0
"""How long a client may take to read the end of its stream when the gateway stops."""


def _scheduler_client(
    config: GatewayConfig, gateway_id: str, tokenizer: Tokenizer, metrics: Metrics, keys: Keys | None
) -> SchedulerClient:
    return SchedulerClient(
        config.scheduler,
        tokenizer,
        metrics,
        gateway_id=gateway_id,
        model_name=config.served_model_name or config.model,
        timeout=config.scheduler_timeout,
        keys=keys,
        adapters=AdapterTable(read_modules(config)),
    )


async def serve(config: GatewayConfig) -> None:
    """Run the service until SIGTERM or SIGINT, and then until its streams have ended, or their time is up.

    Meanwhile it answers new requests with 503. After SIGTERM, a gateway that shares its port closes its socket at once
    instead, so that the other gateways on this port get its clients; after SIGINT these stop too. A second signal ends
    the streams at once.

    Prints ``listening http://HOST:PORT`` (or https) on standard output once it accepts connections, with or without a
    scheduler.

    Raises:
        ModelError: the model's tokenizer or generation_config.json, or an adapter, cannot be found or read.
        ConfigError: keys, certificates or the folder of ``--generation-config`` cannot be read, or are missing for an
            endpoint that leaves this host; or traces are to be sent, and OpenTelemetry is not installed.
        OSError: an address cannot be bound.
        RefusedError: the scheduler does not let this gateway join.
    """
    keys = load_keys(config.keys, config.key_name, config.scheduler, config.plaintext)
    model = resolve_model(config.model, config.revision, tokenizer_only=True)
    generation = read_generation_config(config, model)
    tokenizer = Tokenizer.load(model, generation.eos_token_ids)
    gateway_id = config.gateway_id or f"{socket.gethostname()}-{os.getpid()}"
    metrics = Metrics(config.served_model_name or config.model, gateway_id)
    tracing = open_tracing(
        config.otlp_traces_endpoint,
        "pagewise-gateway",
        gateway_id,
        lambda outcome, spans: metrics.trace_spans(outcome).inc(spans),
    )
    certificate = load_certificate(config.ssl_certfile, config.ssl_keyfile, metrics)
    scheduler_client = _scheduler_client(config, gateway_id, tokenizer, metrics, keys)
    surface = listening(
        create_app(scheduler_client, tokenizer, config, metrics, tracing, generation),
        metrics,
        host=config.host,
        port=config.port,
        max_connections=most_connections(config.max_connections),
        keepalive_timeout=config.keepalive_timeout,
        shutdown_timeout=_LAST_WORDS_SECONDS,
        reuse_port=config.reuse_port,
        certificate=certificate,
    )
    stop = StopSignal()
    async with asyncio.TaskGroup() as tasks:
        connected = tasks.create_task(scheduler_client.run(), name="scheduler client")
        try:
            async with surface as acceptor:
                tune_garbage_collector()
                host, port = acceptor.address
                scheme = "http" if certificate is None else "https"
                print(f"listening {scheme}://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
                await stop.wait()
                log.info("stopping")
                if config.reuse_port and stop.number == signal.SIGTERM:
                    await acceptor.close()
                await scheduler_client.close(config.shutdown_timeout, stop.again)
        finally:
            connected.cancel()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)

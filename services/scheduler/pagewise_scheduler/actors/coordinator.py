"""The coordinator: the one owner of all memory and all requests.

Routing and fetches between executors look into the memory of all of them, so all of it belongs to one task. Sockets
receive, decode and send beside it, and leave what has come in its mailbox.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import zmq
from pagewise_shared.config import SchedulerConfig, parse_speculative
from pagewise_shared.config.adapter_options import adapter_rights
from pagewise_shared.curve import Keys
from pagewise_shared.protocol import Query, decode_from_executor, decode_from_gateway

from pagewise_scheduler.actors.adapters import AdapterRegistry
from pagewise_scheduler.actors.client_request import ClientRequest
from pagewise_scheduler.actors.clock import clock
from pagewise_scheduler.actors.console import Console
from pagewise_scheduler.actors.draining import Draining
from pagewise_scheduler.actors.explanations import Explanations
from pagewise_scheduler.actors.fleet import Fleet, FleetOptions
from pagewise_scheduler.actors.gateways import Gateways
from pagewise_scheduler.actors.gauges import Gauges
from pagewise_scheduler.actors.join_guard import JoinGuard
from pagewise_scheduler.actors.reports import answer
from pagewise_scheduler.actors.router import Router
from pagewise_scheduler.actors.router_socket import (
    ConnectionsBroke,
    Mailbox,
    MailboxMessage,
    Received,
    RouterSocket,
    Tick,
    Unreachable,
    Wire,
)
from pagewise_scheduler.actors.service_watch import ServiceWatch
from pagewise_scheduler.metrics import Metrics

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_TICK_SECONDS_WHILE_DRAINING = 0.05


class Coordinator:
    """Owns the fleet, the gateways, and every request between them.

    It works in rounds: it handles all messages that are there, plans ahead for the engines that were touched and sends
    their plans, and then tells each gateway what is new, in one frame at most. ``unplaced_timeout``: seconds that a
    request may wait for an executor that can take it. ``keys``: the allow-lists, None: plain text.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        metrics: Metrics,
        *,
        keys: Keys | None = None,
        unplaced_timeout: float = 60.0,
        on_traced: Callable[[ClientRequest, float], None] | None = None,
    ) -> None:
        """Bind both sockets. ``on_traced``: see ``Gateways``.

        Raises:
            zmq.ZMQError: an endpoint cannot be bound.
        """
        self.metrics = metrics
        self._mailbox = Mailbox()
        self._wire = Wire(keys, metrics)
        # Epochs grow over restarts of the scheduler too, so that a message of an earlier life is never taken.
        self._epochs = count(time.time_ns() // 1_000_000)
        try:
            self.fleet = self._make_fleet(config, keys)
            self.router = self.fleet.router = Router(
                metrics,
                self.fleet.guarded,
                max_waiting=config.max_waiting,
                max_waiting_tokens=config.max_waiting_tokens,
                timeout=unplaced_timeout,
                routing=config.routing,
            )
            self.registry = AdapterRegistry(lambda: self.router.engines, adapter_rights(config))
            self.fleet.on_joined = self.registry.engine_joined
            self.gateways = self._make_gateways(config, keys, on_traced)
        except zmq.ZMQError:
            self._wire.close()
            raise
        self.draining = Draining(self.fleet, self.router, metrics)
        self.fleet.on_leaving = self.draining.begin
        self._console = Console(
            metrics.model_name, self.fleet, self.router, self.gateways, shows_text=config.console_shows_text
        )
        self.explanations = Explanations(self.gateways.names.newest, lambda: self.fleet.engines)
        self.gateways.on_ended = self.explanations.ended
        self._gauges = Gauges(self.router, metrics)
        status = Path(config.service_status) if config.service_status else None
        self._services = ServiceWatch(status, metrics, self.gateways.tell_problems)
        self._tick_seconds = min(_TICK_SECONDS, config.executor_timeout / 4, config.gateway_timeout / 4)
        self._ticked = clock()

    def _make_fleet(self, config: SchedulerConfig, keys: Keys | None) -> Fleet:
        socket = RouterSocket(
            "executor",
            config.listen,
            decode_from_executor,
            self._mailbox,
            self.metrics,
            self._wire,
            timeout=config.executor_timeout,
        )
        options = FleetOptions(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=None if config.max_model_len == "auto" else config.max_model_len,
            step_timeout=config.step_timeout,
            recovery=config.recovery,
            eviction=config.eviction,
            storage_salted=config.storage_salted,
            speculative=parse_speculative(config.speculative_config) if config.speculative_config else None,
        )
        guard = JoinGuard("executor", keys)
        return Fleet(socket, guard, self.metrics, config.executor_timeout, options, self._next_epoch)

    def _make_gateways(
        self,
        config: SchedulerConfig,
        keys: Keys | None,
        on_traced: Callable[[ClientRequest, float], None] | None,
    ) -> Gateways:
        socket = RouterSocket(
            "gateway",
            config.listen_gateways,
            decode_from_gateway,
            self._mailbox,
            self.metrics,
            self._wire,
            timeout=config.gateway_timeout,
        )
        guard = JoinGuard("gateway", keys)
        timeout = config.gateway_timeout
        return Gateways(
            socket,
            guard,
            self.metrics,
            timeout,
            self.router,
            self._next_epoch,
            self._answer,
            self.registry,
            on_traced,
            end_any=config.gateways_end_any_request,
        )

    def _next_epoch(self) -> int:
        return next(self._epochs)

    @property
    def executor_endpoint(self) -> str:
        """Where executors connect to."""
        return self.fleet.socket.endpoint

    @property
    def gateway_endpoint(self) -> str:
        """Where gateways connect to."""
        return self.gateways.socket.endpoint

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.fleet.socket.run(), name="executors' socket")
                tasks.create_task(self.gateways.socket.run(), name="gateways' socket")
                tasks.create_task(self._tick(), name="ticks")
                while True:
                    self._round(await self._mailbox.take_all())
        finally:
            self._wire.close()

    def _round(self, messages: list[MailboxMessage]) -> None:
        for message in messages:
            try:
                self._handle(message)
            except Exception:  # of this message alone: the others in the batch are handled
                log.exception("a %s was not handled", type(message).__name__)
        if self.draining.drains:
            self.draining.advance()
        self.fleet.plan()
        self.gateways.flush()

    def _handle(self, message: MailboxMessage) -> None:
        match message:
            case Received(kind="executor"):
                self.fleet.take(message)
            case Received(kind="gateway"):
                self.gateways.take(message)
            case ConnectionsBroke(kind="executor"):
                self.fleet.probe()
            case ConnectionsBroke(kind="gateway"):
                self.gateways.probe()
            case Unreachable(kind="executor", identity=identity):
                self.fleet.give_up(identity)
            case Unreachable(kind="gateway", identity=identity):
                self.gateways.give_up(identity)
            case Tick():
                self._watch()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS_WHILE_DRAINING if self.draining.drains else self._tick_seconds)
            self._mailbox.put(Tick())

    def _watch(self) -> None:
        """Look for those that are late. Who could not be heard because this process stood still is not."""
        now = clock()
        stood_still = max(0.0, now - self._ticked - self._tick_seconds)
        self._ticked = now
        self.fleet.watch(now, stood_still)
        self.gateways.watch(now, stood_still)
        self.router.watch(now)
        self._report_memory_events()
        self._gauges.refresh(now)
        self._services.refresh(now)

    def _report_memory_events(self) -> None:
        for engine in self.fleet.engines:
            with self.fleet.guarded(engine):
                engine.watch.report()

    def _answer(self, query: Query) -> bytes | None:
        if query.kind == "metrics":
            self._report_memory_events()
        if query.kind == "request" and query.detail == "explain":
            return self.explanations.answer(query)
        return answer(query, self.fleet.engines, self.gateways.names, self.metrics, self._console)

"""The coordinator: the one owner of all memory and all requests.

Routing and fetches between executors look into the memory of all of them, so all of it belongs to one object, which
the event loop calls when one of its two sockets has received something.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic as clock
from typing import Any

import zmq
from pagewise_shared.config import SchedulerConfig
from pagewise_shared.config.adapter_options import adapter_rights
from pagewise_shared.curve import Keys
from pagewise_shared.protocol import Query, decode_from_executor, decode_from_gateway

from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.adapters import AdapterRegistry
from pagewise_scheduler.server.client_request import ClientRequest
from pagewise_scheduler.server.console import Console
from pagewise_scheduler.server.draining import Draining
from pagewise_scheduler.server.executor_registry import ExecutorRegistry
from pagewise_scheduler.server.gateways import Gateways
from pagewise_scheduler.server.gauges import Gauges
from pagewise_scheduler.server.reports import answer
from pagewise_scheduler.server.router import Router
from pagewise_scheduler.server.router_socket import ConnectionsBroke, Event, Received, RouterSocket, Unreachable, Wire
from pagewise_scheduler.server.service_watch import ServiceWatch
from pagewise_scheduler.server.sessions import Sessions

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_TICK_SECONDS_WHILE_DRAINING = 0.05
_ROUNDS_AT_ONCE = 2
"""Rounds in a row before the event loop has a turn: where frames never end, they would never end either."""


class Coordinator:
    """Owns the fleet, the gateways, and every request between them.

    It works in rounds: it takes frames from both sockets and handles them, plans ahead for the executors that were
    touched and sends their plans, and then sends each gateway its new outputs, in one frame at most.
    ``unplaced_timeout``: seconds that a request may wait for an executor that can take it. ``keys``: the allow-lists,
    None: plain text.
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
        self._wire = Wire(keys, metrics)
        bind = partial(RouterSocket, metrics=metrics, wire=self._wire)
        # Epochs grow over restarts of the scheduler too, so that a message of an earlier life is never taken.
        self._epochs = count(time.time_ns() // 1_000_000)
        try:
            executors = bind("executor", config.listen, decode_from_executor, timeout=config.executor_timeout)
            self.executor_registry = ExecutorRegistry(executors, keys, metrics, config, self._epochs.__next__)
            self.router = self.executor_registry.router = Router(
                metrics,
                self.executor_registry.guarded,
                max_waiting=config.max_waiting,
                max_waiting_tokens=config.max_waiting_tokens,
                timeout=unplaced_timeout,
                routing=config.routing,
            )
            self.registry = AdapterRegistry(lambda: self.router.executors, adapter_rights(config))
            self.executor_registry.on_joined = self.registry.executor_joined
            gateways = bind("gateway", config.listen_gateways, decode_from_gateway, timeout=config.gateway_timeout)
            self.gateways = Gateways(
                gateways,
                keys,
                metrics,
                config,
                self._epochs.__next__,
                self.router,
                self.registry,
                self._answer,
                on_traced,
            )
        except zmq.ZMQError:
            self._wire.close()
            raise
        self.draining = Draining(self.executor_registry, self.router, metrics)
        self.executor_registry.on_leaving = self.draining.begin
        self._console = Console(
            metrics.model_name, self.executor_registry, self.router, self.gateways, shows_text=config.console_shows_text
        )
        self._gauges = Gauges(self.router, metrics)
        status = Path(config.service_status) if config.service_status else None
        self._services = ServiceWatch(status, metrics, self.gateways.tell_problems)
        self._tick_seconds = min(_TICK_SECONDS, config.executor_timeout / 4, config.gateway_timeout / 4)
        self._ticked = clock()
        self._will_turn = False

    @property
    def executor_endpoint(self) -> str:
        """Where executors connect to."""
        return self.executor_registry.socket.endpoint

    @property
    def gateway_endpoint(self) -> str:
        """Where gateways connect to."""
        return self.gateways.socket.endpoint

    async def run(self) -> None:
        """Serve until cancelled."""
        self._ended = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.executor_registry.socket.run(self._turn), name="executors' socket")
                tasks.create_task(self.gateways.socket.run(self._turn), name="gateways' socket")
                tasks.create_task(self._tick(), name="ticks")
                await self._ended
        finally:
            self._wire.close()

    def _turn(self) -> None:
        """Handle the frames that are there, in rounds; if they do not end, the event loop has its turn in between."""
        if self._will_turn or self._ended.done():
            return
        try:
            for _ in range(_ROUNDS_AT_ONCE):
                events: list[Event] = []
                more = self.executor_registry.socket.receive(events) | self.gateways.socket.receive(events)
                if events:
                    self._round(events)
                elif not more:
                    return
        except Exception as error:  # no message is to blame: ``run`` ends with it
            self._ended.set_exception(error)
        else:
            self._will_turn = True
            asyncio.get_running_loop().call_soon(self._turn_again)

    def _turn_again(self) -> None:
        self._will_turn = False
        self._turn()

    def _round(self, events: Iterable[Event]) -> None:
        for event in events:
            try:
                self._handle(event)
            except Exception:  # of this event alone: the others in the round are handled
                log.exception("a %s was not handled", type(event).__name__)
        if self.draining.drains:
            self.draining.advance()
        self.executor_registry.plan()
        self.gateways.flush()

    def _handle(self, event: Event) -> None:
        sessions: Sessions[Any] = self.executor_registry if event.kind == "executor" else self.gateways
        match event:
            case Received():
                sessions.take(event)
            case ConnectionsBroke():
                sessions.probe()
            case Unreachable(identity=identity):
                sessions.give_up(identity)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS_WHILE_DRAINING if self.draining.drains else self._tick_seconds)
            try:
                self._watch()
            except Exception:
                log.exception("peers that are late were not looked for")
            self._round(())
            self._turn()

    def _watch(self) -> None:
        """Look for those that are late. Who could not be heard because this process stood still is not."""
        now = clock()
        stood_still = max(0.0, now - self._ticked - self._tick_seconds)
        self._ticked = now
        self.executor_registry.watch(now, stood_still)
        self.gateways.watch(now, stood_still)
        self.router.watch(now)
        self._report_memory_events()
        self._gauges.refresh(now)
        self._services.refresh(now)

    def _report_memory_events(self) -> None:
        for executor in self.executor_registry.executors:
            with self.executor_registry.guarded(executor):
                executor.watch.report()

    def _answer(self, query: Query) -> bytes | None:
        if query.kind == "metrics":
            self._report_memory_events()
        return answer(query, self.executor_registry.executors, self.gateways, self.metrics, self._console)

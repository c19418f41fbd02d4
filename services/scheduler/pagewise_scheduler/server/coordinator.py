"""The coordinator: the event loop calls it with frames, and it calls everything else.

All requests and the bookkeeping of all executors' KV memory belong to it, because routing and fetches between executors
need a view of all of them. It needs no locks: everything runs on one event loop, in rounds:

1. ``_receive`` takes frames from both sockets.
2. ``Sessions.handle`` of the executors or of the gateways checks each frame, and applies it to the core.
3. ``ExecutorRegistry.plan`` plans ahead for every executor that has changed, and sends the plans.
4. ``Gateways.flush`` sends each gateway its new outputs, in one frame at most.

Ticks, a few times a second, find late executors and gateways, and refresh gauges.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic as clock
from typing import Any

import msgspec
import zmq
from pagewise_shared.config import SchedulerConfig
from pagewise_shared.config.adapter_options import adapter_rights
from pagewise_shared.curve import Keys
from pagewise_shared.logs import BoundedLog, printable
from pagewise_shared.protocol import Advise, Advised, Query, ResetCache, decode_from_executor, decode_from_gateway
from pagewise_shared.service_status import ServiceStatus, read_status

from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server import advice
from pagewise_scheduler.server.adapters import AdapterRegistry
from pagewise_scheduler.server.client_request import ClientRequest
from pagewise_scheduler.server.console import Console
from pagewise_scheduler.server.draining import Draining
from pagewise_scheduler.server.executor_registry import ExecutorRegistry
from pagewise_scheduler.server.gateways import Gateways
from pagewise_scheduler.server.gauges import Gauges
from pagewise_scheduler.server.reports import answer
from pagewise_scheduler.server.router import Router
from pagewise_scheduler.server.router_socket import Event, RouterSocket, SocketContext
from pagewise_scheduler.server.sessions import Sessions

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_TICK_SECONDS_WHILE_DRAINING = 0.05
_STATUS_SECONDS = 1.0
_MOST_PROBLEMS, _MOST_TEXT = 16, 300
_ROUNDS_AT_ONCE = 2
"""Rounds in a row before other tasks of the event loop have a turn, even if frames never end."""


class Coordinator:
    """Owns the executors, the gateways, and every request between them.

    ``keys``: the allow-lists, None: plain text. ``on_traced``: called with each ended prompt that is traced, and the
    time.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        metrics: Metrics,
        *,
        keys: Keys | None = None,
        on_traced: Callable[[ClientRequest, float], None] | None = None,
    ) -> None:
        """Bind both sockets.

        Raises:
            zmq.ZMQError: an endpoint cannot be bound.
        """
        self.metrics = metrics
        self._sockets = SocketContext(keys, metrics)
        bind = partial(RouterSocket, metrics=metrics, sockets=self._sockets)
        # Epochs grow across restarts of the scheduler too, so that it drops messages for an earlier scheduler.
        self._epochs = count(time.time_ns() // 1_000_000)
        try:
            executors = bind("executor", config.listen, decode_from_executor, timeout=config.executor_timeout)
            self.executor_registry = ExecutorRegistry(executors, keys, metrics, config, self._epochs.__next__)
            self.router = self.executor_registry.router = Router(
                metrics,
                self.executor_registry.guarded,
                max_waiting=config.max_waiting,
                max_waiting_tokens=config.max_waiting_tokens,
                timeout=config.placement_timeout,
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
                self._follow,
                on_traced,
            )
        except zmq.ZMQError:
            self._sockets.close()
            raise
        self.draining = Draining(self.executor_registry, self.router, metrics)
        self.executor_registry.on_leaving = self.draining.begin
        self._console = Console(
            metrics.model_name, self.executor_registry, self.router, self.gateways, shows_text=config.console_shows_text
        )
        self._gauges = Gauges(self.router, metrics)
        status = Path(config.service_status) if config.service_status else None
        self._services = ServiceWatch(status, metrics, self.gateways.send_problems)
        self._tick_seconds = min(_TICK_SECONDS, config.executor_timeout / 4, config.gateway_timeout / 4)
        self._ticked = clock()
        self._will_turn = False

    @property
    def executor_endpoint(self) -> str:
        """The endpoint for executors."""
        return self.executor_registry.socket.endpoint

    @property
    def gateway_endpoint(self) -> str:
        """The endpoint for gateways."""
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
            self._sockets.close()
            self.executor_registry.watchers.close()

    def _turn(self) -> None:
        if self._will_turn or self._ended.done():
            return
        try:
            for _ in range(_ROUNDS_AT_ONCE):
                if not self._receive():
                    return
                self._send()
        except Exception as error:  # not of one event (see ``_receive``): ``run`` ends with it
            self._ended.set_exception(error)
        else:
            # Frames may be left. Sending in a round may have consumed the edge of the descriptor, so the next turn is
            # scheduled here.
            self._will_turn = True
            asyncio.get_running_loop().call_soon(self._turn_again)

    def _turn_again(self) -> None:
        self._will_turn = False
        self._turn()

    def _receive(self) -> bool:
        """Handle frames of both sockets; return whether there were any, or may be more."""
        received = False
        peers: tuple[Sessions[Any], ...] = (self.executor_registry, self.gateways)
        for sessions in peers:
            events: list[Event] = []
            received |= sessions.socket.receive(events) or bool(events)
            for event in events:
                try:
                    sessions.handle(event)
                except Exception:  # the other events of the round are handled
                    log.exception("a %s was not handled", type(event).__name__)
        return received

    def _send(self) -> None:
        if self.draining.drains:
            self.draining.advance()
        self.executor_registry.plan()
        self.gateways.flush()
        self.executor_registry.watchers.flush()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS_WHILE_DRAINING if self.draining.drains else self._tick_seconds)
            try:
                self._check_peers()
            except Exception:
                log.exception("late executors and gateways were not looked for")
            self._send()
            self._turn()

    def _check_peers(self) -> None:
        """End sessions that are late, and fail requests that have waited too long."""
        now = clock()
        # If this process stood still (stopped, or starved of CPU), heartbeats could not be read: that is no silence.
        stood_still = max(0.0, now - self._ticked - self._tick_seconds)
        self._ticked = now
        self.executor_registry.tick(now, stood_still)
        self.gateways.tick(now, stood_still)
        self.router.tick(now)
        self._record_stats()
        self._gauges.refresh(now)
        self._services.refresh(now)

    def _record_stats(self) -> None:
        for executor in self.executor_registry.executors:
            with self.executor_registry.guarded(executor):
                executor.stats.record(executor.scheduler)

    def _answer(self, query: Query | ResetCache, reply: Callable[[bytes | None], None]) -> None:
        registry = self.executor_registry
        if isinstance(query, ResetCache):
            registry.resets.begin(query, registry.executors, reply)
            return
        if query.kind == "metrics":
            self._record_stats()
        reply(answer(query, registry.executors, self.gateways, self.metrics, self._console))

    def _follow(self, message: Advise) -> Advised:
        return advice.advise(message, self.executor_registry.executors, self.executor_registry.guarded)


class ServiceWatch:
    """Reads the file with the status of this server's services: counts restarts, and reports services that keep
    failing.

    ``path``: the file; None: there is none. ``on_problems``: called with a sentence for each service that keeps
    failing.
    """

    def __init__(self, path: Path | None, metrics: Metrics, on_problems: Callable[[tuple[str, ...]], None]) -> None:
        self._path, self._metrics, self._on_problems = path, metrics, on_problems
        self._known: dict[str, ServiceStatus] = {}
        self._looked = float("-inf")
        self._complaints = BoundedLog(log)

    def refresh(self, now: float) -> None:
        """Read the file if a second has passed since the last time. ``now``: seconds."""
        if self._path is None or now - self._looked < _STATUS_SECONDS:
            return
        self._looked = now
        try:
            found = read_status(self._path)
        except (OSError, msgspec.DecodeError) as error:
            self._complaints.warning("the status of services cannot be read: %s", error)
            return
        if found == self._known:
            return
        for name, status in found.items():
            before = self._known.get(name, ServiceStatus())
            self._metrics.service_restarts(name).inc(max(0, status.restarts - before.restarts))
            self._metrics.service_failing(name).set(bool(status.problem))
        self._known = found
        problems = [f"{name}: {status.problem}" for name, status in sorted(found.items()) if status.problem]
        self._on_problems(tuple(printable(text, _MOST_TEXT) for text in problems[:_MOST_PROBLEMS]))

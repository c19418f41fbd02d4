"""Places live requests on engines: the core's routing policies, with metrics."""

from collections.abc import Sequence
from time import perf_counter

from pagewise_scheduler.actors.clock import clock
from pagewise_scheduler.actors.engine import Engine
from pagewise_scheduler.actors.live_request import LiveRequest
from pagewise_scheduler.core.routing.executor_view import ExecutorView
from pagewise_scheduler.core.routing.policies import RoutingName, make_routing, place
from pagewise_scheduler.metrics import Metrics


class Placer:
    """Chooses engines for requests, and remembers which request is where."""

    def __init__(self, name: RoutingName, metrics: Metrics) -> None:
        self._policy = make_routing(name)
        self._metrics = metrics
        self._views: dict[Engine, ExecutorView] = {}
        self._engines: dict[ExecutorView, Engine] = {}

    def joined(self, engine: Engine) -> None:
        """The engine takes requests from now on."""
        self._views[engine] = view = ExecutorView(engine.scheduler)
        self._engines[view] = engine

    def left(self, engine: Engine) -> None:
        """The engine takes none any more."""
        if (view := self._views.pop(engine, None)) is not None:
            del self._engines[view]

    def load(self, engine: Engine) -> int:
        """Sequences placed on an engine that have not finished."""
        return self._views[engine].load

    def place(self, live: LiveRequest, able: Sequence[Engine]) -> Engine:
        """Choose one of the engines that can hold a request, at least one, and remember the request there."""
        began, now = perf_counter(), clock()
        if live.placement is not None:  # it was elsewhere before
            live.placement.end(now)
        views = [self._views[engine] for engine in able]
        live.placement = placement = place(self._policy, live.request, views, now)
        self._metrics.placements(placement.reason).inc()
        self._metrics.placement_predicted_seconds.observe(placement.predicted)
        self._metrics.placement_decision_seconds.observe(perf_counter() - began)
        return self._engines[placement.executor]

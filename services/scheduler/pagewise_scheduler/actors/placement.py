"""Places live requests on engines: the core's routing policies and moves, with metrics."""

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import cast
from weakref import WeakKeyDictionary

from pagewise_shared.protocol import ROLES, Role

from pagewise_scheduler.actors.client_request import ClientRequest
from pagewise_scheduler.actors.clock import clock
from pagewise_scheduler.actors.engine import Engine
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.routing.executor_view import ExecutorView, Placement
from pagewise_scheduler.core.routing.moves import Move, Moves
from pagewise_scheduler.core.routing.policies import RoutingName, make_routing, place, place_decoding
from pagewise_scheduler.core.routing.roles import Roles
from pagewise_scheduler.core.scheduling.step import StepOutput
from pagewise_scheduler.metrics import Metrics

log = logging.getLogger(__name__)


class Placer:
    """Chooses engines for requests, and remembers which request is where.

    ``lacks``: a role that some executors need others to have and nobody has, so that they do both; None: there is none.
    """

    def __init__(self, name: RoutingName, metrics: Metrics) -> None:
        self.lacks: Role | None = None
        self._policy = make_routing(name)
        self._metrics = metrics
        self._roles = Roles()
        self._views: dict[Engine, ExecutorView] = {}
        self._engines: dict[ExecutorView, Engine] = {}
        # Of engines that drain too: requests go on leaving them.
        self._moves: WeakKeyDictionary[Engine, Moves] = WeakKeyDictionary()

    def joined(self, engine: Engine) -> None:
        """The engine takes requests from now on."""
        role = cast(Role, engine.hello.role)  # it was looked at when the executor joined
        scheduler, grammars = engine.scheduler, not engine.hello.no_grammars
        self._views[engine] = view = ExecutorView(scheduler, role, scheduler.adapters, grammars=grammars)
        self._engines[view] = engine
        self._moves[engine] = Moves(view, self._roles, self._touch)
        self._look_for_roles()

    def left(self, engine: Engine) -> None:
        """The engine takes none any more."""
        if (view := self._views.pop(engine, None)) is not None:
            del self._engines[view]
            self._look_for_roles()

    def _look_for_roles(self) -> None:
        lacks, self.lacks = self.lacks, _lacking({view.role for view in self._engines})
        if self.lacks is not None and self.lacks != lacks:
            log.warning("no executor is there for %s: the others do both", self.lacks)

    def _touch(self, view: ExecutorView) -> None:
        self._engines[view].touch()

    @property
    def num_staying(self) -> int:
        """Requests that decode where their prompt was computed, because nobody else has room."""
        return sum(moves.num_staying for moves in self._moves.values())

    def load(self, engine: Engine) -> int:
        """Sequences placed on an engine that have not finished."""
        return self._views[engine].load

    def place(self, live: ClientRequest, able: Sequence[Engine]) -> Engine:
        """Choose one of the engines that can hold a request, at least one, and remember the request there."""
        began, now = perf_counter(), clock()
        if live.placement is not None:  # it was elsewhere before
            live.placement.end(now)
        views = [self._views[engine] for engine in able]
        placement = place(self._policy, live, views, now, self._roles)
        engine = self._engines[placement.executor]
        self._moves[engine].placed(placement)
        if self.lacks is not None:
            self._metrics.requests_without_role(self.lacks).inc()
        return self._placed(live, placement, began)

    def place_decoding(self, live: ClientRequest, view: ExecutorView) -> Engine:
        """Remember a request at the executor of ``view``, for which it has left the one that computed its prompt."""
        began, now = perf_counter(), clock()
        assert live.placement is not None
        live.placement.end(now)
        return self._placed(live, place_decoding(live, live.placement.executor, view, now), began)

    def _placed(self, live: ClientRequest, placement: Placement, began: float) -> Engine:
        live.placement = placement
        self._metrics.placements(placement.reason).inc()
        self._metrics.placement_predicted_seconds.observe(placement.predicted)
        self._metrics.placement_decision_seconds.observe(perf_counter() - began)
        return self._engines[placement.executor]

    def stepped(self, engine: Engine, output: StepOutput) -> list[Move]:
        """A step of an engine has come back. Returns the requests that have left its scheduler."""
        for sequence in output.finished:
            self._roles.ended(len(sequence.output_token_ids))
        moves = self._moves.get(engine)
        return moves.stepped(output, self._engines.keys(), clock()) if moves is not None else []


def could_serve(engine: Engine, request: Request) -> bool:
    """Whether an engine could serve a request if it had nothing else to do: it fits, and its segments, its grammar and
    its adapter are of a kind that the executor has."""
    hello, scheduler = engine.hello, engine.scheduler
    return (
        scheduler.fits(len(request.prompt_token_ids), request.max_tokens, request.segments)
        and not (request.segments and hello.no_segments)
        and not (request.sampling.grammar and hello.no_grammars)
        and scheduler.adapters.serves(request.adapter)
    )


def _lacking(present: set[Role]) -> Role | None:
    """The role that nobody has if all executors have the other one."""
    if present in ({"prefill"}, {"decode"}):
        return next(role for role in ROLES if role not in present and role != "both")
    return None

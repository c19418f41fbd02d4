"""Executors with roles, and requests that are placed among them and move."""

from collections.abc import Sequence
from typing import Any

from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.routing.executor_view import ExecutorView, Placement
from pagewise_scheduler.core.routing.migrations import Migrations
from pagewise_scheduler.core.routing.policies import Roles, RoutingName, make_routing, place, place_decoding
from pagewise_scheduler.core.scheduling.step import StepOutput
from pagewise_scheduler.core.tiers.cost_model import Costs
from pagewise_scheduler.core.tiers.peer import Peer
from pagewise_shared.protocol import AdapterLoaded, LoadAdapter, Role

from tests.scheduler.core.fleets import Node, fleet

COSTS = Costs(step=1e-4, token=1e-2, fetch_setup=1e-4, fetch_block=1e-4)
"""Computing a block takes much longer than fetching it."""


class Fleet:
    """Executors with roles, and requests that are placed among them and move. ``moved``: how often each request did."""

    def __init__(self, roles: Sequence[Role], routing: RoutingName = "ttft", **options: Any) -> None:
        given: dict[str, Any] = {"costs": COSTS} | options
        self.nodes = fleet(len(roles), **given)
        directory = self.nodes[0].scheduler.recoveries.planner.directory
        assert directory is not None
        self.directory = directory
        self.views = [ExecutorView(node.scheduler, role) for node, role in zip(self.nodes, roles, strict=True)]
        self.roles, self.routing = Roles(), make_routing(routing)
        self.moves = [Migrations(view, self.roles, lambda view: None) for view in self.views]
        self.alive = list(range(len(roles)))
        self.placements: dict[Request, Placement] = {}
        self.moved: dict[Request, int] = {}

    @property
    def present(self) -> list[ExecutorView]:
        return [self.views[where] for where in self.alive]

    def node_of(self, request: Request) -> int:
        """Where a request was placed last."""
        return self.views.index(self.placements[request].executor)

    def add(self, request: Request) -> None:
        if request in self.placements:
            self.placements[request].end(0.0)
        size = len(request.prompt_token_ids), request.max_tokens
        able = [view for view in self.present if view.scheduler.fits(*size)]
        self.placements[request] = placement = place(self.routing, request, able, 0.0, self.roles)
        where = self.node_of(request)
        self.moves[where].placed(placement)
        self.nodes[where].scheduler.add(request)

    def step(self, where: int, steps: int = 1) -> None:
        """Plan as far ahead as is allowed, else take a result in; so many times."""
        node = self.nodes[where]
        for _ in range(steps):
            for load in node.scheduler.features.messages(0.0):
                assert isinstance(load, LoadAdapter)
                node.scheduler.features.take(AdapterLoaded(load.epoch, load.number), 0.0)
            if node.scheduler.num_in_flight < 2 and (plan := node.scheduler.schedule(0.0)) is not None:
                node.results.append(node.executor.execute(plan))
            elif node.results:
                self._take(where, node.scheduler.update(node.results.popleft()))

    def _take(self, where: int, output: StepOutput) -> None:
        for sequence in output.begun:
            self.placements[sequence.request].answered(0.0)
        for sequence in output.finished:
            self.roles.ended(len(sequence.output_token_ids))
            if sequence.request.finished:
                self.placements[sequence.request].end(0.0)
        for request, view in self.moves[where].stepped(output, self.present, 0.0):
            self.moved[request] = self.moved.get(request, 0) + 1
            if view is None:
                self.add(request)
                continue
            self.placements[request].end(0.0)
            self.placements[request] = place_decoding(request, self.views[where], view, 0.0)
            view.scheduler.add(request)

    def run(self, limit: int = 5000) -> None:
        """To the end."""
        for _ in range(limit):
            for where in self.alive:
                self.step(where, 3)
                self.nodes[where].deliver()
            if not any(is_busy(self.nodes[where]) for where in self.alive):
                return
        raise AssertionError("it waits for ever")

    def kill(self, where: int) -> None:
        """An executor is gone: its requests go on elsewhere from their tokens."""
        node = self.nodes[where]
        self.alive.remove(where)
        requests = node.scheduler.release_all()
        node.scheduler.kv.close()
        node.results.clear()
        node.executor.copying.clear()
        del self.directory.peers[node.name]
        for other in self.alive:
            self.nodes[other].executor.peers.pop(node.name)
            self.nodes[other].scheduler.peer_lost(node.name)
        for request in requests:
            self.add(request)

    def come_back(self, where: int) -> None:
        """One that was killed is back with nothing."""
        node, old = self.nodes[where], self.views[where]
        (fresh,) = fleet(1, costs=COSTS, num_blocks=old.scheduler.kv.pool.num_blocks)
        node.scheduler, node.executor = fresh.scheduler, fresh.executor
        node.scheduler.epoch = old.scheduler.epoch + 1
        node.executor.reset(node.scheduler.epoch)
        node.scheduler.recoveries.planner.join(self.directory, Peer(node.name, "", node.scheduler, lambda: None))
        self.views[where] = view = ExecutorView(node.scheduler, old.role)
        self.moves[where] = Migrations(view, self.roles, lambda view: None)
        self.alive.append(where)
        for other in self.alive:
            self.nodes[other].executor.peers[node.name] = node.executor
            node.executor.peers[self.nodes[other].name] = self.nodes[other].executor


def is_busy(node: Node) -> bool:
    prefetches = node.scheduler.features.prefetches.active
    return bool(node.scheduler.requests or prefetches or node.results or node.executor.copying)

"""A virtual clock around the scheduler core: requests come, steps take the time they are said to cost, copies too.

Nothing is computed. The scheduler is the one that serves; only the executor, the sockets and the clock are made up.
"""

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, repeat
from math import isnan

from pagewise_shared.protocol import DEVICE, Copied, RequestParams, ReuseHints, Role, StepResult, pack_int32s
from pagewise_shared.sampling import SamplingParams

from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.routing.executor_view import ExecutorView, Placement
from pagewise_scheduler.core.routing.migrations import Migrations, Roles
from pagewise_scheduler.core.routing.policies import RoutingPolicy, make_routing, place, place_decoding
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_scheduler.core.tiers.recovery_plan import Recovery
from pagewise_scheduler.replay.costs import DeviceCosts
from pagewise_scheduler.replay.simulated_executor import (
    SAMPLED,
    Event,
    SimulatedExecutor,
    between_tiers,
    confirmation,
)
from pagewise_scheduler.replay.traces import TraceRequest

_SAMPLING = SamplingParams(temperature=0.0)
_SAMPLE_EVERY = 0.25
_BOTH: Role = "both"
_HINTS = {False: ReuseHints(), True: ReuseHints(tool_call_ids=(SAMPLED,))}
"""By whether a request's answer calls a tool."""


@dataclass(slots=True)
class Served:
    """What became of a request; times in seconds of the virtual clock, NaN if it never came to that.

    ``reason``: why it was placed where it was. ``predicted``: seconds to its first token, as was thought then.
    ``last_token``: when its newest token came, if gaps are noted. ``moves``: how often it went on elsewhere.
    """

    trace: TraceRequest
    arrival: float
    request: Request
    reason: str = "only"
    predicted: float = float("nan")
    first_token: float = float("nan")
    last_token: float = float("nan")
    moves: int = 0
    finished: float = float("nan")

    def forget(self) -> None:
        """Let go of its tokens: a day of prompts would not fit into memory."""
        self.request.prompt_token_ids = array("i")
        self.request.sequences.clear()


@dataclass(slots=True)
class Sample:
    """Memory at one moment. ``allocated``: slots in tables of running sequences, ``used``: those that hold a token."""

    time: float
    running: int
    waiting: int
    in_use: int
    cached: int
    allocated: int
    used: int


@dataclass(slots=True)
class Outcome:
    """Everything a replay has seen. ``refused``: requests that could never fit. ``seconds``: virtual time it took.

    ``gaps``: seconds between tokens of each sequence, if they are noted.
    """

    served: list[Served] = field(default_factory=list)
    refused: int = 0
    seconds: float = 0.0
    steps: int = 0
    executors: list[SimulatedExecutor] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    gaps: "array[float]" = field(default_factory=lambda: array("d"))


class Simulation:
    """Schedulers with a simulated executor each, requests placed among them by ``routing``, and a trace.

    ``peers``: executors fetch blocks from each other; ``uplinks``: each sends over one link, as it receives over one.
    ``roles``: what they are for, both if not given. ``gaps``: note the time between tokens. ``tick`` is told the index
    of each request that arrives, ``salt`` gives its ``cache_salt``; ``watch`` is called with the time whenever memory
    is sampled.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        costs: DeviceCosts,
        *,
        routing: RoutingPolicy | None = None,
        peers: bool = False,
        uplinks: bool = False,
        roles: Sequence[Role] = (),
        gaps: bool = False,
        depth: int = 2,
        tick: Callable[[int], None] = lambda index: None,
        salt: Callable[[int], str | None] = lambda index: None,
        watch: Callable[[float], None] = lambda now: None,
    ) -> None:
        self.now = 0.0
        self.executors = [
            SimulatedExecutor(scheduler, costs, self._at, depth, role)
            for scheduler, role in zip(schedulers, roles or repeat(_BOTH), strict=False)
        ]
        self._views = {executor.view: executor for executor in self.executors}
        self._roles = Roles()
        self._moves = {view: Migrations(view, self._roles, self._touch) for view in self._views}
        self._notes_gaps = gaps
        self._routing = routing or make_routing("ttft")
        self._salt = salt
        self._watch = watch
        self._tick = tick
        self._events: list[tuple[float, int, SimulatedExecutor | None, Event]] = []
        self._tie = count()
        self._outcome = Outcome(executors=self.executors)
        self._by_id: dict[str, tuple[int, Served, Placement]] = {}
        self._next_sample = 0.0
        if peers:
            self._let_fetch()
        if uplinks:
            for executor in self.executors:
                executor.senders = {one.scheduler.recoveries.endpoint: one for one in self.executors}

    def _let_fetch(self) -> None:
        directory = PrefixDirectory()
        for number, executor in enumerate(self.executors):
            endpoint, scheduler = f"executor-{number}", executor.scheduler
            wake = partial(self._blocks_back, executor)
            scheduler.recoveries.join(directory, Peer(endpoint, scheduler.kv.block_size, scheduler, wake))

    def _blocks_back(self, executor: SimulatedExecutor) -> None:
        self._at(self.now, executor, None)

    def _touch(self, view: ExecutorView) -> None:
        self._at(self.now, self._views[view], None)

    def run(self, trace: list[TraceRequest]) -> Outcome:
        """Replay a trace to its end."""
        followers: dict[int, list[int]] = {}
        for index, request in enumerate(trace):
            if request.after >= 0:
                followers.setdefault(request.after, []).append(index)
            else:
                self._at(request.arrival, None, index)
        while self._events:
            self.now, _, executor, event = heapq.heappop(self._events)
            ended: list[int] = []
            match event:
                case int():
                    executor = self._arrive(event, trace[event])
                    ended = [event] if executor is None else []
                case StepResult():
                    assert executor is not None
                    ended = self._take_result(executor, event)
                case Copied():
                    assert executor is not None
                    executor.scheduler.copied(event)
            for index in ended:
                self._follow(followers, trace, index)
            if executor is None:
                continue
            if executor.plan(self.now) and self.now >= self._next_sample:
                self._sample()
            self._outcome.recoveries += executor.scheduler.recoveries.reports
            executor.scheduler.recoveries.reports.clear()
        self._outcome.seconds = self.now
        self._outcome.steps = sum(executor.steps for executor in self.executors)
        return self._outcome

    def _at(self, time: float, executor: SimulatedExecutor | None, what: Event) -> None:
        heapq.heappush(self._events, (time, next(self._tie), executor, what))

    def _follow(self, followers: dict[int, list[int]], trace: list[TraceRequest], index: int) -> None:
        for follower in followers.get(index, ()):
            self._at(self.now + trace[follower].arrival, None, follower)

    def _arrive(self, index: int, trace: TraceRequest) -> SimulatedExecutor | None:
        self._tick(index)
        size = trace.num_prompt_tokens, trace.num_output_tokens
        able = {one.view: one for one in self.executors if one.scheduler.fits(*size)}
        if not able:
            self._outcome.refused += 1
            return None
        request = Request(
            str(index),
            trace.prompt(),
            trace.num_output_tokens,
            RequestParams(_SAMPLING, cache_salt=self._salt(index), reuse=_HINTS[trace.tool_call]),
            arrival_time=self.now,
        )
        placement = place(self._routing, request, list(able), self.now, self._roles)
        self._moves[placement.executor].placed(placement)
        served = Served(trace, self.now, request, placement.reason, placement.predicted)
        self._outcome.served.append(served)
        self._by_id[request.request_id] = (index, served, placement)
        executor = able[placement.executor]
        executor.scheduler.add(request)
        return executor

    def _take_result(self, executor: SimulatedExecutor, result: StepResult) -> list[int]:
        """Returns the indices of requests that finished."""
        scheduler = executor.scheduler
        if self._notes_gaps:
            self._note_gaps(scheduler.steps_in_flight[0].sampled)
        output = scheduler.update(result)
        for sequence in output.begun:
            _, served, placement = self._by_id[sequence.request.request_id]
            if isnan(served.first_token):
                served.first_token = self.now
            placement.answered(self.now)
        finished = []
        for sequence in output.finished:
            index, served, placement = self._by_id.pop(sequence.request.request_id)
            served.finished = self.now
            placement.end(self.now)
            self._roles.ended(len(sequence.output_token_ids))
            served.forget()
            finished.append(index)
        for request, view in self._moves[executor.view].stepped(output, list(self._views), self.now):
            assert view is not None, "executors stay"
            self._move(request, view)
        return finished

    def _move(self, request: Request, view: ExecutorView) -> None:
        """A request goes on elsewhere."""
        index, served, before = self._by_id[request.request_id]
        before.end(self.now)
        placement = place_decoding(request, before.executor, view, self.now)
        self._by_id[request.request_id] = index, served, placement
        served.moves += 1
        view.scheduler.add(request)
        self._at(self.now, self._views[before.executor], None)
        self._at(self.now, self._views[view], None)

    def _note_gaps(self, sampled: Sequence[RequestSequence]) -> None:
        for sequence in sampled:
            served = self._by_id[sequence.request.request_id][1]
            if served.last_token == served.last_token:
                self._outcome.gaps.append(self.now - served.last_token)
            served.last_token = self.now

    def _sample(self) -> None:
        schedulers = [executor.scheduler for executor in self.executors]
        pools = [scheduler.kv.pool for scheduler in schedulers]
        running = [sequence for scheduler in schedulers for sequence in scheduler.running]
        self._next_sample = self.now + _SAMPLE_EVERY
        self._watch(self.now)
        self._outcome.samples.append(
            Sample(
                time=self.now,
                running=len(running),
                waiting=sum(scheduler.num_waiting for scheduler in schedulers),
                in_use=sum(pool.num_in_use for pool in pools),
                cached=sum(pool.num_cached for pool in pools),
                allocated=sum(sequence.table.num_slots for sequence in running),
                used=sum(min(sequence.num_tokens, sequence.table.num_slots) for sequence in running),
            )
        )


def replay_cache_only(scheduler: Scheduler, trace: list[TraceRequest], tick: Callable[[int], None]) -> Outcome:
    """Each request runs alone and takes no time: what remains is the cache, at the full size of the pool.

    ``tick`` is told the index of each request that starts.
    """
    outcome = Outcome()
    for index, record in enumerate(trace):
        tick(index)
        if not scheduler.fits(record.num_prompt_tokens, record.num_output_tokens):
            outcome.refused += 1
            continue
        request = Request(
            str(index),
            record.prompt(),
            record.num_output_tokens,
            RequestParams(_SAMPLING, reuse=_HINTS[record.tool_call]),
            arrival_time=float(index),
        )
        served = Served(record, record.arrival, request, first_token=record.arrival, finished=record.arrival)
        scheduler.add(request)
        while not request.finished:
            plan = scheduler.schedule(float(index))
            assert plan is not None
            sampled = len(scheduler.steps_in_flight[-1].sampled)
            scheduler.update(StepResult(plan.epoch, plan.step, pack_int32s([SAMPLED] * sampled)))
            for copies in between_tiers(plan):
                scheduler.copied(confirmation(plan, copies))
                outcome.steps += copies.target == DEVICE
        outcome.recoveries += scheduler.recoveries.reports
        scheduler.recoveries.reports.clear()
        served.forget()
        outcome.served.append(served)
    return outcome

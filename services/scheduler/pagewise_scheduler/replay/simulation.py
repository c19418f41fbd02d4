"""A discrete-event simulation around the scheduler core, with a virtual clock.

The scheduler and routing are the product's; the executor, the sockets and the clock are simulated.
"""

import heapq
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, repeat
from math import isnan
from typing import NamedTuple

from pagewise_shared.protocol import (
    DEVICE,
    BlockCopies,
    Copied,
    RequestParams,
    ReuseHints,
    Role,
    StepPlan,
    StepResult,
    pack_int32s,
)
from pagewise_shared.sampling import SamplingParams

from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.routing.executor_view import ExecutorView, Placement
from pagewise_scheduler.core.routing.migrations import Migrations
from pagewise_scheduler.core.routing.policies import Roles, RoutingPolicy, make_routing, place, place_decoding
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_scheduler.core.tiers.recovery_plan import Recovery
from pagewise_scheduler.replay.costs import DeviceCosts
from pagewise_scheduler.replay.traces import TraceRequest

SAMPLED = 1 << 30
"""The token that every step samples. It differs from all block ids of traces, by which Belady's rule identifies blocks:
outputs are never used again."""
_SAMPLING = SamplingParams(temperature=0.0)
_SAMPLE_EVERY = 0.25
_BOTH: Role = "both"
_HINTS = {False: ReuseHints(), True: ReuseHints(tool_call_ids=(SAMPLED,))}
"""By whether a request's answer calls a tool."""

Event = StepResult | Copied | int | None
"""A step's result; a confirmation of copies; the index of a request that arrives; None: the executor may have to plan,
because blocks came back or a request migrates."""


class SimulatedExecutor:
    """A scheduler with a simulated executor, which has a link to each of its tiers, and one from all other executors.

    ``busy``: seconds in which it computed. ``computed``: prompt tokens that it computed. ``at``: called with a time and
    an event of this executor at that time. ``free_at``: until when the device or a link is occupied. ``senders``: by
    endpoint, executors whose sending link is limited too; it sends one list of blocks after the other.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        costs: DeviceCosts,
        at: Callable[[float, "SimulatedExecutor", "Event"], None],
        depth: int,
        role: Role = "both",
    ) -> None:
        self.scheduler = scheduler
        self.view = ExecutorView(scheduler, role)
        self.steps = self.computed = 0
        self.busy = 0.0
        self._costs = costs
        self._at = at
        self._depth = depth
        self.free_at: dict[Hashable, float] = {}
        self.senders: Mapping[str, SimulatedExecutor] = {}

    def plan(self, now: float) -> bool:
        """Plan steps as far ahead as allowed; returns whether any was."""
        scheduler, before = self.scheduler, self.steps
        while scheduler.num_in_flight < self._depth and (plan := scheduler.schedule(now)) is not None:
            self._execute(plan, now)
        return self.steps > before

    def _execute(self, plan: StepPlan, now: float) -> None:
        """Occupy the device and the links for a plan; its results come as events."""
        costs, step = self._costs, self.scheduler.steps_in_flight[-1]
        num_decodes = step.num_seqs - len(step.chunk_rows)
        seconds = costs.prefill.step + costs.prefill.token * (step.num_tokens - num_decodes)
        seconds += costs.prefill.attention * step.attention + costs.decode * num_decodes
        pool = self.scheduler.kv.pool
        if num_decodes:
            seconds += costs.context * pool.num_in_use * self.scheduler.kv.block_size
        if not step.num_tokens:
            seconds = 0.0
        self.steps += 1
        self.busy += seconds
        self.computed += step.num_tokens - num_decodes
        tokens = pack_int32s([SAMPLED] * len(step.sampled))
        result = StepResult(plan.epoch, plan.step, tokens, elapsed_us=max(1, int(seconds * 1e6)))
        self._at(self._occupy("step", seconds, now), self, result)
        for copies in _between_tiers(plan):
            seconds = self._copy_seconds(copies)
            if copies.peer is not None:
                begins = max(now, self.free_at.get("receives", 0.0))
                end = self._fetch(copies.peer.endpoint, seconds, begins)
                seconds = end - begins
            else:
                end = self._occupy((copies.source, copies.target), seconds, now)
            self._at(end, self, _confirmation(plan, copies, max(1, int(seconds * 1e6))))

    def _fetch(self, endpoint: str, seconds: float, begins: float) -> float:
        """Occupy the links between a peer and this executor from ``begins`` on; returns until when."""
        if (sender := self.senders.get(endpoint)) is not None:
            begins = max(begins, sender.free_at.get("sends", 0.0))
            sender.free_at["sends"] = begins + seconds
        self.free_at["receives"] = begins + seconds
        return begins + seconds

    def _copy_seconds(self, copies: BlockCopies) -> float:
        costs, num_blocks = self._costs.prefill, len(copies.pairs) // 8
        if copies.peer is not None:
            return costs.fetch_setup + num_blocks * costs.fetch_block
        if copies.target == DEVICE:
            link = costs.of_tier(copies.source)
            return link.load_setup + num_blocks * link.load_block
        link = costs.of_tier(copies.target)
        return link.store_setup + num_blocks * link.store_block

    def _occupy(self, resource: Hashable, seconds: float, now: float) -> float:
        end = self.free_at[resource] = max(now, self.free_at.get(resource, 0.0)) + seconds
        return end


@dataclass(slots=True)
class Served:
    """The times of a request, in seconds of the virtual clock; NaN: it never came to that.

    ``reason``: of its placement. ``predicted``: the predicted seconds to its first token. ``last_token``: when its
    newest token came, if gaps are noted. ``moves``: how often it migrated.
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
        """Release its tokens: a day of prompts would not fit into memory."""
        self.request.prompt_token_ids = array("i")
        self.request.sequences.clear()


class Sample(NamedTuple):
    """Running sequences at one moment. ``allocated``: slots in their block tables; ``used``: slots with a token."""

    running: int
    allocated: int
    used: int


@dataclass(slots=True)
class Outcome:
    """The record of a replay. ``refused``: requests that could never fit. ``seconds``: virtual time that it took.

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
    """Schedulers with a simulated executor each, and requests that ``routing`` places among them.

    ``peers``: executors fetch blocks from each other; ``uplinks``: each has one link for sending, as for receiving.
    ``roles``: of the executors, "both" if not given. ``gaps``: note the time between tokens. ``depth``: steps in
    flight. ``tick``: called with the index of each request that arrives. ``salt``, ``key``: return its ``cache_salt``
    and API key. ``hints``: returns its hints, called with its index and whether its answer calls a tool.
    ``watch``: called with the time whenever memory is sampled.
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
        key: Callable[[int], str] = lambda index: "",
        hints: Callable[[int, bool], ReuseHints] = lambda index, tool_call: _HINTS[tool_call],
        watch: Callable[[float], None] = lambda now: None,
    ) -> None:
        self.now = 0.0
        self.executors = [
            SimulatedExecutor(scheduler, costs, self._at, depth, role)
            for scheduler, role in zip(schedulers, roles or repeat(_BOTH), strict=False)
        ]
        self._views = {executor.view: executor for executor in self.executors}
        self._roles = Roles()
        self._migrations = {view: Migrations(view, self._roles, self._touch) for view in self._views}
        self._notes_gaps, self._routing = gaps, routing or make_routing("ttft")
        self._salt, self._watch, self._tick, self._key, self._hints = salt, watch, tick, key, hints
        self._events: list[tuple[float, int, SimulatedExecutor | None, Event]] = []
        self._tie = count()
        self._outcome = Outcome(executors=self.executors)
        for executor in self.executors:
            executor.scheduler.recoveries.emit = self._outcome.recoveries.append
        self._by_id: dict[str, tuple[int, Served, Placement]] = {}
        self._next_sample = 0.0
        self._connect(peers, uplinks)

    def _connect(self, peers: bool, uplinks: bool) -> None:
        directory = PrefixDirectory()
        for number, executor in enumerate(self.executors if peers else ()):
            endpoint, scheduler = f"executor-{number}", executor.scheduler
            wake = partial(self._touch, executor.view)
            scheduler.recoveries.planner.join(directory, Peer(endpoint, scheduler.kv.block_size, scheduler, wake))
        for executor in self.executors if uplinks else ():
            executor.senders = {one.scheduler.recoveries.planner.endpoint: one for one in self.executors}

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
        self._outcome.seconds = self.now
        self._outcome.steps = sum(executor.steps for executor in self.executors)
        return self._outcome

    def _at(self, time: float, executor: SimulatedExecutor | None, event: Event) -> None:
        heapq.heappush(self._events, (time, next(self._tie), executor, event))

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
            self._params(index, trace),
            arrival_time=self.now,
        )
        placement = place(self._routing, request, list(able), self.now, self._roles)
        self._migrations[placement.executor].placed(placement)
        served = Served(trace, self.now, request, placement.reason, placement.predicted)
        self._outcome.served.append(served)
        self._by_id[request.request_id] = (index, served, placement)
        executor = able[placement.executor]
        executor.scheduler.add(request)
        return executor

    def _params(self, index: int, trace: TraceRequest) -> RequestParams:
        reuse = self._hints(index, trace.tool_call)
        return RequestParams(_SAMPLING, key=self._key(index), cache_salt=self._salt(index), reuse=reuse)

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
        for request, view in self._migrations[executor.view].stepped(output, list(self._views), self.now):
            assert view is not None, "executors stay"
            self._migrate(request, view)
        return finished

    def _migrate(self, request: Request, view: ExecutorView) -> None:
        index, served, before = self._by_id[request.request_id]
        before.end(self.now)
        placement = place_decoding(request, before.executor, view, self.now)
        self._by_id[request.request_id] = index, served, placement
        served.moves += 1
        view.scheduler.add(request)
        self._touch(before.executor)
        self._touch(view)

    def _note_gaps(self, sampled: Sequence[RequestSequence]) -> None:
        for sequence in sampled:
            served = self._by_id[sequence.request.request_id][1]
            if served.last_token == served.last_token:
                self._outcome.gaps.append(self.now - served.last_token)
            served.last_token = self.now

    def _sample(self) -> None:
        self._next_sample = self.now + _SAMPLE_EVERY
        self._watch(self.now)
        running = [sequence for executor in self.executors for sequence in executor.scheduler.running]
        allocated = sum(sequence.table.num_slots for sequence in running)
        used = sum(min(sequence.num_tokens, sequence.table.num_slots) for sequence in running)
        self._outcome.samples.append(Sample(len(running), allocated, used))


def replay_cache_only(scheduler: Scheduler, trace: list[TraceRequest], tick: Callable[[int], None]) -> Outcome:
    """Replay a trace without a clock: each request runs alone, with the whole pool as its cache.

    ``tick``: called with the index of each request that starts.
    """
    outcome = Outcome()
    scheduler.recoveries.emit = outcome.recoveries.append
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
            for copies in _between_tiers(plan):
                scheduler.copied(_confirmation(plan, copies))
                outcome.steps += copies.target == DEVICE
        served.forget()
        outcome.served.append(served)
    return outcome


def _between_tiers(plan: StepPlan) -> list[BlockCopies]:
    """The copies of a plan that executors confirm: all except copies inside the device."""
    return [copies for copies in plan.copies if copies.peer is not None or copies.source != copies.target]


def _confirmation(plan: StepPlan, copies: BlockCopies, elapsed_us: int = 0) -> Copied:
    """The confirmation of copies, as an executor sends it."""
    peer = copies.peer.endpoint if copies.peer is not None else ""
    return Copied(plan.epoch, plan.step, copies.source, copies.target, peer, elapsed_us, group=copies.group)

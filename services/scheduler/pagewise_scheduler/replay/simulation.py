"""A virtual clock around the scheduler core: requests come, steps take the time they are said to cost, copies too.

Nothing is computed. The scheduler is the one that serves; only the executor, the sockets and the clock are made up.
"""

import heapq
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from pagewise_shared.protocol import Copied, StepPlan, StepResult, pack_int32s
from pagewise_shared.sampling import SamplingParams

from pagewise_scheduler.core.recovery.ways import Recovery
from pagewise_scheduler.core.scheduling.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.costs import DeviceCosts
from pagewise_scheduler.replay.traces import TraceRequest

_SAMPLING = SamplingParams(temperature=0.0)
_SAMPLE_EVERY = 0.25


@dataclass(slots=True)
class Served:
    """What became of a request; times in seconds of the virtual clock, NaN if it never came to that."""

    trace: TraceRequest
    arrival: float
    request: Request
    first_token: float = float("nan")
    finished: float = float("nan")


@dataclass(slots=True)
class Sample:
    """Memory at one moment. ``allocated``: slots in tables of running sequences, ``used``: those that hold a token."""

    time: float
    running: int
    waiting: int
    in_use: int
    cached: int
    host_used: int
    allocated: int
    used: int


@dataclass(slots=True)
class Outcome:
    """Everything a replay has seen. ``refused``: requests that could never fit. ``seconds``: virtual time it took."""

    served: list[Served] = field(default_factory=list)
    refused: int = 0
    seconds: float = 0.0
    steps: int = 0
    busy: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)


class Simulation:
    """One scheduler, one simulated executor with links of its own to the host, and a trace.

    ``tick`` is told the index of each request that arrives, ``salt`` gives its ``cache_salt``; ``watch`` is called with
    the time whenever memory is sampled.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        costs: DeviceCosts,
        *,
        depth: int = 2,
        tick: Callable[[int], None] = lambda index: None,
        salt: Callable[[int], str | None] = lambda index: None,
        watch: Callable[[float], None] = lambda now: None,
    ) -> None:
        self.now = 0.0
        self._salt = salt
        self._watch = watch
        self._tick = tick
        self._scheduler = scheduler
        self._costs = costs
        self._depth = depth
        self._events: list[tuple[float, int, str, object]] = []
        self._tie = count()
        self._free_at = {"step": 0.0, "store": 0.0, "load": 0.0}
        self._results: deque[StepResult] = deque()
        self._outcome = Outcome()
        self._by_id: dict[str, tuple[int, Served]] = {}
        self._next_sample = 0.0

    def run(self, trace: list[TraceRequest]) -> Outcome:
        """Replay a trace to its end."""
        followers: dict[int, list[int]] = {}
        for index, request in enumerate(trace):
            if request.after >= 0:
                followers.setdefault(request.after, []).append(index)
            else:
                self._at(request.arrival, "arrival", index)
        while self._events:
            self.now, _, kind, what = heapq.heappop(self._events)
            if kind == "arrival":
                assert isinstance(what, int)
                if not self._arrive(what, trace[what]):
                    self._follow(followers, trace, what)
            elif kind == "result":
                for index in self._take_result():
                    self._follow(followers, trace, index)
            else:
                assert isinstance(what, Copied)
                self._scheduler.copied(what)
            self._plan()
            self._outcome.recoveries += self._scheduler.recoveries.reports
            self._scheduler.recoveries.reports.clear()
        self._outcome.seconds = self.now
        return self._outcome

    def _at(self, time: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (time, next(self._tie), kind, what))

    def _follow(self, followers: dict[int, list[int]], trace: list[TraceRequest], index: int) -> None:
        for follower in followers.get(index, ()):
            self._at(self.now + trace[follower].arrival, "arrival", follower)

    def _arrive(self, index: int, trace: TraceRequest) -> bool:
        scheduler = self._scheduler
        self._tick(index)
        if not scheduler.fits(trace.num_prompt_tokens, trace.num_output_tokens):
            self._outcome.refused += 1
            return False
        request = Request(
            str(index),
            trace.prompt(),
            trace.num_output_tokens,
            _SAMPLING,
            cache_salt=self._salt(index),
            arrival_time=self.now,
        )
        served = Served(trace, self.now, request)
        self._outcome.served.append(served)
        self._by_id[request.request_id] = (index, served)
        scheduler.add(request)
        return True

    def _plan(self) -> None:
        scheduler = self._scheduler
        while scheduler.num_in_flight < self._depth and (plan := scheduler.schedule(self.now)) is not None:
            self._execute(plan)
            if self.now >= self._next_sample:
                self._sample()

    def _execute(self, plan: StepPlan) -> None:
        """Book the device and the links for a plan; its results come as events."""
        costs, step = self._costs, self._scheduler.steps_in_flight[-1]
        num_decodes = step.num_seqs - len(step.chunk_rows)
        seconds = costs.prefill.step + costs.prefill.token * (step.num_tokens - num_decodes)
        seconds += costs.prefill.attention * step.attention + costs.decode * num_decodes
        pool = self._scheduler.kv.pool
        if num_decodes:
            seconds += costs.context * pool.num_in_use * self._scheduler.kv.block_size
        if not step.num_tokens:
            seconds = 0.0
        self._outcome.steps += 1
        self._outcome.busy += seconds
        end = self._occupy("step", seconds)
        self._results.append(
            StepResult(
                plan.epoch, plan.step, pack_int32s([0] * len(step.sampled)), elapsed_us=max(1, int(seconds * 1e6))
            )
        )
        self._at(end, "result", None)
        if plan.memory is None:
            return
        direction: Literal["store", "load"]
        for direction, data, setup, block in (
            ("store", plan.memory.stores, costs.prefill.store_setup, costs.prefill.store_block),
            ("load", plan.memory.loads, costs.prefill.load_setup, costs.prefill.load_block),
        ):
            if data:
                seconds = setup + len(data) // 8 * block
                self._at(
                    self._occupy(direction, seconds),
                    "copied",
                    Copied(plan.epoch, plan.step, direction, max(1, int(seconds * 1e6))),
                )

    def _occupy(self, resource: str, seconds: float) -> float:
        end = self._free_at[resource] = max(self.now, self._free_at[resource]) + seconds
        return end

    def _take_result(self) -> list[int]:
        """Returns the indices of requests that finished."""
        output = self._scheduler.update(self._results.popleft())
        for sequence in output.sequences:
            if len(sequence.output_token_ids) == 1:
                self._by_id[sequence.request.request_id][1].first_token = self.now
        finished = []
        for sequence in output.finished:
            index, served = self._by_id.pop(sequence.request.request_id)
            served.finished = self.now
            served.request.prompt_token_ids = array("i")  # a day of prompts would not fit into memory
            served.request.sequences.clear()
            finished.append(index)
        return finished

    def _sample(self) -> None:
        scheduler = self._scheduler
        pool, running = scheduler.kv.pool, scheduler.running
        self._next_sample = self.now + _SAMPLE_EVERY
        self._watch(self.now)
        self._outcome.samples.append(
            Sample(
                time=self.now,
                running=len(running),
                waiting=scheduler.num_waiting,
                in_use=pool.num_in_use,
                cached=pool.num_cached,
                host_used=pool.host.num_used,
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
        request = Request(str(index), record.prompt(), record.num_output_tokens, _SAMPLING, arrival_time=float(index))
        served = Served(record, record.arrival, request, record.arrival, record.arrival)
        scheduler.add(request)
        while not request.finished:
            plan = scheduler.schedule(float(index))
            assert plan is not None
            sampled = len(scheduler.steps_in_flight[-1].sampled)
            scheduler.update(StepResult(plan.epoch, plan.step, pack_int32s([0] * sampled)))
            if plan.memory is not None and plan.memory.stores:
                scheduler.copied(Copied(plan.epoch, plan.step, "store"))
            if plan.memory is not None and plan.memory.loads:
                scheduler.copied(Copied(plan.epoch, plan.step, "load"))
            outcome.steps += 1
        outcome.recoveries += scheduler.recoveries.reports
        scheduler.recoveries.reports.clear()
        request.prompt_token_ids = array("i")
        request.sequences.clear()
        outcome.served.append(served)
    return outcome

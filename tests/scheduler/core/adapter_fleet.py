"""One executor with adapters, which checks that each row has its own adapter in every step."""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any

from pagewise_scheduler.core.features.registry import FeatureOptions
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.block_hash import adapter_salt
from pagewise_shared.protocol import Adapter, AdapterCapacity, AdapterLoaded, LoadAdapter, StepPlan, StepResult
from pagewise_shared.sampling import SamplingParams
from pagewise_shared.segments import make_segments, mark_segments

from tests.core_requests import make_request
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import executor_for

GREEDY = SamplingParams(temperature=0.0)
_ROOT = 8


def adapter(number: int, path: str = "", rank: int = 8) -> Adapter:
    """An adapter whose content is its number."""
    return Adapter(f"adapter-{number}", path or f"/adapters/{number}", bytes([number]) * 32, 1000, rank)


def request(number: int, which: int | None, max_tokens: int = 4, arrival: float = 0.0, **more: object) -> Request:
    """A request with an adapter, or with None. Many share prefixes; those with different adapters must not share KV."""
    chosen = None if which is None else adapter(which)
    salt = None if chosen is None else adapter_salt(chosen.content, None)
    prompt = [7, 8, 9, *range(number % 5)]
    fields = {"adapter": chosen, "cache_salt": salt, "arrival_time": arrival} | more
    return make_request(f"r{number}", prompt, max_tokens, GREEDY, **fields)


def segmented(number: int, which: int | None, size: int, max_tokens: int = 4, arrival: float = 0.0) -> Request:
    """A request with a segment of ``size`` tokens, at another position in each prompt."""
    made = request(number, which, max_tokens, arrival)
    start = _ROOT + 1 + number % 5
    made.prompt_token_ids = array("i", [*range(start), *range(500, 500 + size), 9, 9, 9])
    made.segments = make_segments(len(made.prompt_token_ids), [(start, start + size)])
    mark_segments(made.prompt_token_ids, made.segments)
    return made


class Fleet:
    """One scheduler and one executor. Loads take ``load_steps`` steps; ``broken``: adapters that cannot be loaded from
    their own paths; ``stuck``: no load returns. ``options``: of the scheduler."""

    def __init__(
        self,
        max_loras: int,
        load_steps: int = 2,
        num_blocks: int = 64,
        broken: Iterable[int] = (),
        max_rank: int = 2**31 - 1,
        **options: Any,
    ) -> None:
        self.scheduler = Scheduler(
            features=FeatureOptions(AdapterCapacity(max_loras, max_rank)),
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            **options,
        )
        self.executor: CheckingExecutor = executor_for(self.scheduler)
        self.slots: dict[int, bytes] = {}
        self.rows: dict[int, tuple[int, bytes]] = {}
        self.failed: list[Request] = []
        self.asked: list[LoadAdapter] = []
        self.now = 0.0
        self.stuck = False
        self._load_steps, self._broken = load_steps, {adapter(number).path for number in broken}
        self._loads: deque[tuple[float, LoadAdapter]] = deque()
        self._results: deque[StepResult] = deque()

    def step(self) -> None:
        """One step is planned, and one comes back."""
        scheduler = self.scheduler
        self.now += 1.0
        while self._loads and self._loads[0][0] <= self.now and not self.stuck:
            self._answer(self._loads.popleft()[1])
        for load in scheduler.features.messages(self.now):
            assert isinstance(load, LoadAdapter)
            in_flight = [
                one for step in scheduler.steps_in_flight for one in step.requests if one.params.adapter is not None
            ]
            assert load.slot < 0 or not any(one.adapter_slot == load.slot for one in in_flight), "a step uses that slot"
            self.asked.append(load)
            self._loads.append((self.now + self._load_steps, load))
        while scheduler.num_in_flight < 2 and (plan := scheduler.schedule(self.now)) is not None:
            self._check(plan)
            self._results.append(self.executor.execute(plan))
        for copied in self.executor.finish_copies():
            scheduler.copied(copied)
        if self._results:
            scheduler.update(self._results.popleft())

    def _answer(self, load: LoadAdapter) -> None:
        if load.epoch < self.scheduler.epoch:
            return  # sessions drop answers of an earlier epoch
        if load.adapter.path in self._broken:
            answer = AdapterLoaded(load.epoch, load.number, error="it is broken")
        else:
            self.slots[load.slot] = load.adapter.content
            answer = AdapterLoaded(load.epoch, load.number, 500_000)
        for one in self.scheduler.features.take(answer, self.now):
            self.failed.append(one)

    def _check(self, plan: StepPlan) -> None:
        for row in plan.left:
            self.rows.pop(row, None)
        for new in plan.joined:
            if new.adapter >= 0:
                self.rows[new.row] = new.adapter, self.slots[new.adapter]
        for slot, content in self.rows.values():
            assert self.slots[slot] == content, "an adapter was taken from rows that run"
        wanted = {
            sequence.row: None if sequence.request.params.adapter is None else sequence.request.params.adapter.content
            for sequence in self.scheduler.running
        }
        for row, content in wanted.items():
            assert content == (self.rows[row][1] if row in self.rows else None), (
                "a row has another adapter than it wants"
            )

    def reset(self) -> None:
        """The executor starts over under a new epoch."""
        epoch = self.scheduler.epoch + 1
        self.scheduler.fail(epoch, shrink_steps=False)
        self.executor.reset(epoch)
        self.slots.clear()
        self.rows.clear()
        self._results.clear()

    @property
    def is_busy(self) -> bool:
        """Whether anything runs or waits, or is on its way."""
        return bool(self.scheduler.requests or self.scheduler.num_in_flight or self.executor.copying)

    def run(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.is_busy:
                return
            self.step()
        raise AssertionError(f"{[one.request_id for one in self.scheduler.requests]} do not end")

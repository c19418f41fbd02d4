"""Who gets an adapter's slot, and when: on an executor that checks that each row has its own adapter in every step."""

from array import array
from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.adapter_scheduler import AdapterScheduler
from pagewise_shared.block_hash import adapter_salt
from pagewise_shared.protocol import Adapter, AdapterLoaded, LoadAdapter, StepPlan, StepResult
from pagewise_shared.sampling import SamplingParams

from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import executor_for, expected_tokens

GREEDY = SamplingParams(temperature=0.0)


def adapter(number: int) -> Adapter:
    return Adapter(f"adapter-{number}", f"/adapters/{number}", bytes([number]) * 32, 1000, 8)


def request(number: int, which: int | None, max_tokens: int = 4, arrival: float = 0.0, **more: object) -> Request:
    chosen = None if which is None else adapter(which)
    salt = None if chosen is None else adapter_salt(chosen.content, None)
    prompt = array("i", [7, 8, 9, *range(number % 5)])  # many share prefixes, and must not share KV
    fields = {"adapter": chosen, "cache_salt": salt, "arrival_time": arrival} | more
    return Request(f"r{number}", prompt, max_tokens, GREEDY, **fields)  # type: ignore[arg-type]


class Fleet:
    """One scheduler and one executor. Loads take ``load_steps`` steps; ``broken``: adapters that cannot be loaded."""

    def __init__(self, max_loras: int, load_steps: int = 2, num_blocks: int = 64, broken: Iterable[int] = ()) -> None:
        self.scheduler = AdapterScheduler(
            max_loras=max_loras, num_blocks=num_blocks, block_size=4, max_num_seqs=8, max_num_batched_tokens=32
        )
        self.executor: CheckingExecutor = executor_for(self.scheduler)
        self.slots: dict[int, bytes] = {}
        self.rows: dict[int, tuple[int, bytes]] = {}
        self.failed: list[Request] = []
        self.asked: list[LoadAdapter] = []
        self.now = 0.0
        self._load_steps, self._broken = load_steps, {adapter(number).content for number in broken}
        self._loads: deque[tuple[float, LoadAdapter]] = deque()
        self._results: deque[StepResult] = deque()
        self._contents: dict[int, bytes] = {}

    def step(self) -> None:
        """One step is planned, and one comes back."""
        scheduler = self.scheduler
        self.now += 1.0
        while self._loads and self._loads[0][0] <= self.now:
            self._answer(self._loads.popleft()[1])
        for load in scheduler.adapter_loads(self.now):
            in_flight = [one for step in scheduler.steps_in_flight for one in step.requests if one.adapter is not None]
            assert load.slot < 0 or not any(one.adapter_slot == load.slot for one in in_flight), "a step uses that slot"
            self.asked.append(load)
            self._loads.append((self.now + self._load_steps, load))
        while scheduler.num_in_flight < 2 and (plan := scheduler.schedule(self.now)) is not None:
            self._check(plan)
            self._results.append(self.executor.execute(plan))
        if self._results:
            scheduler.update(self._results.popleft())

    def _answer(self, load: LoadAdapter) -> None:
        if load.adapter.content in self._broken:
            answer = AdapterLoaded(load.epoch, load.number, error="it is broken")
        else:
            self.slots[load.slot] = load.adapter.content
            answer = AdapterLoaded(load.epoch, load.number, 500_000)
        for one in self.scheduler.adapter_loaded(answer, self.now):
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
            sequence.row: None if sequence.request.adapter is None else sequence.request.adapter.content
            for sequence in self.scheduler.running
        }
        for row, content in wanted.items():
            assert content == (self.rows[row][1] if row in self.rows else None), (
                "a row has another adapter than it wants"
            )

    def run(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.scheduler.requests and not self.scheduler.num_in_flight:
                return
            self.step()
        raise AssertionError(f"{[one.request_id for one in self.scheduler.requests]} do not end")


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(0, 6)), st.integers(1, 9)), min_size=1, max_size=40
)


@given(ARRIVALS, st.integers(1, 3), st.integers(14, 40), st.integers(0, 2**16))
def test_every_row_has_its_adapter_and_every_request_ends(
    arrivals: list[tuple[int, int | None, int]], max_loras: int, num_blocks: int, aborted: int
) -> None:
    fleet, requests = Fleet(max_loras, num_blocks=num_blocks), []
    for number, (pause, which, max_tokens) in enumerate(arrivals):
        for _ in range(pause):
            fleet.step()
        requests.append(request(number, which, max_tokens, fleet.now))
        fleet.scheduler.add(requests[-1])
        if aborted >> (number % 16) & 1 and number % 3 == 0:
            fleet.scheduler.abort(requests[number // 2].request_id)
    fleet.run()
    for one in requests:
        tokens = one.sequences[0].output_token_ids.tolist()
        assert one.sequences[0].finish_reason == "abort" or tokens == expected_tokens(one)
    assert fleet.scheduler.adapters.num_loads == len(fleet.asked)
    assert fleet.scheduler.num_waiting == fleet.scheduler.num_running == 0
    assert fleet.scheduler.kv.pool.num_in_use == 0


def test_32_adapters_share_four_slots() -> None:
    fleet = Fleet(4)
    requests = [request(number, number % 32, 6, arrival=number * 1e-3) for number in range(96)]
    for one in requests:
        fleet.scheduler.add(one)
    fleet.run()
    assert all(one.sequences[0].output_token_ids.tolist() == expected_tokens(one) for one in requests)
    adapters = fleet.scheduler.adapters
    assert (adapters.num_resident, adapters.num_loads - adapters.num_evictions) == (4, 4)
    assert adapters.num_loads >= 32


def test_an_adapter_that_is_always_asked_for_does_not_keep_its_slot() -> None:
    fleet = Fleet(1, load_steps=1)
    numbers = iter(range(10_000))
    late = request(9999, 1, 4, arrival=20.5)
    for step in range(200):
        fleet.scheduler.add(request(next(numbers), 0, 6, arrival=float(step)))
        if step == 20:
            fleet.scheduler.add(late)
        fleet.step()
        if late.finished:
            break
    assert late.finished, "it starves"
    assert step < 80
    fleet.run()


def test_who_has_no_adapter_waits_for_nobody() -> None:
    fleet = Fleet(1, load_steps=50)
    fleet.scheduler.add(request(0, 0))
    plain = request(1, None, arrival=1.0)
    fleet.scheduler.add(plain)
    for _ in range(12):
        fleet.step()
    assert plain.finished
    assert fleet.scheduler.num_waiting == 1
    fleet.run()


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_only() -> None:
    fleet = Fleet(2, broken=[1])
    requests = [request(number, number % 3) for number in range(9)]
    for one in requests:
        fleet.scheduler.add(one)
    fleet.run()
    assert {one.request_id for one in fleet.failed} == {"r1", "r4", "r7"}
    assert all(
        one.sequences[0].finish_reason == ("error" if number % 3 == 1 else "length")
        for number, one in enumerate(requests)
    )
    assert fleet.scheduler.adapters.num_load_errors == 1
    assert fleet.scheduler.adapters.num_resident == 2


def test_after_a_reset_adapters_are_loaded_again() -> None:
    fleet = Fleet(2)
    requests = [request(number, number % 3, 8) for number in range(6)]
    for one in requests:
        fleet.scheduler.add(one)
    for _ in range(6):
        fleet.step()
    before = len(fleet.asked)
    assert before
    fleet.scheduler.fail(2, blame_step=False)
    fleet.executor.reset(epoch=2)
    fleet.slots.clear()
    fleet.rows.clear()
    fleet._results.clear()
    fleet.run()
    assert len(fleet.asked) > before
    assert all(one.sequences[0].output_token_ids.tolist() == expected_tokens(one) for one in requests)


def test_a_better_priority_does_not_wait_for_what_has_not_begun() -> None:
    """The queue of an adapter that has its slot goes back behind a request that comes before it."""
    fleet = Fleet(1, load_steps=0)
    many = [request(number, 0, 20, arrival=number * 1e-3) for number in range(60)]
    for one in many:
        fleet.scheduler.add(one)
    for _ in range(12):
        fleet.step()
    urgent = request(100, 1, 4, arrival=1.0, priority=-1)
    fleet.scheduler.add(urgent)
    while not urgent.finished:
        fleet.step()
        assert fleet.now < 200
    assert sum(one.finished for one in many) < 30
    fleet.run()


def test_an_adapter_that_nobody_has_begun_to_use_gives_way_at_once() -> None:
    """Nothing runs, so nothing would come back that could be waited for."""
    fleet = Fleet(1, load_steps=0)
    fleet.scheduler.add(request(0, 0))
    fleet.run()
    fleet.now += 100
    first, urgent = request(1, 0, arrival=200.0), request(2, 1, arrival=201.0, priority=-1)
    fleet.scheduler.add(first)
    fleet.scheduler.add(urgent)
    fleet.step()
    assert fleet.asked[-1].adapter == adapter(1)
    fleet.run()
    assert first.finished
    assert urgent.finished


def test_a_request_that_never_fits_is_refused_before_its_adapter_is_loaded() -> None:
    fleet = Fleet(1)
    with pytest.raises(ValueError, match="needs more than"):
        fleet.scheduler.add(request(0, 0, 10_000))
    assert not fleet.scheduler.requests
    with pytest.raises(ValueError, match="serves none"):
        Fleet(0).scheduler.add(request(0, 0))


def test_loads_are_priced_by_what_they_took() -> None:
    fleet = Fleet(1)
    adapters = fleet.scheduler.adapters
    cold = adapters.seconds(adapter(0))
    fleet.scheduler.add(request(0, 0))
    assert adapters.seconds(adapter(0)) == pytest.approx(cold)
    fleet.run()
    assert adapters.seconds(adapter(0)) == 0.0
    assert adapters.seconds(adapter(1)) > cold  # the first one took half a second

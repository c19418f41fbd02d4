"""A key that has less than its share of the rows and blocks gets some soon, however much other keys run."""

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_scheduler.core.features import fair_shares
from pagewise_scheduler.core.features.fair_shares import FairShares
from pagewise_scheduler.core.requests.request import Preempted, Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.protocol import StepPlan, StepResult, encode
from pagewise_shared.sampling import BeamParams

from tests.core_requests import change
from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.driving import assert_all_free, executor_for, expected_tokens

REASON = "another key has less than its share"
PATIENCE, PROGRESS = fair_shares.PATIENCE_STEPS, fair_shares.LEAST_PROGRESS


class Driver:
    """Plans two steps ahead, and knows in which step each request had its first token."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.executor = executor_for(scheduler)
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.steps = 0
        self.all: list[Request] = []

    def send(self, key: str, prompt: int, max_tokens: int, *, n: int = 1, beams: int = 0, priority: int = 0) -> Request:
        request = create_request(prompt, max_tokens, n=n, priority=priority, arrival_time=float(len(self.all)))
        change(request, key=key)
        if beams:
            change(request, beam=BeamParams(width=beams))
        self.scheduler.add(request)
        self.all.append(request)
        return request

    def step(self) -> None:
        while self.scheduler.num_in_flight < 2 and (plan := self.scheduler.schedule(0.0)) is not None:
            self.plans.append(plan)
            self.results.append(self.executor.execute(plan))
        if self.results:
            self.scheduler.update(self.results.popleft())
            self.steps += 1

    def steps_until(self, done: Callable[[], bool], most: int = 5_000) -> int:
        began = self.steps
        for _ in range(most):
            if done():
                return self.steps - began
            self.step()
        raise AssertionError(f"not done after {most} steps")

    def wait_of(self, request: Request) -> int:
        """Steps until it has its first token."""
        return self.steps_until(lambda: bool(request.finished or request.sequences[0].output_token_ids))

    def end(self) -> None:
        self.steps_until(lambda: not self.scheduler.requests, most=20_000)
        while self.results:
            self.step()
        assert_all_free(self.scheduler)

    def preempted(self) -> list[Preempted]:
        """The preemptions for another key, of requests whose sequences are known."""
        found = (one for request in self.all for sequence in request.sequences for one in sequence.history)
        return [one for one in found if isinstance(one, Preempted) and one.reason == REASON]


def test_one_key_with_all_rows_leaves_one_to_another_within_a_few_steps() -> None:
    driver = Driver(create_scheduler(num_blocks=2000, max_num_seqs=8, max_num_batched_tokens=64))
    driver.send("all", 5, 400, n=8)
    driver.steps_until(lambda: driver.scheduler.num_running == 8)
    for _ in range(PROGRESS):
        driver.step()
    for number in range(5):
        request = driver.send("other", 6, 20)
        assert driver.wait_of(request) <= PATIENCE + 4
        assert len(driver.preempted()) == number + 1, "one row is enough"
        driver.steps_until(lambda request=request: request.finished)
    driver.end()


def test_one_key_with_all_blocks_leaves_some_to_another_within_a_few_steps() -> None:
    driver = Driver(create_scheduler(num_blocks=200, max_num_seqs=64, max_num_batched_tokens=128))
    for _ in range(40):
        driver.send("all", 5, 200)
    driver.steps_until(lambda: driver.scheduler.num_preemptions > 0)
    for _ in range(5):
        request = driver.send("other", 30, 20)
        assert driver.wait_of(request) <= 2 * PATIENCE + 4
        driver.steps_until(lambda request=request: request.finished)
        assert request.sequences[0].num_preemptions == 0, "what has less than its share does not give way"
    driver.end()


def test_beams_leave_rows_to_another_key() -> None:
    driver = Driver(create_scheduler(num_blocks=2000, max_num_seqs=8, max_num_batched_tokens=64))
    for _ in range(4):
        driver.send("all", 5, 40, n=6, beams=6)
    for _ in range(10):
        driver.step()
    request = driver.send("other", 6, 10)
    assert driver.wait_of(request) <= PATIENCE
    driver.end()


def test_an_urgent_key_keeps_its_rows() -> None:
    driver = Driver(create_scheduler(num_blocks=2000, max_num_seqs=4, max_num_batched_tokens=64))
    urgent = [driver.send("urgent", 5, 100, priority=-1) for _ in range(4)]
    for _ in range(PROGRESS + 2):
        driver.step()
    request = driver.send("other", 6, 10)
    driver.steps_until(lambda: any(one.finished for one in urgent))
    assert not request.sequences[0].output_token_ids
    assert driver.preempted() == []
    driver.end()


def test_who_asks_for_more_than_its_share_of_blocks_waits_for_others_to_end() -> None:
    driver = Driver(create_scheduler(num_blocks=100, max_num_seqs=8, max_num_batched_tokens=512))
    for _ in range(4):
        driver.send("all", 80, 16)
    driver.send("all", 5, 60)
    for _ in range(4):
        driver.step()
    driver.send("other", 240, 4)
    driver.end()
    assert driver.preempted() == []


work = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 120), st.integers(1, 6), st.integers(0, 12)),
    min_size=2,
    max_size=25,
)
"""Key, prompt, output, outputs, and steps before the next request."""


@settings(max_examples=30, deadline=None)
@given(work=work, rows=st.integers(1, 8), blocks=st.integers(46, 200), budget=st.integers(8, 64))
def test_all_end_with_their_tokens_and_little_is_dropped(
    work: list[tuple[int, int, int, int, int]], rows: int, blocks: int, budget: int
) -> None:
    driver = Driver(create_scheduler(num_blocks=blocks, max_num_seqs=rows, max_num_batched_tokens=budget))
    sequences = []
    for key, prompt, max_tokens, n, steps in work:
        request = driver.send(f"key {key}", prompt, max_tokens, n=n)
        sequences += request.sequences
        for _ in range(steps):
            driver.step()
    driver.end()
    assert all(list(one.output_token_ids) == expected_tokens(one.request) for one in sequences)
    dropped = driver.preempted()
    tokens = sum(one.freed for one in dropped) * driver.scheduler.kv.block_size
    # After the last time no pause needs to have passed; it may have been for as much as a key's share of the blocks.
    largest = blocks * driver.scheduler.kv.block_size
    assert tokens <= driver.steps * max(budget, rows) / PATIENCE + largest
    assert len(dropped) * PROGRESS <= sum(len(one.output_token_ids) for one in sequences)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(30, 300), min_size=4, max_size=30),
    rows=st.integers(2, 8),
    blocks=st.integers(100, 400),
    keys=st.integers(1, 3),
)
def test_nobody_starves(lengths: list[int], rows: int, blocks: int, keys: int) -> None:
    driver = Driver(create_scheduler(num_blocks=blocks, max_num_seqs=rows, max_num_batched_tokens=64))
    for length in lengths:
        driver.send("many", 5, length)
    for _ in range(PROGRESS + 4):
        driver.step()
    keys = min(keys, rows - 1)
    late = [driver.send(f"late {number}", 6, 10) for number in range(keys)]
    # Each waits for its turn, and until the sequences dropped for earlier ones are paid for; a row that is left, or a
    # sequence that has just come back, has to advance first.
    most = (keys + 1) * (2 * PATIENCE + PROGRESS) + PATIENCE * blocks * 4 // 64
    assert driver.steps_until(lambda: all(one.finished or one.sequences[0].output_token_ids for one in late)) <= most
    driver.end()


@settings(max_examples=20, deadline=None)
@given(work=work, rows=st.integers(1, 8), blocks=st.integers(46, 120))
def test_with_one_key_plans_are_what_they_were(
    work: list[tuple[int, int, int, int, int]], rows: int, blocks: int
) -> None:
    plans = []
    for shares in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            if not shares:
                patched.setattr(FairShares, "contended", False)
            driver = Driver(create_scheduler(num_blocks=blocks, max_num_seqs=rows))
            for number, (_, prompt, max_tokens, n, steps) in enumerate(work):
                tokens = [number * 100 + one for one in range(prompt)]
                request = create_request(tokens, max_tokens, n=n, arrival_time=float(number))
                driver.scheduler.add(request)
                for _ in range(steps):
                    driver.step()
            driver.end()
            plans.append([encode(plan) for plan in driver.plans])
    assert plans[0] == plans[1]

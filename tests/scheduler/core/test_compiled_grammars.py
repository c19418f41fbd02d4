"""Sequences start when the executor has compiled their grammars, and no other request waits for that."""

import random
from collections import OrderedDict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.core.features.registry import FeatureOptions
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.protocol import CompileGrammar, GrammarCompiled, StepPlan, StepResult
from pagewise_shared.protocol.limits import MAX_COMPILED_CHARACTERS
from pagewise_shared.sampling import SamplingParams

from tests.core_requests import make_request
from tests.scheduler.core.driving import assert_all_free, executor_for, expected_tokens


def request(number: int, grammar: str = "", max_tokens: int = 4, prompt: int = 5, **more: object) -> Request:
    params = SamplingParams(temperature=0.0, grammar=grammar)
    tokens = range(number * 7, number * 7 + prompt)
    return make_request(f"r{number}", tokens, max_tokens, params, **({"arrival_time": float(number)} | more))


class Fleet:
    """One scheduler and one executor, which keeps ``kept`` grammars. Its messages arrive later than they are sent, and
    compiling a grammar takes ``patience`` of it steps."""

    def __init__(self, kept: int, num_blocks: int = 64, max_num_seqs: int = 8, seed: int | None = None) -> None:
        self.scheduler = Scheduler(
            features=FeatureOptions(max_grammars=kept),
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=32,
        )
        self.executor = executor_for(self.scheduler)
        self.asked: list[str] = []
        self._kept = kept
        self._rng = None if seed is None else random.Random(seed)
        self._sent: deque[CompileGrammar] = deque()
        self._compiling: list[tuple[int, CompileGrammar]] = []
        self._there: OrderedDict[str, None] = OrderedDict()
        self._results: deque[StepResult] = deque()
        self._now = 0

    def step(self, *, answers: bool = True) -> StepPlan | None:
        """One step is planned, and one comes back; returns the last plan."""
        self._now += 1
        while self._sent and (self._rng is None or self._rng.random() < 0.7):
            question = self._sent.popleft()
            self._use(question.grammar)
            self._compiling.append((self._now + (self._rng.randrange(5) if self._rng else 0), question))
        for done in [one for one in self._compiling if one[0] <= self._now] if answers else ():
            self._compiling.remove(done)
            self.scheduler.features.take(GrammarCompiled(self.scheduler.epoch, done[1].number), 0.0)
        plan = None
        while self.scheduler.num_in_flight < 2 and (planned := self.scheduler.schedule(float(self._now))) is not None:
            plan = planned
            for new in plan.joined:
                if grammar := new.sampling.grammar:
                    assert grammar in self._there, "a step waits for a grammar"
                    self._use(grammar)
            self._results.append(self.executor.execute(plan))
        for question in self.scheduler.features.messages(0.0):
            assert isinstance(question, CompileGrammar)
            self.asked.append(question.grammar)
            self._sent.append(question)
        if self._results:
            self.scheduler.update(self._results.popleft())
        return plan

    def _use(self, grammar: str) -> None:
        self._there[grammar] = None
        self._there.move_to_end(grammar)
        while len(self._there) > self._kept:
            self._there.popitem(last=False)

    def run(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.scheduler.requests and not self.scheduler.num_in_flight:
                return
            self.step()
        raise AssertionError(f"{[one.request_id for one in self.scheduler.requests]} do not end")


def tokens_of(one: Request) -> list[list[int]]:
    return [sequence.output_token_ids.tolist() for sequence in one.sequences]


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    fleet = Fleet(8)
    slow, plain = request(0, "slow"), request(1, max_tokens=9)
    fleet.scheduler.add(slow)
    fleet.scheduler.add(plain)
    for _ in range(14):
        fleet.step(answers=False)
    assert tokens_of(plain) == [expected_tokens(plain)]
    assert tokens_of(slow) == [[]]
    assert fleet.asked == ["slow"]
    fleet.run()
    assert tokens_of(slow) == [expected_tokens(slow)]
    assert_all_free(fleet.scheduler)


def test_who_is_next_is_not_passed_over_more_often_because_of_its_grammar() -> None:
    fleet = Fleet(8)
    slow = request(0, "slow")
    fleet.scheduler.add(slow)
    for number in range(1, 60):
        fleet.scheduler.add(request(number, max_tokens=1))
    for _ in range(60):
        fleet.step(answers=False)
    assert slow.sequences[0].num_passed == 0
    assert [one.request_id for one in fleet.scheduler.requests] == ["r0"]
    fleet.run()
    assert tokens_of(slow) == [expected_tokens(slow)]


def test_a_grammar_is_asked_for_once_for_all_who_have_it() -> None:
    fleet = Fleet(8)
    requests = [request(number, "shared", n=2) for number in range(5)]
    for one in requests:
        fleet.scheduler.add(one)
    fleet.run()
    assert fleet.asked == ["shared"]
    assert all(tokens_of(one) == [expected_tokens(one)] * 2 for one in requests)


def test_executors_that_do_not_compile_ahead_are_not_asked() -> None:
    scheduler = Scheduler(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
    scheduler.add(request(0, "any"))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.joined
    assert scheduler.features.messages(0.0) == []


def test_a_request_may_end_while_it_waits() -> None:
    fleet = Fleet(8)
    gone, other = request(0, "gone"), request(1, "other")
    fleet.scheduler.add(gone)
    fleet.scheduler.add(other)
    fleet.step(answers=False)
    fleet.scheduler.abort("r0")
    fleet.run()
    assert tokens_of(gone) == [[]]
    assert tokens_of(other) == [expected_tokens(other)]


def test_a_reset_asks_anew() -> None:
    fleet = Fleet(8)
    one = request(0, "grammar")
    fleet.scheduler.add(one)
    fleet.step(answers=False)
    fleet.scheduler.fail(2)
    fleet.executor.reset(2)
    fleet.run()
    assert fleet.asked == ["grammar"] * 2
    assert tokens_of(one) == [expected_tokens(one)]


ARRIVALS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=40)


@given(ARRIVALS, st.sampled_from([2, 4, 8, 40]), st.integers(10, 40), st.integers(0, 2**16))
def test_no_step_waits_and_every_request_ends(
    arrivals: list[tuple[int, int, int]], kept: int, num_blocks: int, seed: int
) -> None:
    """With small pools, in which sequences are preempted, and few grammars that are kept."""
    fleet, requests = Fleet(kept, num_blocks, 4, seed), []
    for number, (which, max_tokens, prompt) in enumerate(arrivals):
        requests.append(one := request(number, f"grammar {which}" if which else "", max_tokens, prompt + 1))
        fleet.scheduler.add(one)
        if number % 3 == 0:
            fleet.step()
    fleet.run()
    assert all(tokens_of(one) == [expected_tokens(one)] for one in requests)
    assert_all_free(fleet.scheduler)


@pytest.mark.parametrize(("length", "kept"), [(10, 20), (MAX_COMPILED_CHARACTERS // 8, 4)])
def test_half_of_what_an_executor_keeps_is_taken_to_be_there(length: int, kept: int) -> None:
    """By their number, or by the characters that they have together."""
    fleet = Fleet(40)
    grammars = fleet.scheduler.features.grammars
    sequences = []
    for number in range(kept + 1):
        one = request(number, f"{number}".rjust(length))
        one.create_sequences()
        sequences += one.sequences
    for sequence in sequences[:kept]:
        assert not grammars.may_start(sequence)
        for question in grammars.messages(0.0):
            assert isinstance(question, CompileGrammar)
            grammars.take(GrammarCompiled(1, question.number), 0.0)
        assert grammars.may_start(sequence)
    assert all(grammars.may_start(sequence) for sequence in sequences[:kept])
    grammars.joined(sequences[0])
    assert not grammars.may_start(sequences[kept])
    assert grammars.may_start(sequences[0])
    assert not grammars.may_start(sequences[1])
    grammars.take(GrammarCompiled(1, 12345), 0.0)  # it answers no question

"""The number of threads of a step: the faster one at present, or one if more gain little."""

from collections.abc import Callable, Iterator

import pytest
import torch
from pagewise_executor.step_threads import StepThreads

THREADS = 3


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Machine:
    """Steps take ``seconds`` of their tokens and threads."""

    def __init__(self, seconds: Callable[[int, int], float], most: int = THREADS) -> None:
        self.now, self.seconds = 0.0, seconds
        torch.set_num_threads(most)
        self.threads = StepThreads(most, lambda: self.now)

    def run(self, tokens: int, steps: int = 100) -> list[int]:
        """Run steps of so many tokens; return how many threads each had."""
        had = []
        for _ in range(steps):
            with self.threads.step(tokens):
                had.append(torch.get_num_threads())
                self.now += self.seconds(tokens, had[-1])
        return had


def usual(had: list[int]) -> int:
    """The number of threads of most steps; some were trials of the other number."""
    return max(set(had), key=had.count)


def test_small_steps_are_computed_by_one_thread_where_more_gain_little() -> None:
    machine = Machine(lambda tokens, threads: 32 + tokens / threads)  # one thread: 1.04 times as long with 2 tokens
    machine.run(2)
    machine.run(40)
    assert usual(machine.run(2)) == 1
    assert usual(machine.run(40)) == THREADS


def test_what_is_usual_changes_with_the_machine() -> None:
    machine = Machine(lambda tokens, threads: 10 / threads)
    machine.run(8, 1000)
    assert usual(machine.run(8)) == THREADS
    machine.seconds = lambda tokens, threads: 10.0 * threads  # another process has taken the other cores
    machine.run(8, 1000)
    assert usual(machine.run(8)) == 1
    machine.seconds = lambda tokens, threads: 10 / threads
    machine.run(8, 1000)
    assert usual(machine.run(8)) == THREADS


def test_a_choice_that_is_wrong_now_changes_soon() -> None:
    machine = Machine(lambda tokens, threads: 10.0)
    assert usual(machine.run(8, 1000)) == 1
    machine.seconds = lambda tokens, threads: 10 / threads
    assert usual(machine.run(8, 64 + 40)[-10:]) == THREADS


def test_trials_are_rare() -> None:
    machine = Machine(lambda tokens, threads: 10 / threads)
    machine.run(8)
    assert machine.run(8, 650).count(1) == 10


def test_steps_that_something_else_has_slowed_down_change_nothing() -> None:
    machine = Machine(lambda tokens, threads: 10.0)
    machine.run(4)
    disturbed = iter(range(10_000))
    machine.seconds = lambda tokens, threads: 1000.0 if next(disturbed) % 7 == 0 else 10.0
    assert usual(machine.run(4, 1000)) == 1


def test_only_steps_of_the_same_size_are_compared() -> None:
    machine = Machine(lambda tokens, threads: tokens / threads)
    for _ in range(200):
        for tokens in (5, 6, 7):  # in turns, so a trial step has no equal beside it
            machine.run(tokens, 1)
    assert usual(machine.run(5, 3)) == THREADS


def test_prompts_between_small_steps_have_all_threads() -> None:
    machine = Machine(lambda tokens, threads: 30 + tokens * tokens / threads)
    assert usual(machine.run(1)) == 1
    assert [machine.run(60, 1) + machine.run(1, 20) for _ in range(20)].count([THREADS, *[1] * 20]) >= 10
    assert {machine.run(60, 1)[0] for _ in range(50) if machine.run(1, 1)} == {THREADS}


def test_large_steps_have_all_threads() -> None:
    machine = Machine(lambda tokens, threads: 10.0)
    assert set(machine.run(65, 300)) == {THREADS}


def test_what_follows_a_step_has_all_threads() -> None:
    machine = Machine(lambda tokens, threads: 10.0)
    assert usual(machine.run(2)) == 1
    assert torch.get_num_threads() == THREADS
    had: list[int] = []

    def fail() -> None:
        with machine.threads.step(2):
            had.append(torch.get_num_threads())
            raise RuntimeError("a step fails")

    for _ in range(3):
        with pytest.raises(RuntimeError):
            fail()
        assert torch.get_num_threads() == THREADS
    assert 1 in had


def test_one_thread_stays_one() -> None:
    machine = Machine(lambda tokens, threads: 10.0, most=1)
    assert set(machine.run(1)) == {1}

"""Costs that are fitted to times of steps and copies: to exact times, disturbed ones, and nonsensical ones."""

import itertools
import logging
import random
from collections.abc import Callable

import pytest
from pagewise_executor import profile
from pagewise_executor.profile import GPU_SIZES, measure_copies, measure_steps
from pagewise_shared import progress

STEP, TOKEN, ATTENTION, CONTEXT = 900.0, 40.0, 0.02, 0.5
LARGEST, ROOM = 2048, 8192


def exact(start: int, count: int) -> float:
    """A step with exactly these costs."""
    return STEP + TOKEN * count + start * CONTEXT + ATTENTION * count * (start + count / 2)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_MOST_SECONDS", 0.2)


def test_costs_are_found_again(caplog: pytest.LogCaptureFixture) -> None:
    assert measure_steps(exact, LARGEST, ROOM) == pytest.approx((STEP, TOKEN, ATTENTION, CONTEXT))
    assert measure_copies(lambda count: 30.0 + 7.0 * count, 64, "load") == pytest.approx((30.0, 7.0))
    assert not caplog.text


@pytest.mark.parametrize("seed", range(5))
def test_runs_that_were_disturbed_do_not_count(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)

    def disturbed(time: float) -> float:
        return time * rng.choice([1.0, 1.0, 1.01, rng.uniform(1.5, 20.0)])

    found = measure_steps(lambda start, count: disturbed(exact(start, count)), LARGEST, ROOM)
    assert found == pytest.approx((STEP, TOKEN, ATTENTION, CONTEXT), rel=0.15, abs=0.05)
    setup, block = measure_copies(lambda count: disturbed(1000.0 + 700.0 * count), 64, "store")
    assert setup == pytest.approx(1000.0, rel=0.2)
    assert block == pytest.approx(700.0, rel=0.05)
    assert not caplog.text


@pytest.mark.parametrize(
    "slower",
    [
        lambda start, count: 16.0 if count == 16 else 1.0,  # as if a token cost less than nothing
        lambda start, count: 10.0 if count == 256 else 1.0,  # as if a step did
        lambda start, count: 1.0 if start else 10.0,  # as if a context saved time
    ],
)
def test_it_measures_again_when_what_it_sees_makes_no_sense(
    slower: Callable[[int, int], float], caplog: pytest.LogCaptureFixture
) -> None:
    calls = itertools.count()

    def timer(start: int, count: int) -> float:
        disturbed = next(calls) < 16  # all runs of the first turn
        return exact(start, count) * (slower(start, count) if disturbed else 1.0)

    found = measure_steps(timer, LARGEST, ROOM)
    assert found == pytest.approx((STEP, TOKEN, ATTENTION, CONTEXT))
    assert next(calls) > 16
    assert not caplog.text


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda start, count: 10_000.0 - 10 * count,
        lambda start, count: count**2.0,
        lambda start, count: 5_000.0,
        lambda start, count: exact(0, count) * (0.5 if start else 1.0),
    ],
)
def test_what_stays_nonsense_is_bounded_and_said(
    nonsense: Callable[[int, int], float], caplog: pytest.LogCaptureFixture
) -> None:
    costs = measure_steps(nonsense, LARGEST, ROOM)
    assert costs.token > 0
    assert min(costs) >= 0
    assert "the measured costs of steps are not to be trusted" in caplog.text


def test_long_runs_that_are_always_disturbed_do_not_spoil_the_costs(caplog: pytest.LogCaptureFixture) -> None:
    step, token, *_ = measure_steps(
        lambda start, count: exact(start, count) * (20 if count == 256 else 1), LARGEST, ROOM
    )
    assert STEP / 2 < step <= STEP + TOKEN
    assert TOKEN <= token <= exact(0, 16) / 16
    assert "the measured costs of steps are not to be trusted" in caplog.text


def test_a_device_whose_chunks_take_equally_long_has_steps_that_cost(caplog: pytest.LogCaptureFixture) -> None:
    costs = measure_steps(lambda start, count: 5_000.0 + 0.001 * count, LARGEST, ROOM)
    assert costs.step == pytest.approx(5_000, rel=0.05)
    assert 256 * costs.token < 0.05 * costs.step


def test_copies_that_take_no_time_are_bounded_and_said(caplog: pytest.LogCaptureFixture) -> None:
    assert measure_copies(lambda count: 640.0, 64, "load") == (0.0, 10.0)
    assert (
        "the measured costs of copies (load) are not to be trusted (64 blocks take no longer than one)" in caplog.text
    )


def test_runs_that_take_long_are_told_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    measure_steps(exact, LARGEST, ROOM)
    assert not caplog.messages, "what is done soon is not mentioned"
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    measure_steps(exact, LARGEST, ROOM)
    assert "measuring steps: 6 of 6 runs (100%)" in caplog.messages
    assert "measuring steps: 15 of 15 runs (100%)" in caplog.messages


def test_a_slow_machine_is_profiled_by_small_steps() -> None:
    sizes = []

    def slow(start: int, count: int) -> float:
        sizes.append(count)
        return 1e6 * count

    assert measure_steps(slow, LARGEST, ROOM) == (0.0, 1e6, 0.0, 0.0)
    assert max(sizes) == 16


def test_a_short_pool_is_profiled_without_context(caplog: pytest.LogCaptureFixture) -> None:
    found = measure_steps(exact, 128, 128)
    assert (found.attention, found.context) == (0.0, 0.0)
    assert [found.step + found.token * count for count in (16, 128)] == pytest.approx([exact(0, 16), exact(0, 128)])
    assert measure_steps(exact, 1, 1) == (0.0, exact(0, 1), 0.0, 0.0)
    assert not caplog.text


@pytest.mark.parametrize(("largest", "room"), [(8192, 131_072), (8192, 8192), (2048, 8192)])
def test_tokens_on_a_gpu_cost_something_though_small_steps_only_cost_launches(largest: int, room: int) -> None:
    """Up to 400 tokens the device waits for the host: 16 and 256 tokens would take equally long."""
    launches = 15_000.0

    def on_gpu(start: int, count: int) -> float:
        return max(launches, 2_000.0 + 33.0 * count + 1e-3 * count * (start + count / 2))

    costs = measure_steps(on_gpu, largest, room, GPU_SIZES)
    assert costs.token == pytest.approx(33.0, rel=0.05)
    assert costs.step == pytest.approx(2_000.0, rel=0.1)
    assert costs.attention == pytest.approx(1e-3, rel=0.05)

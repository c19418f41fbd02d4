"""How much may wait, the answers to refused clients, and the order in which waiting requests start."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.core.requests.waiting_queue import QueueLoad
from pagewise_scheduler.server.request_limits import AdmissionError, Backlog

from tests.scheduler.server.played_gateway import PlayedRequest, RefusedRequestError
from tests.scheduler.server.stack import Stack, executor, running, until


def refused(backlog: Backlog, new: QueueLoad, waiting: QueueLoad, now: float) -> AdmissionError:
    """The error for the only key."""
    with pytest.raises(AdmissionError) as error:
        backlog.admit(new, waiting, now, of_key=waiting)
    return error.value


def drained(rate: int, seconds: int, waiting: int = 100) -> Backlog:
    """A backlog of at most 100 sequences that stays full while ``rate`` of them go every second."""
    backlog = Backlog(100, 10_000)
    backlog.admit(QueueLoad(waiting, 10 * waiting), QueueLoad(), 0.0)
    backlog.observe(QueueLoad(waiting, 10 * waiting), 0.0)
    for second in range(1, seconds + 1):
        backlog.admit(QueueLoad(rate, 10 * rate), QueueLoad(waiting - rate, 10 * (waiting - rate)), second)
        backlog.observe(QueueLoad(waiting, 10 * waiting), second)
    return backlog


@pytest.mark.parametrize(("rate", "seconds"), [(1, 10), (5, 2), (50, 1)])
def test_retry_after_follows_the_measured_rate(rate: int, seconds: int) -> None:
    error = refused(drained(rate, 30), QueueLoad(10, 100), QueueLoad(100, 1000), 30.05)
    assert (error.kind, error.reason, error.retry_after) == ("overloaded", "max_waiting", seconds)


def test_many_that_are_refused_are_told_different_times() -> None:
    backlog = drained(5, 30)
    told = [refused(backlog, QueueLoad(10, 100), QueueLoad(100, 1000), 30.05).retry_after for _ in range(4)]
    assert told == [2, 4, 6, 8]
    told = [refused(backlog, QueueLoad(10, 100), QueueLoad(100, 1000), 30.05).retry_after for _ in range(1000)]
    assert told[-1] == 120
    for second in range(31, 31 + 120):
        backlog.admit(QueueLoad(5, 50), QueueLoad(95, 950), second)
        backlog.observe(QueueLoad(100, 1000), second)
    assert refused(backlog, QueueLoad(10, 100), QueueLoad(100, 1000), 150.05).retry_after == 2


def test_nothing_is_known_at_first_and_a_queue_that_stands_still_is_told() -> None:
    assert refused(Backlog(4, 100), QueueLoad(3, 3), QueueLoad(2, 2), 0.0).retry_after == 2
    backlog = Backlog(4, 100)
    backlog.admit(QueueLoad(4, 4), QueueLoad(), 0.0)
    for second in range(60):
        backlog.observe(QueueLoad(4, 4), second)
    assert refused(backlog, QueueLoad(1, 1), QueueLoad(4, 4), 60.0).retry_after == 120


def test_more_sequences_than_may_ever_wait_are_not_told_to_try_again() -> None:
    error = refused(Backlog(4, 100), QueueLoad(5, 5), QueueLoad(), 0.0)
    assert (error.kind, error.retry_after) == ("invalid", 0)
    assert "5 outputs" in str(error)
    assert "--max-waiting" in str(error)
    Backlog(4, 100).admit(QueueLoad(4, 500), QueueLoad(), 0.0)


def test_tokens_are_bounded_but_a_large_request_may_wait_alone() -> None:
    backlog = Backlog(100, 1000)
    backlog.admit(QueueLoad(1, 5000), QueueLoad(), 0.0)
    assert refused(backlog, QueueLoad(1, 10), QueueLoad(1, 5000), 0.0).reason == "max_waiting_tokens"
    backlog.admit(QueueLoad(1, 10), QueueLoad(1, 900), 0.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(1, 300)), max_size=200))
def test_no_key_takes_the_room_of_the_others(arrivals: list[tuple[str, int, int]]) -> None:
    """With any arrivals that never end: a key that has nothing waiting finds room for a request of usual size."""
    backlog = Backlog(100, 10_000)
    backlog.admit(QueueLoad(1, 1), QueueLoad(), 0.0, key="d")
    total, of_key = QueueLoad(), dict.fromkeys("abc", QueueLoad())
    for key, sequences, tokens in arrivals:
        new = QueueLoad(sequences, tokens)
        with suppress(AdmissionError):
            backlog.admit(new, total, 0.0, key=key, of_key=of_key[key])
            total, of_key[key] = total.plus(new), of_key[key].plus(new)
    backlog.admit(QueueLoad(4, 300), total, 0.0, key="d")


@given(st.integers(1, 400), st.integers(1, 40_000))
def test_a_request_as_large_as_the_queue_leaves_each_other_key_its_part(sequences: int, tokens: int) -> None:
    backlog = Backlog(160, 16_000)
    backlog.admit(QueueLoad(1, 1), QueueLoad(), 0.0, key="d")
    total = QueueLoad()
    with suppress(AdmissionError):
        backlog.admit(QueueLoad(sequences, tokens), total, 0.0, key="abuser")
        total = QueueLoad(sequences, tokens)
    for key in "bcd":
        for number in range(5):
            backlog.admit(QueueLoad(2, 200), total, 0.0, key=key, of_key=QueueLoad(2 * number, 200 * number))
            total = total.plus(QueueLoad(2, 200))


def test_the_parts_of_very_many_keys_have_a_bound_too() -> None:
    backlog, total = Backlog(160, 16_000), QueueLoad()
    for number in range(1000):
        with suppress(AdmissionError):
            backlog.admit(QueueLoad(10, 10), total, 0.0, key=str(number))
            total = total.plus(QueueLoad(10, 10))
    assert 320 <= total.sequences <= 330


def test_what_comes_again_after_a_restart_leaves_each_other_key_its_part() -> None:
    backlog = Backlog(64, 6400)
    backlog.count(QueueLoad(100, 6400))
    backlog.admit(QueueLoad(4, 400), QueueLoad(100, 6400), 0.0, key="another")
    with pytest.raises(AdmissionError, match="100 sequences are waiting"):
        backlog.admit(QueueLoad(5, 100), QueueLoad(100, 6400), 0.0, key="a third")


def test_a_sole_key_may_fill_the_queue() -> None:
    backlog = Backlog(4, 100)
    for number in range(4):
        backlog.admit(QueueLoad(1, 1), QueueLoad(number, number), 0.0, key="default", of_key=QueueLoad(number, number))
    assert refused(backlog, QueueLoad(1, 1), QueueLoad(4, 4), 0.0).reason == "max_waiting"


async def finished_in_order(stack: Stack, requests: list[PlayedRequest]) -> list[str]:
    """The ids of these requests, of one output each, in the order in which the scheduler has reported their ends."""
    async with asyncio.timeout(30):
        for request in requests:
            await request.result()
    names = {request.stream: request.submit.request_id for request in requests}
    endings = [ending.stream for frame in stack.gateway.frames for ending in frame.finished]
    return [names[stream] for stream in endings if stream in names]


async def test_a_burst_in_one_round_is_bounded(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        requests = [await stack.gateway.submit([number, 1, 2]) for number in range(20)]
        await until(lambda: all(request.error or request.started for request in requests))
        errors = [request.error for request in requests if isinstance(request.error, RefusedRequestError)]
        assert {error.kind for error in errors} == {"overloaded"}
        # Four run at a time: between eight and twelve have come in, by how many have begun before the last came.
        assert 8 <= len(errors) <= 12
        for request in requests:
            if request.error is None:
                await request.result()
        assert stack.router.waiting == QueueLoad()
        request = await stack.gateway.submit([1] * 200, max_tokens=1)
        await request.result()
        assert stack.metric("requests_refused_total", reason="max_waiting") == len(errors)


async def test_a_request_is_taken_as_a_whole_or_refused_as_a_whole(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        request = await stack.gateway.submit(*([number] for number in range(5)), n=2)
        with pytest.raises(RefusedRequestError, match="asks for 10 outputs") as error:
            await request.result()
        assert error.value.kind == "never_fits"
        before = await stack.gateway.submit(*([number] for number in range(8)), max_tokens=50)  # four of them wait
        request = await stack.gateway.submit(*([number] for number in range(5)))
        with pytest.raises(RefusedRequestError, match="waiting already"):
            await request.result()
        await before.result()
        assert stack.router.waiting == QueueLoad()
        request = await stack.gateway.submit([1], [1] * 5, [2], [3] * 9000)
        with pytest.raises(RefusedRequestError, match="the request may reach 9008 tokens") as error:
            await request.result()
        assert error.value.kind == "never_fits"
        await stack.all_free()
        request = await stack.gateway.submit([1], [2], [1], n=2)
        outputs = await request.result()
        assert outputs[0] == outputs[4]
        assert outputs[0] != outputs[2]
        assert [len(tokens) for tokens in outputs] == [8] * 6


async def test_a_key_that_floods_leaves_room_for_others(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        running_now = [await stack.gateway.submit([number], max_tokens=50, key="bob") for number in range(4)]
        handle = stack.executors[0]
        await until(lambda: handle.scheduler.num_running == 4)
        floods = [await stack.gateway.submit([number, 1, 2], max_tokens=4, key="alice") for number in range(8)]
        await until(lambda: sum(request.error is not None for request in floods) == 4)
        errors = [request.error for request in floods if isinstance(request.error, RefusedRequestError)]
        assert stack.metric("requests_refused_total", reason="max_waiting_share") == len(errors) == 4
        assert all(error.kind == "overloaded" and error.retry_after for error in errors)
        assert len(handle.scheduler.waiting) == 4
        last = await stack.gateway.submit([7, 8, 9], max_tokens=4, key="bob")
        for request in running_now:
            await stack.gateway.abort(request)
        for request in [*(request for request in floods if request.error is None), last]:
            assert len((await request.result())[0]) == 4
        assert stack.router.waiting == QueueLoad()
        assert handle.scheduler.waiting.account("alice").num_prompt_tokens == 0


async def test_priorities_at_the_router_and_at_the_engine(tmp_path: Path) -> None:
    async def requests(stack: Stack, name: str) -> list[PlayedRequest]:
        return [
            await stack.gateway.submit(
                [priority + 3] * 30, max_tokens=20, priority=priority, request_id=f"{name}{priority}"
            )
            for priority in (3, 1, 2, 0)
        ]

    wanted = ["0", "1", "2", "3"]
    async with running(tmp_path) as stack:
        async with executor(tmp_path, step_seconds=0.002):
            await stack.ready(1)
            # Four run at a time, and when they end the others are all there; the budget of a step is 64 tokens: at most
            # two prefills begin in one.
            fillers = [await stack.gateway.submit([9, number], max_tokens=60) for number in range(4)]
            await until(lambda: stack.executors[0].scheduler.num_running == 4)
            waiting = asyncio.create_task(finished_in_order(stack, await requests(stack, "engine")))
            await until(lambda: stack.router.waiting.sequences == 4)
            assert not any(filler.done for filler in fillers)
            order = await waiting
            assert order == ["engine" + name for name in wanted]
        await stack.ready(0)
        waiting = asyncio.create_task(finished_in_order(stack, await requests(stack, "router")))
        await until(lambda: stack.router.waiting.sequences == 4)
        async with executor(tmp_path, "other", step_seconds=0.002):
            assert await waiting == ["router" + name for name in wanted]

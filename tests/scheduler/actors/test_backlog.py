"""How much may wait, what those are told that may not, and in which order the others go."""

import asyncio
import json
import socket
from array import array
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_executor.simulated import SimulatedRunner
from pagewise_scheduler.actors.backlog import Backlog, Load
from pagewise_scheduler.actors.live_request import LiveRequest
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.generation import AdmissionError, GenerationRequest, SlowReaderError
from pagewise_scheduler.http import create_app, listening
from pagewise_shared.config import ExecutorConfig, SchedulerConfig
from pagewise_shared.sampling import SamplingParams

from tests.scheduler.actors.test_fleet import TOKENIZER, Stack, executor, running


def refused(backlog: Backlog, new: Load, waiting: Load, now: float) -> AdmissionError:
    with pytest.raises(AdmissionError) as error:
        backlog.admit(new, waiting, now)
    return error.value


def drained(rate: int, seconds: int, waiting: int = 100) -> Backlog:
    """A backlog of at most 100 sequences that stays full while ``rate`` of them go every second."""
    backlog = Backlog(100, 10_000)
    backlog.admit(Load(waiting, 10 * waiting), Load(), 0.0)
    backlog.observe(Load(waiting, 10 * waiting), 0.0)
    for second in range(1, seconds + 1):
        backlog.admit(Load(rate, 10 * rate), Load(waiting - rate, 10 * (waiting - rate)), second)
        backlog.observe(Load(waiting, 10 * waiting), second)
    return backlog


@pytest.mark.parametrize(("rate", "seconds"), [(1, 10), (5, 2), (50, 1)])
def test_retry_after_follows_the_measured_rate(rate: int, seconds: int) -> None:
    error = refused(drained(rate, 30), Load(10, 100), Load(100, 1000), 30.05)
    assert (error.kind, error.reason, error.retry_after) == ("overloaded", "max_waiting", seconds)


def test_many_that_are_refused_are_told_different_times() -> None:
    backlog = drained(5, 30)
    told = [refused(backlog, Load(10, 100), Load(100, 1000), 30.05).retry_after for _ in range(4)]
    assert told == [2, 4, 6, 8]
    told = [refused(backlog, Load(10, 100), Load(100, 1000), 30.05).retry_after for _ in range(1000)]
    assert told[-1] == 120
    for second in range(31, 31 + 120):
        backlog.admit(Load(5, 50), Load(95, 950), second)
        backlog.observe(Load(100, 1000), second)
    assert refused(backlog, Load(10, 100), Load(100, 1000), 150.05).retry_after == 2


def test_nothing_is_known_at_first_and_a_queue_that_stands_still_is_told() -> None:
    assert refused(Backlog(4, 100), Load(5, 5), Load(), 0.0).retry_after == 2
    backlog = Backlog(4, 100)
    backlog.admit(Load(4, 4), Load(), 0.0)
    for second in range(60):
        backlog.observe(Load(4, 4), second)
    assert refused(backlog, Load(1, 1), Load(4, 4), 60.0).retry_after == 120


def test_tokens_are_bounded_but_a_large_request_may_wait_alone() -> None:
    backlog = Backlog(100, 1000)
    backlog.admit(Load(1, 5000), Load(), 0.0)
    assert refused(backlog, Load(1, 10), Load(1, 5000), 0.0).reason == "max_waiting_tokens"
    backlog.admit(Load(1, 10), Load(1, 900), 0.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(1, 300)), max_size=200))
def test_no_key_takes_the_room_of_the_others(arrivals: list[tuple[str, int, int]]) -> None:
    """Whatever comes in and never goes: a key that has nothing waiting finds room for a request of usual size."""
    backlog = Backlog(100, 10_000)
    backlog.admit(Load(1, 1), Load(), 0.0, key="d")
    total, of_key = Load(), dict.fromkeys("abc", Load())
    for key, sequences, tokens in arrivals:
        new = Load(sequences, tokens)
        with suppress(AdmissionError):
            backlog.admit(new, total, 0.0, key=key, of_key=of_key[key])
            total, of_key[key] = total.plus(new), of_key[key].plus(new)
    backlog.admit(Load(4, 300), total, 0.0, key="d")


def test_a_sole_key_may_fill_the_queue() -> None:
    backlog = Backlog(4, 100)
    for number in range(4):
        backlog.admit(Load(1, 1), Load(number, number), 0.0, key="default", of_key=Load(number, number))
    assert refused(backlog, Load(1, 1), Load(4, 4), 0.0).reason == "max_waiting"


def generation(
    name: str, prompt: list[int], max_tokens: int = 4, priority: int = 0, key: str = ""
) -> GenerationRequest:
    tokens, sampling = array("i", prompt), SamplingParams(temperature=0)
    return GenerationRequest(name, tokens, max_tokens, sampling, priority=priority, arrival_time=monotonic(), key=key)


async def finished_in_order(stack: Stack, requests: list[GenerationRequest]) -> list[str]:
    order: list[str] = []

    async def read(request: GenerationRequest) -> None:
        async for _ in stack.router.submit(request):
            pass
        order.append(request.request_id)

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for request in requests:
            tasks.create_task(read(request))
    return order


async def test_a_burst_in_one_round_of_the_event_loop_is_bounded(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        streams = [stack.router.submit(generation(f"r{number}", [number, 1, 2])) for number in range(8)]
        with pytest.raises(AdmissionError) as error:
            stack.router.submit(generation("over", [1]))
        assert (error.value.kind, error.value.reason) == ("overloaded", "max_waiting")
        assert stack.router.waiting == Load(8, 24)
        for stream in streams:
            async for _ in stream:
                pass
        assert stack.router.waiting == Load()
        stack.router.submit(generation("long", [1] * 200))
        assert b'requests_refused_total{model_name="m",reason="max_waiting"} 1.0' in stack.metrics.render()


@pytest.mark.parametrize("where", ["router", "engine"])
async def test_a_key_that_floods_leaves_room_for_others(tmp_path: Path, where: str) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        # Four run, if they are let to the engine first.
        running_now = [stack.router.submit(generation(f"r{number}", [number], 50, key="bob")) for number in range(4)]
        engine = stack.router.engines[0]
        async with asyncio.timeout(5):
            while engine.scheduler.num_running < 4:
                await asyncio.sleep(0.005)
        streams, errors = [], []
        for number in range(8):
            try:
                streams.append(stack.router.submit(generation(f"a{number}", [number, 1, 2], key="alice")))
            except AdmissionError as error:
                errors.append(error)
            if where == "engine":
                await asyncio.sleep(0.02)
        assert [error.reason for error in errors] == ["max_waiting_share"] * 4
        assert all(error.kind == "overloaded" and error.retry_after for error in errors)
        assert len(engine.scheduler.waiting) == (4 if where == "engine" else 0)
        streams.append(stack.router.submit(generation("b", [7, 8, 9], key="bob")))
        for stream in running_now:
            stream.abort()
        for stream in streams:
            async for _ in stream:
                pass
        assert stack.router.waiting == Load()
        assert engine.scheduler.waiting.account("alice").num_prompt_tokens == 0


async def test_priorities_at_the_router_and_at_the_engine(tmp_path: Path) -> None:
    def requests(name: str) -> list[GenerationRequest]:
        return [generation(f"{name}{priority}", [priority + 3] * 30, 20, priority) for priority in (3, 1, 2, 0)]

    wanted = ["0", "1", "2", "3"]
    async with running(tmp_path) as stack:
        async with executor(tmp_path, step_seconds=0.002):
            await stack.ready(1)
            # The pool has 256 tokens and the budget is 64: at most two prefills begin in a step.
            order = await finished_in_order(stack, requests("engine"))
            assert order == ["engine" + name for name in wanted]
        await stack.ready(0)
        waiting = asyncio.create_task(finished_in_order(stack, requests("router")))
        await asyncio.sleep(0.1)
        assert stack.router.waiting.sequences == 4
        async with executor(tmp_path, "other", step_seconds=0.002):
            assert await waiting == ["router" + name for name in wanted]


async def until_free(scheduler: Scheduler) -> None:
    """Until no block is in use; the steps in flight may still touch some."""
    async with asyncio.timeout(5):
        while scheduler.kv.pool.num_in_use:
            await asyncio.sleep(0.001)


async def test_a_socket_that_is_not_read_from_holds_no_blocks(tmp_path: Path) -> None:
    request = {"prompt": [1, 2, 3], "max_tokens": 6000, "n": 8, "logprobs": 20, "stream": True, "ignore_eos": True}
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    config = ExecutorConfig(num_blocks=4096)
    async with running(tmp_path) as stack, executor(tmp_path, runner=SimulatedRunner(config)):
        await stack.ready(1)
        app = create_app(stack.router, TOKENIZER, SchedulerConfig(write_timeout=0.5), stack.metrics)
        limits: dict[str, float] = {"keepalive_timeout": 75.0, "shutdown_timeout": 1.0}
        async with listening(app, stack.metrics, host="127.0.0.1", port=0, max_connections=9, **limits) as address:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(address)
                client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
                engine = stack.router.engines[0]
                async with asyncio.timeout(60):
                    while engine.scheduler.num_prefix_queries == 0 or stack.router.placing.load(engine):
                        await asyncio.sleep(0.01)
                await until_free(engine.scheduler)
                assert b'http_slow_readers_total{model_name="m"} 1.0' in stack.metrics.render()
                assert b'finished_reason="abort",model_name="m"} 8.0' in stack.metrics.render()


async def test_a_client_that_leaves_too_much_unread_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewise_scheduler.actors.live_request.MOST_UNREAD", 20)
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        stream = stack.router.submit(generation("slow", [1, 2, 3], 200))
        assert isinstance(stream, LiveRequest)
        engine = stack.router.engines[0]
        async with asyncio.timeout(10):
            while not stream.done:
                await asyncio.sleep(0.001)
        assert 20 < stream.stats.output_tokens < 60, "stopped within a few steps"
        await until_free(engine.scheduler)
        with pytest.raises(SlowReaderError):
            async for _ in stream:
                pass
        assert b'http_slow_readers_total{model_name="m"} 1.0' in stack.metrics.render()

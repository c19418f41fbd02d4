"""The coordinator: a failure affects only its own process, and a pause of the whole coordinator affects none."""

import asyncio
import gc
import time
from pathlib import Path

import pytest
import zmq
from pagewise_executor.service import ExecutorService
from pagewise_executor.simulated import SimulatedRunner
from pagewise_executor.worker import Worker
from pagewise_scheduler.core.requests.request import Request, Sequence
from pagewise_scheduler.server.client_request import ClientRequest
from pagewise_scheduler.server.executor_handle import ExecutorHandle, Life
from pagewise_scheduler.server.router_socket import Event
from pagewise_scheduler.server.submissions import Submission
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import Submit
from pagewise_shared.sampling import BeamParams, SamplingParams

from tests.scheduler.server.played_gateway import FailedPromptError, RefusedRequestError
from tests.scheduler.server.stack import Stack, executor, executors_of, gateway, running, until


async def test_an_engine_that_fails_costs_no_other_message_of_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, "one"), executor(tmp_path, "two"):
        await stack.ready(2)
        expected = [await stack.generate([number, 1]) for number in range(4)]
        broken, failures = stack.executors[0], []

        def fail(request: object) -> None:
            failures.append(request)
            raise KeyError("the core is broken")

        broken.scheduler.add = fail  # type: ignore[method-assign, assignment]
        # All in one round: the gateways' socket is held up until they are there.
        socket = stack.gateways.socket
        receive = socket.receive
        held: list[Event] = []

        def deliver(events: list[Event]) -> bool:
            events += held
            held.clear()
            return receive(events)

        monkeypatch.setattr(socket, "receive", lambda events: receive(held))
        requests = [await stack.gateway.submit([number, 1]) for number in range(4)]
        await until(lambda: sum(isinstance(getattr(event, "message", None), Submit) for event in held) == 4)
        monkeypatch.setattr(socket, "receive", deliver)
        assert [(await request.result())[0] for request in requests] == expected
        assert failures, "the router has chosen the broken one"
        assert broken.life is Life.LOST
        await stack.ready(2)  # its executor has joined anew


async def test_a_result_that_breaks_the_core_costs_its_engine_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, "one", 0.005), executor(tmp_path, "two", 0.005):
        await stack.ready(2)
        requests = [await stack.gateway.submit([number, 1], max_tokens=40) for number in range(6)]
        await until(lambda: all(handle.scheduler.num_running for handle in stack.executors))
        broken, other = stack.executors

        def fail(*arguments: object) -> None:
            raise ValueError("the core is broken")

        broken.scheduler.update = fail  # type: ignore[method-assign, assignment]
        for request in requests:
            assert len((await request.result())[0]) == 40
        assert (broken.life, other.life) == (Life.LOST, Life.SERVING)


async def test_a_request_that_breaks_every_engine_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = ExecutorHandle.serve

    def fail(handle: ExecutorHandle, live: ClientRequest) -> None:
        serve(handle, live)
        if live.request_id == "poison":
            raise KeyError("poison")

    monkeypatch.setattr(ExecutorHandle, "serve", fail)
    async with running(tmp_path, placement_timeout=30.0) as stack, executor(tmp_path, "one"):
        await stack.ready(1)
        poison = await stack.gateway.submit([1, 2, 3], request_id="poison")
        good = await stack.gateway.submit([4, 5, 6])
        with pytest.raises(FailedPromptError, match="executors in a row died"):
            await poison.result()
        assert len((await good.result())[0]) == 8


async def test_a_message_that_cannot_be_handled_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as stack, executor(tmp_path), gateway(tmp_path, "other") as other:
        await stack.ready(1)
        apply = stack.gateways._apply

        def fail(session: object, message: object) -> None:
            if getattr(session, "name") == "other":  # noqa: B009
                raise KeyError("broken")
            apply(session, message)  # type: ignore[arg-type]

        monkeypatch.setattr(stack.gateways, "_apply", fail)
        for number in range(4):
            await other.submit([number])
            assert len(await stack.generate([number])) == 8


@pytest.mark.parametrize("taken", ["listen", "listen_gateways"])
async def test_an_endpoint_that_cannot_be_bound_leaves_nothing_open(tmp_path: Path, taken: str) -> None:
    with pytest.raises(zmq.ZMQError):
        Stack(tmp_path, **{taken: "ipc:///nowhere/at/all"})
    async with running(tmp_path) as stack, executor(tmp_path):
        assert len(await stack.generate([1, 2, 3])) == 8


async def test_while_the_scheduler_stands_still_nobody_is_silent(tmp_path: Path) -> None:
    timeouts = {"gateway_timeout": 1.0, "step_timeout": 30.0}
    async with running(tmp_path, **timeouts) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        request = await stack.gateway.submit([1, 2, 3], max_tokens=50)
        await request.until_tokens(4)
        (handle,) = stack.executors
        # As if this process were stopped, and with it everything that is played here.
        time.sleep(2.5)  # noqa: ASYNC251
        assert len((await request.result())[0]) == 50
        assert stack.executors == [handle]
        assert len(stack.gateways) == 1


async def test_an_executor_that_leaves_goes_through_its_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SimulatedRunner(
        ExecutorConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=64), 0.02
    )
    service = ExecutorService(Worker(lambda: runner), executors_of(tmp_path), "leaves")
    lives: list[Life] = []
    async with running(tmp_path) as stack:
        served = asyncio.create_task(service.run())
        await stack.ready(1)
        (handle,) = stack.executors
        advance = stack.coordinator.draining.advance

        def watched() -> None:
            lives.append(handle.life)
            advance()
            lives.append(handle.life)

        monkeypatch.setattr(stack.coordinator.draining, "advance", watched)
        async with executor(tmp_path, "stays"):
            await stack.ready(2)
            requests = [await stack.gateway.submit([number, 2], max_tokens=30) for number in range(4)]
            await until(lambda: handle.scheduler.num_running > 0)
            service.leave("the test says so")
            await served
            for request in requests:
                assert len((await request.result())[0]) == 30
        await until(lambda: handle.life is Life.LOST)
        assert sorted(set(lives), key=lambda life: life.value) == list(dict.fromkeys(lives)), "never back"
        assert {Life.DRAINING, Life.STOPPING, Life.DRAINED} <= set(lives)
        assert stack.metric("executors_drained_total") == 1
        assert not stack.coordinator.draining.drains


async def test_requests_that_have_ended_leave_nothing_to_the_garbage_collector(tmp_path: Path) -> None:
    """It looks for cycles seldom, and would find thousands of requests."""
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.005):
        await stack.ready(1)
        await stack.generate([1, 2, 3])
        gc.collect()
        gc.disable()
        try:
            gateway, sampling = stack.gateway, SamplingParams(seed=1)
            aborted = [
                await gateway.submit([4], max_tokens=200),
                await gateway.submit([4], max_tokens=200, beam=BeamParams(3)),
                await gateway.submit([4], max_tokens=200, n=2, sampling=sampling),
            ]
            await aborted[0].until_tokens(1)
            for request in aborted:
                await gateway.abort(request)
            for request in (
                await gateway.submit([1, 2], [3], n=2, sampling=sampling),
                await gateway.submit([5, 2], beam=BeamParams(3)),
                await gateway.submit([6, 2], n=2, sampling=sampling),
            ):
                await request.result()
            with pytest.raises(RefusedRequestError):
                await (await gateway.submit([7], [7, 2], max_tokens=10**6)).result()
            await stack.all_free()
            await asyncio.sleep(0.05)  # steps in flight have come back
            kinds = (ClientRequest, Submission, Request, Sequence)
            left = [thing for thing in gc.get_objects() if type(thing) in kinds]
            assert left == []
        finally:
            gc.enable()

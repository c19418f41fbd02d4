"""Explanations as gateways ask for them: causes outside of one executor, rights of readers, and how many are kept."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from pagewise_gateway.http.explanation import sentences
from pagewise_scheduler.server.ended_requests import EndedRequests
from pagewise_scheduler.server.executor_handle import Life
from pagewise_shared.protocol import (
    DEVICE,
    DISK,
    HOST,
    Copied,
    Goodbye,
    Heartbeat,
    Message,
    StepError,
    StepPlan,
    StepResult,
    TierInfo,
    Welcome,
    encode,
)
from pagewise_shared.reports import RequestReport

from tests.scheduler.server.played_gateway import PlayedGateway
from tests.scheduler.server.stack import (
    RawExecutor,
    Stack,
    executor,
    executors_of,
    flood,
    gateways_of,
    hello,
    int32s,
    joined,
    running,
    until,
)


async def explained(stack: Stack, name: str, key: str = "") -> dict[str, Any]:
    answer = await stack.gateway.ask("request", name, key=key)
    assert answer.found
    told: dict[str, Any] = msgspec.json.decode(answer.body)
    return told


def text(told: dict[str, Any]) -> str:
    return " ".join(sentences(msgspec.convert(told, RequestReport)))


async def play(stack: Stack, raw: RawExecutor, plan: StepPlan | None = None) -> None:
    """Answer ``plan``, and all that come after it, with a token for each sequence that samples one."""
    while True:
        message = plan or await raw.receive()
        plan = None
        if isinstance(message, StepPlan):
            for one in message.copies:
                peer = one.peer.endpoint if one.peer is not None else ""
                await raw.send(Copied(message.epoch, message.step, one.source, one.target, peer=peer))
            (scheduler,) = [one.scheduler for one in stack.executors if one.scheduler.epoch == message.epoch]
            (step,) = [one for one in scheduler.steps_in_flight if one.step == message.step]
            await raw.send(StepResult(message.epoch, message.step, int32s(*[5] * len(step.sampled))))


async def ended(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_no_executor_and_an_executor_that_died(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=20.0) as stack:
        waits = await stack.gateway.submit([1, 2, 3], max_tokens=60, request_id="waits", client_request_id="mine")
        await until(lambda: len(stack.router.unplaced))
        await asyncio.sleep(0.1)
        told = await explained(stack, "mine")
        assert told["state"] == "waiting"
        assert told["waits"]["no executor"] >= 0.1
        assert "because there was no executor that could take it" in text(told)
        first, _ = await joined(tmp_path, executor_id="first")
        await stack.ready(1)
        await until(lambda: stack.executors[0].scheduler.num_in_flight)
        first.close()
        await stack.ready(0)
        async with executor(tmp_path, "second"):
            await waits.result()
            await until(lambda: len(stack.gateways.ended))
            told = await explained(stack, "waits")
    assert told["state"] == "ended"
    (move,) = told["moves"]
    assert (move["executor_id"], move["to"], move["reason"]) == ("first", "second", "lost")
    assert move["next_token_seconds"] > move["seconds"]
    assert "because the executor first could not be reached any more: it was placed on second after" in text(told)
    assert told["finish_reason"] == "length"
    assert told["output_tokens"] == 60


async def test_an_executor_that_was_restarted(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=20.0) as stack:
        async with executor(tmp_path, "e", step_seconds=0.01):
            await stack.ready(1)
            request = await stack.gateway.submit([1, 2, 3], max_tokens=40, request_id="lives")
            await request.until_tokens(3)
        await stack.ready(0)
        await asyncio.sleep(0.1)
        told = await explained(stack, "lives")
        assert told["moves"][0]["to"] is None
        assert "it has not been placed since" in text(told)
        async with executor(tmp_path, "e", step_seconds=0.01):
            await request.result()
            told = await explained(stack, "lives")
    (move,) = told["moves"]
    assert (move["executor_id"], move["to"]) == ("e", "e")
    assert move["next_token_seconds"] > move["seconds"] >= 0.1
    assert told["waits"]["no executor"] >= 0.1
    assert told["decode"]["steps"] >= 37
    assert told["decode"]["others_tokens"] == 0, "what was computed again was its own"
    assert "it was placed on e again, which had come back, after" in text(told)
    assert "went on with 0 tokens of KV on the device, and the rest was computed again" in text(told)


async def test_a_prefix_that_was_lost_with_its_executor(tmp_path: Path) -> None:
    prompt = list(range(1, 42))
    async with running(tmp_path, placement_timeout=20.0) as stack:
        async with executor(tmp_path, "first"):
            await (await stack.gateway.submit(prompt, request_id="cached")).result()
        await stack.ready(0)
        async with executor(tmp_path, "second"):
            await (await stack.gateway.submit(prompt, request_id="again")).result()
            told = await explained(stack, "again")
    (lost,) = told["lost"]
    assert (lost["reason"], lost["tokens"], lost["executor_id"]) == ("executor lost", 40, "first")
    assert lost["cached_by"]["request_id"] == "cached"
    assert "with the executor first." in text(told)


async def test_a_restart_of_the_scheduler(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        request = await stack.gateway.submit([1, 2, 3], max_tokens=30, request_id="before")
        await request.until_tokens(3)
        await stack.gateway.abort(request)  # another scheduler would not know it any more
        again = await stack.gateway.resubmit(request)
        await again.result()
        name = again.submit.request_id
        told = await explained(stack, name)
        assert told["resumed"] >= told["arrived"]
        assert "it came from another scheduler" in text(told)


async def test_executors_that_are_to_come_back_after_a_restart_of_the_scheduler(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=20.0) as stack:
        knows = PlayedGateway(gateways_of(tmp_path), "knows")
        knows.ready_executors = 2
        await knows.join()
        async with executor(tmp_path):
            await stack.ready(1)
            request = await stack.gateway.submit([1, 2, 3], request_id="waits")
            await request.result()
            told = await explained(stack, "waits")
        await knows.close()
    assert 0.5 < told["waits"]["restart"] < 5.0
    assert max(told["waits"], key=lambda cause: told["waits"][cause]) == "restart"
    assert "for the executors to come back after a restart of the scheduler" in text(told)


async def test_a_key_is_told_of_its_own_requests_only(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        others = [await stack.gateway.submit([n, 2, 3], max_tokens=20, key="a", request_id=f"a-{n}") for n in range(4)]
        for other in others:
            await other.until_tokens(1)
        mine = await stack.gateway.submit([9, 2, 3], max_tokens=4, key="b", request_id="b", client_request_id="job")
        await asyncio.gather(mine.result(), *(other.result() for other in others))
        await until(lambda: len(stack.gateways.ended) == 5)
        assert not (await stack.gateway.ask("request", "a-1", key="b")).found
        assert not (await stack.gateway.ask("request", "")).found
        told = await explained(stack, "job", "b")
        assert told["waits"]["rows"] > 0
        assert "a-" not in msgspec.json.encode(told).decode()
        assert (await explained(stack, "a-1"))["key"] == "a"


async def test_the_oldest_of_the_busiest_key_are_dropped(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        kept = stack.gateways.ended = EndedRequests(most=3)
        await (await stack.gateway.submit([1, 2], key="quiet", request_id="quiet")).result()
        for number in range(5):
            await (await stack.gateway.submit([number, 2], key="busy", request_id=f"busy-{number}")).result()
        await until(lambda: not stack.gateway.requests)
        assert len(kept) == 3
        for name, there in (("quiet", True), ("busy-2", False), ("busy-3", True), ("busy-4", True)):
            assert (await stack.gateway.ask("request", name)).found is there


@pytest.mark.parametrize("ended", [False, True])
async def test_an_id_of_several_requests_means_the_newest(tmp_path: Path, ended: bool) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.005):
        await stack.ready(1)
        old = await stack.gateway.submit([1, 2], max_tokens=80, request_id="one", client_request_id="job")
        await old.until_tokens(1)
        new = await stack.gateway.submit(
            [3, 2], max_tokens=4 if ended else 80, request_id="two", client_request_id="job"
        )
        await (new.result() if ended else new.until_tokens(1))
        assert (await explained(stack, "job"))["request_id"] == "two"


async def test_the_time_that_a_reset_of_its_executor_took(tmp_path: Path) -> None:
    async with running(tmp_path, step_timeout=20.0, executor_timeout=20.0) as stack:
        raw, welcome = await joined(tmp_path, num_blocks=64)
        await stack.ready(1)
        request = await stack.gateway.submit([1, 2, 3], max_tokens=4, request_id="hit")
        while not (isinstance(plan := await raw.receive(), StepPlan) and plan.step == 2):
            pass
        await raw.send(StepResult(plan.epoch, 1, int32s(5)))
        await request.until_tokens(1)
        await asyncio.sleep(0.2)  # it runs meanwhile: no part of this is a wait
        broken = StepError("internal", "the link is broken")
        await raw.send(Copied(welcome.epoch, 1, DEVICE, HOST, error=broken))
        while not (isinstance(plan := await raw.receive(), StepPlan) and plan.epoch > welcome.epoch):
            pass
        await asyncio.sleep(0.3)
        told = await explained(stack, "hit")
        assert told["resets"][0]["seconds"] is None
        assert "no step has come back from it since" in text(told)
        playing = asyncio.create_task(play(stack, raw, plan))
        await request.result()
        told = await explained(stack, "hit")
        await ended(playing)
        raw.close()
    (reset,) = told["resets"]
    assert reset["executor_id"] == "raw"
    assert 0.3 <= reset["seconds"] < 20.0
    assert sum(told["waits"].values()) < 0.2, "it ran, or was computed again"
    assert "the executor raw was reset after an error and lost all KV" in text(told)
    assert "its first step after that came back" in text(told)


async def test_a_move_away_from_an_executor_that_was_stopped(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=20.0) as stack:
        async with executor(tmp_path, "one", step_seconds=0.01):
            await stack.ready(1)
            request = await stack.gateway.submit([5, 6, 7], max_tokens=40, request_id="moves")
            await request.until_tokens(1)
        async with executor(tmp_path, "two"):
            await request.result()
            told = await explained(stack, "moves")
    (move,) = told["moves"]
    assert (move["executor_id"], move["to"], move["reason"]) == ("one", "two", "drain")
    assert "because the executor one was stopped: it was placed on two after" in text(told)


def leave(raw: RawExecutor, welcome: Welcome, *before: Message) -> None:
    """Say ``before``, more than is read at a time, and goodbye, and be gone before anything of that is read."""
    raw.socket.setsockopt(zmq.LINGER, 5000)
    for message in (*before, *[Heartbeat(welcome.epoch)] * 400, Goodbye(welcome.epoch, "stopped")):
        raw.socket.send(encode(message))
    raw.close()
    time.sleep(0.1)  # this thread is the scheduler's, too


@pytest.mark.parametrize("gone_when", ["a step is sent", "others are looked for"])
async def test_a_farewell_that_is_read_late(tmp_path: Path, gone_when: str) -> None:
    async with running(tmp_path, placement_timeout=20.0, executor_timeout=20.0, gateway_timeout=20.0) as stack:
        raw, welcome = await joined(tmp_path, executor_id="one")
        await stack.ready(1)
        request = await stack.gateway.submit([5, 6, 7], max_tokens=4, request_id="moves")
        while not isinstance(plan := await raw.receive(), StepPlan):
            pass
        if gone_when == "a step is sent":
            leave(raw, welcome, StepResult(plan.epoch, plan.step, int32s(5)))
        else:
            other, _ = await joined(tmp_path, executor_id="other")
            await stack.ready(2)
            other.close()
            await asyncio.sleep(0.02)  # it is noticed, and reported a little later
            leave(raw, welcome)
        await stack.ready(0)
        async with executor(tmp_path, "two"):
            assert len((await request.result())[0]) == 4
            told = await explained(stack, "moves")
    move = told["moves"][0]
    assert (move["executor_id"], move["reason"]) == ("one", "drain")


async def test_one_that_is_gone_is_given_up_although_another_one_never_stops_sending(tmp_path: Path) -> None:
    patient = {"executor_timeout": 30.0, "step_timeout": 30.0, "gateway_timeout": 30.0}
    async with running(tmp_path, placement_timeout=30.0, **patient) as stack:
        raw, _ = await joined(tmp_path, executor_id="one")
        await stack.ready(1)
        request = await stack.gateway.submit([5, 6, 7], max_tokens=4, request_id="moves")
        async with flood(executors_of(tmp_path)):
            await until(lambda: stack.dropped("undecodable") > 1000)
            raw.close()
            await stack.ready(0)
        async with executor(tmp_path, "two"):
            await request.result()
            told = await explained(stack, "moves")
    assert [move["reason"] for move in told["moves"]] == ["lost"]


async def say_hello_again(stack: Stack, raw: RawExecutor, welcome: Welcome) -> None:
    handle = stack.executors[0]
    while handle.life is not Life.LOST:  # only so many are heard in a second
        await raw.send(hello(vocab_size=4096, executor_id="one"))
        await asyncio.sleep(0.2)


async def come_back(stack: Stack, raw: RawExecutor, welcome: Welcome) -> None:
    again = RawExecutor(stack.path)
    await again.send(hello(vocab_size=4096, executor_id="one", block_endpoint="ipc:///one", block_format="x"))
    await again.receive()
    again.close()


async def send_nonsense(stack: Stack, raw: RawExecutor, welcome: Welcome) -> None:
    await raw.send(StepResult(welcome.epoch, 7, int32s(5)))


async def send_the_impossible(stack: Stack, raw: RawExecutor, welcome: Welcome) -> None:
    await raw.send(StepResult(welcome.epoch, 1, int32s(-5)))


async def hold_a_step_up(stack: Stack, raw: RawExecutor, welcome: Welcome) -> None:
    while len(stack.registry):
        await raw.send(Heartbeat(welcome.epoch))
        await asyncio.sleep(0.05)


async def make_its_executor_fail(stack: Stack, raw: RawExecutor, welcome: Welcome) -> None:
    stack.executors[0].take_result = None  # type: ignore[method-assign, assignment]
    await raw.send(StepResult(welcome.epoch, 1, int32s(5)))


@pytest.mark.parametrize(
    ("do", "reason", "said"),
    [
        (say_hello_again, "rejoined", "the executor one joined anew: it was placed on one again, which had come back,"),
        (come_back, "rejoined", "the executor one joined anew: it was placed on one again"),
        (send_nonsense, "misbehaved", "what the executor one sent made no sense:"),
        (send_the_impossible, "misbehaved", "what the executor one sent made no sense:"),
        (hold_a_step_up, "stalled", "a step or a copy of the executor one did not return in time:"),
        (make_its_executor_fail, "failed", "the scheduler failed in its work for the executor one:"),
    ],
)
async def test_why_it_left_its_executor(
    tmp_path: Path, do: Callable[[Stack, RawExecutor, Welcome], Awaitable[None]], reason: str, said: str
) -> None:
    async with running(tmp_path, placement_timeout=20.0) as stack:
        lends = {"block_endpoint": "ipc:///one", "block_format": "x"}
        raw, welcome = await joined(tmp_path, executor_id="one", **lends)
        await stack.ready(1)
        await stack.gateway.submit([5, 6, 7], max_tokens=4, request_id="moves")
        while not isinstance(await raw.receive(), StepPlan):
            pass
        (handle,) = stack.executors
        await do(stack, raw, welcome)
        await until(lambda: handle.life is Life.LOST)
        told = await explained(stack, "moves")
        raw.close()
    assert told["moves"][0]["reason"] == reason
    assert f"because {said}" in text(told)


async def test_an_answer_from_storage(tmp_path: Path) -> None:
    disk = TierInfo(DISK, 0, 10.0, 10.0, 10.0, 10.0, "the disk of all")
    patient = {"executor_timeout": 20.0, "step_timeout": 20.0, "gateway_timeout": 20.0}
    async with running(tmp_path, recovery="swap", **patient) as stack:
        raw, _ = await joined(tmp_path, executor_id="raw", tiers=(disk,))
        await stack.ready(1)
        await stack.gateway.submit(list(range(30)), request_id="asks")
        while not isinstance(await raw.receive(), StepPlan):  # the question is not answered: it is given up
            pass
        told = await explained(stack, "asks")
        raw.close()
    assert max(told["waits"], key=lambda cause: told["waits"][cause]) == "storage"
    assert "for the answer how much of its prompt was in storage" in text(told)


async def test_a_move_to_an_executor_that_decodes(tmp_path: Path) -> None:
    lends = {"block_format": "x", "num_blocks": 64, "bytes_per_block": 64}
    async with running(tmp_path, step_timeout=20.0, executor_timeout=20.0) as stack:
        prefills, _ = await joined(tmp_path, executor_id="p", role="prefill", block_endpoint="ipc:///p", **lends)
        await stack.ready(1)
        decodes, _ = await joined(tmp_path, executor_id="d", role="decode", block_endpoint="ipc:///d", **lends)
        await stack.ready(2)
        request = await stack.gateway.submit(list(range(1, 42)), max_tokens=4, request_id="moves")

        playing = [asyncio.create_task(play(stack, raw)) for raw in (prefills, decodes)]
        await request.result()
        told = await explained(stack, "moves")
        await ended(*playing)
        prefills.close()
        decodes.close()
    (move,) = told["moves"]
    assert (move["executor_id"], move["to"], move["reason"]) == ("p", "d", "decode")
    assert 0 <= move["seconds"] < move["next_token_seconds"]
    assert [one["executor_id"] for one in told["executors"]] == ["p", "d"]
    assert "its prompt was computed, and the executor p does not decode: it was placed on d after" in text(told)
    assert "and its next token came after" in text(told)
    assert "it went on with" in text(told)
    assert told["decode"]["steps"] >= 2, "those at the executor where it decoded"
    assert told["decode"]["others_tokens"] == 0

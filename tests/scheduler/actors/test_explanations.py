"""Explanations as gateways ask for them: causes outside of one executor, who may know what, and how many are kept."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pagewise_scheduler.actors.explanations import Explanations

from tests.scheduler.actors.stack import Stack, executor, joined, running, until


async def explained(stack: Stack, name: str, key: str = "") -> dict[str, Any]:
    answer = await stack.gateway.ask("request", name, key=key, detail="explain")
    assert answer.found
    told: dict[str, Any] = msgspec.json.decode(answer.body)
    return told


def text(told: dict[str, Any]) -> str:
    return " ".join(told["sentences"])


async def test_no_executor_and_an_executor_that_died(tmp_path: Path) -> None:
    async with running(tmp_path, unplaced_timeout=20.0) as stack:
        waits = await stack.gateway.submit([1, 2, 3], max_tokens=60, request_id="waits", client_request_id="mine")
        await until(lambda: len(stack.router.unplaced))
        await asyncio.sleep(0.1)
        told = await explained(stack, "mine")
        assert told["state"] == "waiting"
        assert told["waits"]["no executor"] >= 0.1
        assert "because there was no executor that could take it" in text(told)
        first, _ = await joined(tmp_path, executor_id="first")
        await stack.ready(1)
        await until(lambda: stack.engines[0].scheduler.num_in_flight)
        first.close()
        await stack.ready(0)
        async with executor(tmp_path, "second"):
            await waits.result()
            await until(lambda: len(stack.coordinator.explanations))
            told = await explained(stack, "waits")
    assert told["state"] == "ended"
    (move,) = told["moves"]
    assert (move["executor_id"], move["to"], move["reason"]) == ("first", "second", "lost")
    assert "because the executor first died: it was placed on second after" in text(told)
    assert told["finish_reason"] == "length"
    assert told["output_tokens"] == 60


async def test_a_prefix_that_was_lost_with_its_executor(tmp_path: Path) -> None:
    prompt = list(range(1, 42))
    async with running(tmp_path, unplaced_timeout=20.0) as stack:
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


async def test_a_key_is_told_of_its_own_requests_only(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        others = [await stack.gateway.submit([n, 2, 3], max_tokens=20, key="a", request_id=f"a-{n}") for n in range(4)]
        for other in others:
            await other.until_tokens(1)
        mine = await stack.gateway.submit([9, 2, 3], max_tokens=4, key="b", request_id="b", client_request_id="job")
        await asyncio.gather(mine.result(), *(other.result() for other in others))
        await until(lambda: len(stack.coordinator.explanations) == 5)
        assert not (await stack.gateway.ask("request", "a-1", key="b", detail="explain")).found
        assert not (await stack.gateway.ask("request", "", detail="explain")).found
        told = await explained(stack, "job", "b")
        assert told["waits"]["rows"] > 0
        assert "a-" not in msgspec.json.encode(told).decode()
        assert (await explained(stack, "a-1"))["key"] == "a"


async def test_the_oldest_of_the_busiest_key_are_dropped(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        kept = stack.coordinator.explanations = Explanations(
            lambda: stack.gateways.live_requests, lambda: stack.fleet.engines, most=3
        )
        stack.gateways.on_ended = kept.ended
        await (await stack.gateway.submit([1, 2], key="quiet", request_id="quiet")).result()
        for number in range(5):
            await (await stack.gateway.submit([number, 2], key="busy", request_id=f"busy-{number}")).result()
        await until(lambda: not stack.gateway.requests)
        assert len(kept) == 3
        for name, there in (("quiet", True), ("busy-2", False), ("busy-3", True), ("busy-4", True)):
            assert (await stack.gateway.ask("request", name, detail="explain")).found is there


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

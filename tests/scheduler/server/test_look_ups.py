"""Before a request is placed, an executor is asked how much of its prompt is in storage."""

import asyncio
from pathlib import Path

import pytest
from pagewise_shared.block_hash import root_hash, unpack_names
from pagewise_shared.protocol import (
    DISK,
    Found,
    FromScheduler,
    Heartbeat,
    LookUp,
    StepPlan,
    TierInfo,
    Welcome,
    unpack_int32s,
)

from tests.scheduler.server.stack import RawExecutor, Stack, executor, hello, joined, running, until

THE_DISK = TierInfo(DISK, 0, 10.0, 10.0, 10.0, 10.0, "the disk of all")
PROMPT = list(range(30))
PATIENT = {"executor_timeout": 20.0, "step_timeout": 20.0, "gateway_timeout": 20.0}


async def next_message(raw: RawExecutor) -> FromScheduler:
    while not isinstance(message := await raw.receive(), (LookUp, StepPlan)):
        pass
    return message


async def asked(raw: RawExecutor) -> LookUp:
    message = await next_message(raw)
    assert isinstance(message, LookUp), message
    return message


def loads(plan: FromScheduler) -> list[int]:
    """How many blocks a plan loads from storage, list by list."""
    assert isinstance(plan, StepPlan)
    return [len(unpack_names(copies.names)) for copies in plan.copies if copies.source == DISK]


async def with_disk(path: Path, stack: Stack, name: str = "raw", number: int = 1) -> tuple[RawExecutor, Welcome]:
    raw, welcome = await joined(path, executor_id=name, tiers=(THE_DISK,))
    await stack.ready(number)
    return raw, welcome


async def test_what_is_found_is_loaded(tmp_path: Path) -> None:
    async with running(tmp_path, recovery="swap", **PATIENT) as stack:
        raw, welcome = await with_disk(tmp_path, stack)
        running_on = asyncio.create_task(stack.generate(PROMPT))
        question = await asked(raw)
        root = root_hash("simulated", None)
        assert (question.tier, question.root, question.epoch) == (DISK, root, welcome.epoch)
        assert unpack_int32s(question.tokens).tolist() == PROMPT[:28]
        await raw.send(Found(welcome.epoch, question.number, 5))
        plan = await next_message(raw)
        assert loads(plan) == [5]
        assert isinstance(plan, StepPlan)
        (copies,) = plan.copies
        names = unpack_names(copies.names)
        assert names[0].parent == root
        assert [name.parent for name in names[1:]] == [name.hash for name in names[:-1]]
        running_on.cancel()
        raw.close()


async def test_nobody_is_asked_for_what_is_short_or_cached(tmp_path: Path) -> None:
    async with running(tmp_path, **PATIENT) as stack, executor(tmp_path, "without"):
        await stack.ready(1)
        await stack.generate(PROMPT)
        raw, _ = await with_disk(tmp_path, stack, number=2)
        await stack.generate(PROMPT)
        short = asyncio.create_task(stack.generate(list(range(100, 112))))
        await asyncio.sleep(0.1)
        (handle,) = [handle for handle in stack.executors if handle.scheduler.kv.hashed]
        assert handle.scheduler.num_running in (0, 1)
        assert len(stack.router.unplaced) == 0
        short.cancel()
        raw.close()


async def test_an_answer_that_does_not_come_is_not_waited_for_and_nobody_is_asked_for_a_while(tmp_path: Path) -> None:
    async with running(tmp_path, **PATIENT) as stack:
        raw, welcome = await with_disk(tmp_path, stack)
        first = asyncio.create_task(stack.generate(PROMPT))
        question = await asked(raw)
        plan = await next_message(raw)
        assert loads(plan) == []
        assert stack.metric("storage_look_ups_late_total") == 1
        await raw.send(Found(welcome.epoch, question.number, 5))  # too late, and harmless
        second = asyncio.create_task(stack.generate(list(range(100, 130))))
        await until(lambda: stack.executors[0].scheduler.num_running + stack.executors[0].scheduler.num_waiting == 2)
        assert stack.metric("storage_look_ups_late_total") == 1
        first.cancel()
        second.cancel()
        raw.close()


async def test_one_executor_is_asked_for_all_who_share_a_storage(tmp_path: Path) -> None:
    async with running(tmp_path, recovery="swap", **PATIENT) as stack:
        one, first = await with_disk(tmp_path, stack, "one")
        other, _ = await with_disk(tmp_path, stack, "other", 2)
        waiting = [asyncio.create_task(stack.generate([number, *PROMPT])) for number in range(2)]
        for _ in waiting:
            question = await asked(one)
            await one.send(Found(first.epoch, question.number, 6))
        assert loads(await next_message(one)) == loads(await next_message(other)) == [6], (
            "who loads it is another matter"
        )
        for task in waiting:
            task.cancel()
        one.close()
        other.close()


async def test_a_request_goes_on_when_the_executor_that_was_asked_is_gone(tmp_path: Path) -> None:
    async with running(tmp_path, **(PATIENT | {"executor_timeout": 2.0})) as stack:
        raw, _ = await with_disk(tmp_path, stack)
        waiting = asyncio.create_task(stack.generate(PROMPT))
        await asked(raw)
        raw.close()
        async with executor(tmp_path, "another"):
            assert len(await waiting) == 8


@pytest.mark.parametrize(("found", "loaded"), [(-5, []), (2**40, [7]), (7, [7])])
async def test_an_impossible_answer_harms_nobody(tmp_path: Path, found: int, loaded: list[int]) -> None:
    async with running(tmp_path, recovery="swap", **PATIENT) as stack:
        raw, welcome = await with_disk(tmp_path, stack)
        waiting = asyncio.create_task(stack.generate(PROMPT))
        question = await asked(raw)
        await raw.send(Found(welcome.epoch, 12345, 3))  # no query has this number
        await raw.send(Found(welcome.epoch, question.number, found))
        await raw.send(Found(welcome.epoch, question.number, 3))  # it has been answered
        assert loads(await next_message(raw)) == loaded
        waiting.cancel()
        raw.close()


async def test_errors_of_storage_and_the_formats_of_copies_are_counted(tmp_path: Path) -> None:
    async with running(tmp_path, **PATIENT) as stack:
        raw, welcome = await with_disk(tmp_path, stack)
        for total in (2, 2, 5):
            copied = {"copied_small": 3 * total, "copied_exact": total, "copied_above_bound": total - 1}
            await raw.send(Heartbeat(welcome.epoch, storage_errors=total, **copied))
        await until(lambda: stack.metric("storage_errors_total") == 5)
        formats = {"small": 15, "exact": 5, "above_bound": 4}
        assert {one: stack.metric("tier_copies_total", format=one) for one in formats} == formats
        raw.close()


async def test_offers_of_storage_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        for tiers in (
            (THE_DISK, THE_DISK),
            (TierInfo(DISK, 1),),
            (TierInfo(DISK, 0, float("nan")),),
            (TierInfo(DISK, 0, identity="a\nb"),),
        ):
            raw = RawExecutor(tmp_path)
            await raw.send(hello(vocab_size=4096, tiers=tiers))
            assert "disk" in str(await raw.receive())
            raw.close()
        assert stack.executors == []

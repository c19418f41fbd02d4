"""Executors and gateways that fall silent are given up by the rhythm of their heartbeats, over real sockets."""

import asyncio
import time
from pathlib import Path
from time import monotonic

import pytest
from pagewise_shared.protocol import GrammarCompiled, Heartbeat, Rejoin, Welcome

from tests.scheduler.server.stack import RawExecutor, Stack, hello, joined, running

PATIENT = {"executor_timeout": 20.0, "gateway_timeout": 20.0, "step_timeout": 60.0}


async def beat(raw: RawExecutor, welcome: Welcome, seconds: float) -> None:
    """Send heartbeats for a while, more often than a process that is served; the last one has just been sent."""
    until = monotonic() + seconds
    while monotonic() < until:
        await raw.send(Heartbeat(welcome.epoch))
        await asyncio.sleep(0.05)
    await raw.send(Heartbeat(welcome.epoch))


async def given_up(stack: Stack, seconds: float = 15.0) -> float:
    """Wait until the one executor is given up; how many seconds that took."""
    began = monotonic()
    async with asyncio.timeout(seconds):
        while stack.executors:
            await asyncio.sleep(0.02)
    return monotonic() - began


async def test_an_executor_is_given_up_long_before_its_time_out_if_its_heartbeats_were_regular(tmp_path: Path) -> None:
    async with running(tmp_path, **PATIENT) as stack:
        raw, welcome = await joined(tmp_path)
        await beat(raw, welcome, 0.6)
        assert 1.4 < await given_up(stack) < PATIENT["executor_timeout"] / 2
        raw.close()


async def test_until_heartbeats_are_measured_only_the_option_counts(tmp_path: Path) -> None:
    async with running(tmp_path, **PATIENT | {"executor_timeout": 3.0}) as stack:
        raw, welcome = await joined(tmp_path)
        await beat(raw, welcome, 0.2)
        assert 2.9 < await given_up(stack) < PATIENT["gateway_timeout"] / 2
        raw.close()


async def test_other_messages_are_signs_of_life_without_heartbeats(tmp_path: Path) -> None:
    async with running(tmp_path, **PATIENT) as stack:
        raw, welcome = await joined(tmp_path)
        await beat(raw, welcome, 0.6)
        for _ in range(20):
            await raw.send(GrammarCompiled(welcome.epoch, 99))  # which nothing waits for
            await asyncio.sleep(0.1)
        assert len(stack.executors) == 1
        raw.close()


async def test_one_that_was_alive_is_waited_for_longer_the_next_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process may hold Python's lock for seconds, now and then: that costs its requests their places only once."""
    caplog.set_level("INFO")
    async with running(tmp_path, **PATIENT) as stack:
        raw, welcome = await joined(tmp_path)
        await beat(raw, welcome, 0.6)
        await given_up(stack)
        await raw.send(Heartbeat(welcome.epoch))
        while not isinstance(await raw.receive(), Rejoin):
            pass
        await raw.send(hello())
        while not isinstance(again := await raw.receive(), Welcome):
            pass
        await stack.ready(1)
        assert "is back after" in caplog.text
        await beat(raw, again, 0.5)
        await asyncio.sleep(2.0)
        await beat(raw, again, 0.1)
        assert len(stack.executors) == 1
        raw.close()


async def test_a_scheduler_that_stood_still_gives_nothing_up(tmp_path: Path) -> None:
    """As when its machine is stopped and resumed: time in which it could not hear is no silence."""
    async with running(tmp_path, **PATIENT) as stack:
        raw, welcome = await joined(tmp_path)
        await beat(raw, welcome, 0.6)
        for _ in range(2):
            time.sleep(1.2)  # noqa: ASYNC251 - the scheduler runs on this event loop
            await asyncio.sleep(0.3)
        assert len(stack.executors) == 1
        await beat(raw, welcome, 0.5)
        await asyncio.sleep(0.5)
        assert (len(stack.executors), len(stack.gateways)) == (1, 1)
        raw.close()

"""The gauges of each executor, and that an error in them does not end the service."""

import asyncio
from pathlib import Path

import pytest
from pagewise_executor.simulated import SimulatedRunner
from pagewise_scheduler.core.memory_report import memory_report
from pagewise_scheduler.server import gauges
from pagewise_scheduler.server.gauges import refresh_gauges
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import HOST

from tests.scheduler.server.stack import Stack, executor, running, until

PER_EXECUTOR = ("requests_running", "requests_waiting", "kv_cache_usage_perc")


def gauge(stack: Stack, name: str, executor_id: str, **labels: str) -> float:
    refresh_gauges(stack.router, stack.metrics)
    return stack.metric("executor_" + name, executor=executor_id, **labels)


async def test_each_executor_has_its_gauges_while_it_is_there(tmp_path: Path) -> None:
    async with running(tmp_path, routing="round-robin", executor_timeout=20.0, step_timeout=20.0) as stack:
        async with executor(tmp_path, "busy", step_seconds=0.05):
            await stack.ready(1)
            serving = [asyncio.create_task(stack.generate([number, 2, 3, 4], 30)) for number in range(6)]
            async with asyncio.timeout(20):
                while gauge(stack, "requests_running", "busy") < 4:
                    await asyncio.sleep(0.01)
            async with executor(tmp_path, "idle"):
                await stack.ready(2)
                assert gauge(stack, "requests_waiting", "busy") == 2
                assert 0 < gauge(stack, "kv_cache_usage_perc", "busy") < 1
                assert [gauge(stack, name, "idle") for name in PER_EXECUTOR] == [0, 0, 0]
                assert gauge(stack, "kv_blocks", "idle", state="free") == 64
                await until(lambda: gauge(stack, "tasks", "idle") > 0)  # with its first heartbeat
                assert stack.metric("scheduler_tasks") > 0
            await stack.ready(1)
            refresh_gauges(stack.router, stack.metrics)
            assert b'"idle"' not in stack.metrics.render()
            await asyncio.gather(*serving)
            in_use, cached, free = (
                gauge(stack, "kv_blocks", "busy", state=state) for state in ("in_use", "cached", "free")
            )
            assert in_use + cached + free == 64
        await stack.ready(0)
        refresh_gauges(stack.router, stack.metrics)
        assert b"executor=" not in stack.metrics.render()


async def test_tiers_below_the_device_are_shown_by_their_names(tmp_path: Path) -> None:
    config = ExecutorConfig(num_blocks=64, block_size=4)
    async with (
        running(tmp_path) as stack,
        executor(tmp_path, "one", runner=SimulatedRunner(config, tiers={HOST: 7})),
        executor(tmp_path, "two", runner=SimulatedRunner(config, tiers={HOST: 5})),
        executor(tmp_path, "none"),
    ):
        await stack.ready(3)
        refresh_gauges(stack.router, stack.metrics)
        assert stack.metric("kv_blocks", tier="host", state="free") == 12
        assert stack.metric("kv_blocks", tier="host", state="cached") == 0
        shown = {
            handle.executor_id: memory_report(handle.executor_id, handle.scheduler, 0.0, 10).tiers
            for handle in stack.executors
        }
        assert {name: {tier: one.num_blocks for tier, one in tiers.items()} for name, tiers in shown.items()} == {
            "one": {"host": 7},
            "two": {"host": 5},
            "none": {},
        }


async def test_two_of_one_name_are_added_up(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, "same-name"), executor(tmp_path, "same-name"):
        await stack.ready(2)
        assert gauge(stack, "kv_blocks", "same-name", state="free") == 128
        assert gauge(stack, "kv_cache_usage_perc", "same-name") == 0


async def test_a_gauge_that_fails_is_logged_and_counted_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gauges, "_SECONDS", 0.01)
    async with running(tmp_path, executor_timeout=0.05) as stack, executor(tmp_path):  # looked after every 12 ms
        with monkeypatch.context() as broken:
            broken.setattr(type(stack.router), "waiting", property(lambda router: 1 / 0))
            await until(lambda: stack.metric("refresh_errors_total") >= 8)
        assert "ZeroDivisionError" in caplog.text
        told = [record for record in caplog.records if "gauges" in record.getMessage()]
        assert len(told) == 5, "no flood"
        stack.metrics.num_requests_waiting.set(7)
        await until(lambda: stack.metric("num_requests_waiting") == 0)

"""Executors whose layers have several groups: they say so when they join, and are counted in pages."""

import asyncio
from pathlib import Path

from pagewise_scheduler.server.gauges import refresh_gauges
from pagewise_shared.protocol import HOST, LayerGroup, Leaving, StepPlan, TierInfo, unpack_int32s

from tests.scheduler.server.stack import joined, running, until

GROUPS = (LayerGroup(4, 2), LayerGroup(8, 3, 8))


async def test_an_executor_says_its_groups(tmp_path: Path) -> None:
    offer = {"groups": GROUPS, "num_pages": 101, "num_blocks": 50, "page_bytes": 64, "no_segments": "groups"}
    async with running(tmp_path) as stack:
        raw, welcome = await joined(tmp_path, tiers=(TierInfo(HOST, 11),), block_endpoint="tcp://h:1", **offer)
        await stack.ready(1)
        (handle,) = stack.executors
        scheduler = handle.scheduler
        assert [one.pages_per_block for one in scheduler.kv.windows] == [3]
        (host,) = scheduler.kv.pool.lower
        assert host.memory == (11, 0)
        assert [*stack.registry.directory.peers] == ["tcp://h:1"]
        refresh_gauges(stack.router, stack.metrics)
        assert stack.metric("kv_blocks", tier="host", state="free") == 11
        assert stack.metric("executor_kv_blocks", executor="raw", state="free") == 101
        assert stack.router.capacity.max_model_len == min(64, scheduler.kv.capacity_tokens)
        serving = asyncio.create_task(stack.generate([*range(20)], 30))
        plan = await raw.receive()
        assert isinstance(plan, StepPlan)
        ((first, blocks),) = plan.joined[0].windows
        assert (first, len(unpack_int32s(blocks))) == (0, 5)
        refresh_gauges(stack.router, stack.metrics)
        assert (
            stack.metric("executor_kv_blocks", executor="raw", state="in_use") == 6 * 2 + 6 * 3
        )  # with the block of the next step
        assert stack.metric("kv_pages", tier="device", kind="full", state="in_use") == 6 * 2
        assert stack.metric("kv_pages", tier="device", kind="window", state="in_use") == 6 * 3
        assert stack.metric("kv_pages", tier="host", kind="window", state="cached") == 0
        # Another executor has blocks enough of the first group to take over, but not the pages for windows.
        small, _ = await joined(tmp_path, executor_id="small", **(offer | {"num_pages": 32, "num_blocks": 16}))
        await stack.ready(2)
        room = stack.coordinator.draining._others_have_room
        assert room(handle)
        other = next(one for one in stack.executors if one is not handle)
        blocks, _ = other.scheduler.kv.pool.reserve(2)
        assert not room(handle)
        other.scheduler.kv.pool.release(blocks)
        await raw.send(Leaving(welcome.epoch, 60_000))
        await until(lambda: stack.coordinator.draining.drains)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        raw.close()
        small.close()

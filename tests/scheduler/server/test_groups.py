"""Executors whose layers have several groups: they say so when they join, and are counted in pages."""

import asyncio
from base64 import b64decode
from collections import Counter
from pathlib import Path

import msgspec
from pagewise_scheduler.server.gauges import refresh_gauges
from pagewise_shared.protocol import HOST, ConsoleView, LayerGroup, Leaving, StepPlan, TierInfo, unpack_int32s
from pagewise_shared.reports import FleetFrame, MapFrame

from tests.scheduler.server.stack import Stack, joined, running, until

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
        await check_console(stack)
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


async def check_console(stack: Stack) -> None:
    """The console counts pages, and its map of groups shows them: six blocks of each group are in use."""
    view = ConsoleView("map", "raw", colour="group", cells=200)
    shown = msgspec.json.decode((await stack.gateway.ask("console", view=view)).body, type=MapFrame)
    assert (shown.first, shown.count, shown.num_blocks, shown.blocks_per_cell) == (0, 101, 101, 1)
    names = dict(shown.legend)
    pages = Counter(names[index] for index in b64decode(shown.cells)[::2])
    assert pages == {"full in use": 12, "window 8 in use": 18, "free": 71}
    fleet = msgspec.json.decode((await stack.gateway.ask("console", view=ConsoleView("fleet"))).body, type=FleetFrame)
    (executor,) = fleet.executors
    assert sum(msgspec.structs.astuple(executor.counts)) == executor.device.num_blocks == 101
    assert executor.counts.in_use == executor.device.in_use == 30
    assert [(one.kind, one.in_use) for one in executor.device.groups] == [("full", 12), ("window", 18)]
    assert [one.kind for one in executor.tiers["host"].groups] == ["full", "window"]

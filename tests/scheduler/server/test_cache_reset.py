"""Cached prefixes as operators see and release them, and the lifetimes of blocks."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pagewise_executor.runner import BesideSteps
from pagewise_executor.simulated import SimulatedRunner
from pagewise_gateway.http.explanation import sentences
from pagewise_scheduler.core.memory.block_watch import BlockLifetimes
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.memory.tick_times import TickTimes
from pagewise_scheduler.core.tiers.cache_reset import nodes_below, roots_of
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_shared.block_hash import adapter_salt, is_below, rope_salt, salt_tag, salt_tags
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import DISK, HOST, DropStored, Found, LookUp, StoredDropped
from pagewise_shared.reports import RequestReport

from tests.scheduler.core.builders import create_request, create_scheduler, evict
from tests.scheduler.core.driving import executor_for, run
from tests.scheduler.server.stack import Stack, executor, running, until

SALTS = (None, "key:alice", "key:alice/job", "key:alicex", "group:g", "all/mine")


async def cached(stack: Stack, salt: str = "", limit: int = 100) -> list[dict[str, Any]]:
    """The cached prefixes of both executors."""
    report = msgspec.json.decode((await stack.gateway.ask("cache", salt, limit)).body)
    return [one for each in report["executors"] for one in each["prefixes"]]


async def test_prefixes_are_listed_and_released_by_salt(tmp_path: Path) -> None:
    async with running(tmp_path, routing="round-robin") as stack, executor(tmp_path, "a"), executor(tmp_path, "b"):
        await stack.ready(2)
        for number, salt in enumerate((*SALTS, *SALTS)):
            prompt = [number % len(SALTS) + 1] * (20 + 4 * (number % len(SALTS)))
            request = await stack.gateway.submit(
                prompt, max_tokens=1, cache_salt=salt, key="alice", request_id=f"id-{number}"
            )
            await request.result()
        await stack.all_free()
        found = await cached(stack)
        assert {one.get("salt") for one in found} == set(SALTS)
        assert all(one["key"] == "alice" and one["request_id"].startswith("id-") for one in found)
        assert all(one["num_tokens"] == 4 * one["num_blocks"] == 4 * one["tiers"]["device"] for one in found)
        assert all(one["uses"] >= 1 and one["last_used_seconds"] >= 0 for one in found)
        assert found[0]["num_blocks"] >= found[1]["num_blocks"] >= found[2]["num_blocks"], "of the first executor"
        assert {one.get("salt") for one in await cached(stack, "key:alice")} == {"key:alice", "key:alice/job"}
        assert len(await cached(stack, limit=1)) == 2, "one of each executor"

        answer = msgspec.json.decode((await stack.gateway.reset_cache("key:alice")).body)
        assert {one["executor_id"] for one in answer["executors"]} == {"a", "b"}
        assert all(one | {"executor_id": "", "released": {}} == {
            "executor_id": "", "unit": "blocks", "released": {}, "in_use": 0, "kept": [], "failed": {}
        } for one in answer["executors"])  # fmt: skip
        before = {one.get("salt"): one["num_blocks"] for one in found}
        released = sum(one["released"]["device"] for one in answer["executors"])
        assert released == before["key:alice"] + before["key:alice/job"]
        assert {one.get("salt") for one in await cached(stack)} == set(SALTS) - {"key:alice", "key:alice/job"}
        await stack.gateway.reset_cache()
        assert await cached(stack) == []
        assert not any(handle.scheduler.kv.num_total - handle.scheduler.kv.num_free for handle in stack.executors)
        assert not (await stack.gateway.ask("cache", key="alice")).found


async def test_blocks_in_use_stay_until_their_request_has_ended(tmp_path: Path) -> None:
    runner = SimulatedRunner(ExecutorConfig(num_blocks=64, block_size=4), 0.01, tiers={HOST: 16})
    async with running(tmp_path) as stack, executor(tmp_path, runner=runner):
        await stack.ready(1)
        await stack.generate([7] * 40, 1)
        request = await stack.gateway.submit([5] * 21, max_tokens=100)
        await request.until_tokens(4)
        (first,) = msgspec.json.decode((await stack.gateway.reset_cache()).body)["executors"]
        assert first["in_use"] >= 5
        assert first["released"] == {"device": 10, "host": 0}
        assert len((await request.result())[0]) == 100
        await stack.all_free()
        (second,) = msgspec.json.decode((await stack.gateway.reset_cache()).body)["executors"]
        assert second["in_use"] == 0
        assert second["released"]["device"] >= 30
        assert len(await stack.generate([5] * 21, 4)) == 4


class Storing(SimulatedRunner):
    """Has a disk. ``error``: of deletions there; None: they do not return."""

    error: str | None = ""

    def __init__(self) -> None:
        super().__init__(ExecutorConfig(num_blocks=64, block_size=4), tiers={DISK: 0})
        self.drops: list[DropStored] = []

    def handle(self, message: BesideSteps) -> None:
        if isinstance(message, LookUp):
            self._report(Found(message.epoch, message.number, 0))
        elif isinstance(message, DropStored):
            self.drops.append(message)
            if self.error is not None:
                self._report(StoredDropped(message.epoch, message.number, 7, self.error))
        else:
            super().handle(message)


async def test_blocks_in_storage_are_deleted_if_asked_for(tmp_path: Path) -> None:
    runners = {name: Storing() for name in "ab"}
    runners["b"].error = "read-only"
    async with running(tmp_path, recovery="swap") as stack, executor(tmp_path, "a", runner=runners["a"]):
        async with executor(tmp_path, "b", runner=runners["b"]):
            await stack.ready(2)
            await stack.generate([7] * 40, 1)
            (node, *_) = (node for each in stack.executors for node in nodes_below_all(each.scheduler.kv))
            await until(lambda: node.flags & 1 << DISK)

            assert {"disk"} <= {tier for one in await cached(stack) for tier in one["tiers"]}

            async def reset(salt: str = "", *, external: bool = True) -> dict[str, tuple[Any, ...]]:
                answer = msgspec.json.decode((await stack.gateway.reset_cache(salt, external=external)).body)
                return {
                    one["executor_id"]: (one["released"].get("disk"), one["kept"], one["failed"])
                    for one in answer["executors"]
                }

            assert await reset("key:x", external=False) == dict.fromkeys("ab", (None, ["disk"], {}))
            assert not runners["a"].drops
            assert await reset("key:x") == {"a": (7, [], {}), "b": (7, [], {"disk": "read-only"})}
            assert [drop.tag for runner in runners.values() for drop in runner.drops] == 2 * [salt_tag("key:x")]
            assert node.flags & 1 << DISK, "of another salt"
            runners["b"].error = None
            asked = asyncio.create_task(reset())
            await until(lambda: len(runners["b"].drops) == 2)
            assert not asked.done()
            assert not node.flags & 1 << DISK
        assert await asked == {
            "a": (7, [], {}), "b": (0, [], {"disk": "the executor is gone, and may have deleted a part"})
        }  # fmt: skip


def nodes_below_all(kv: KVCacheManager) -> list[CachedBlock]:
    return [node for root in roots_of(kv, "") for node in nodes_below(root)]


@pytest.mark.parametrize(
    ("salt", "wanted", "below"),
    [
        (None, "", True),
        (None, "all", False),
        ("key:a", "key:a", True),
        ("key:ab", "key:a", False),
        ("key:a/b", "key:a", True),
        (adapter_salt(b"x", "key:a/b"), "key:a", True),
        (adapter_salt(b"x", None), "adapter", False),
        (rope_salt(adapter_salt(b"x", "key:a"), 9, 8), "key:a", True),
        (rope_salt("key:a", 9, 8), "key:a/", False),
    ],
)
def test_which_salts_are_meant(salt: str | None, wanted: str, below: bool) -> None:
    assert is_below(salt, wanted) == below
    assert (salt_tag(wanted) in salt_tags(salt)) == below, "by which storage knows it"


async def test_a_missed_prefix_is_explained_by_the_reset(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        await stack.generate([7] * 40, 1)
        await stack.gateway.reset_cache()
        request = await stack.gateway.submit([7] * 40, max_tokens=1, request_id="second")
        await request.result()
        report = msgspec.json.decode((await stack.gateway.ask("request", "second")).body, type=RequestReport)
        assert [lost.reason for lost in report.lost] == ["cache reset"]
        assert "when an operator reset the cache." in " ".join(sentences(report))


def test_lifetimes_end_when_a_block_leaves_the_device() -> None:
    scheduler, now, told = create_scheduler(num_blocks=16, num_host_blocks=16), [0.0], []
    served_by = executor_for(scheduler)
    scheduler.kv.watchers.append(
        BlockLifetimes(1.0, lambda life, idle, gaps: told.append((life, idle, list(gaps))), lambda: now[0])
    )
    prompt = [*range(9)]
    for at in (1.0, 3.0, 6.0, 10.0, 15.0, 21.0):
        now[0] = at
        scheduler.add(create_request(prompt=prompt, max_tokens=1))
        run(scheduler, served_by)
    now[0] = 100.0
    assert not told
    evict(scheduler, 16)
    assert told == [(99.0, 79.0, [4.0, 5.0, 6.0])] * 2, "of the last four uses; the first made the blocks"


def test_blocks_that_are_not_sampled_are_not_measured() -> None:
    scheduler = create_scheduler()
    scheduler.kv.watchers.append(BlockLifetimes(1e-12, lambda *times: pytest.fail("it was not sampled"), lambda: 0.0))
    scheduler.add(create_request(prompt=30, max_tokens=1))
    run(scheduler, executor_for(scheduler))
    evict(scheduler, 64)


async def test_lifetimes_are_in_the_metrics(tmp_path: Path) -> None:
    async with running(tmp_path, kv_cache_metrics=True, kv_cache_metrics_sample=1.0) as stack, executor(tmp_path):
        await stack.ready(1)
        for number in (1, 2, 1):
            await stack.generate([number] * 100, 1)
        await stack.generate([3] * 250, 1)
        names = ("kv_block_lifetime_seconds_count", "kv_block_idle_before_evict_seconds_count")
        await until(lambda: all(stack.metric(name) >= 37 for name in names))


def test_ticks_have_times() -> None:
    ticks = TickTimes()
    assert ticks.time_of(5, 9.0) == 9.0
    for tick in range(1, 20_001):
        ticks.note(tick, tick / 10)
        ticks.note(tick, 1e9)
    assert ticks.time_of(20_001, 3000.0) == 3000.0
    assert ticks.time_of(20_000, 3000.0) == 2000.0
    assert 0 <= ticks.time_of(15_000, 3000.0) - 1500.0 < 20.0

"""Budgets of memory, from the request of a gateway to the blocks of executors and to the metrics."""

import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from pagewise_executor.simulated import SimulatedRunner
from pagewise_scheduler.server.gauges import refresh_gauges
from pagewise_scheduler.server.key_budgets import owner_of
from pagewise_shared.block_hash import adapter_salt, rope_salt, salt_tag
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import (
    DEVICE,
    DISK,
    HOST,
    REDIS,
    LayerGroup,
    MemoryBudget,
    MemorySize,
    RequestParams,
    SetStoredBudgets,
    StoredBudget,
    Submit,
    TierInfo,
)
from pagewise_shared.sampling import SamplingParams

from tests.scheduler.server.played_gateway import prompts_of
from tests.scheduler.server.stack import Stack, executor, joined, running, until

GREEDY = SamplingParams(temperature=0)


def submit(owner: str, tokens: list[int], *budgets: MemoryBudget) -> Submit:
    params = RequestParams(GREEDY, cache_salt=f"key:{owner}/own salt", key=owner)
    return Submit(0, 0, "r", prompts_of([tokens], 1), params, memory=budgets)


def runner_with(tiers: dict[int, int] | None = None) -> SimulatedRunner:
    runner = SimulatedRunner(ExecutorConfig(num_blocks=64, block_size=4), tiers=tiers or {})
    smaller = tuple(msgspec.structs.replace(one, block_bytes=256) for one in runner.info.tiers)
    runner.info = msgspec.structs.replace(runner.info, bytes_per_block=1024, tiers=smaller)
    return runner


def shown(stack: Stack, name: str, key: str, tier: str = "device") -> float:
    refresh_gauges(stack.router, stack.metrics)
    return stack.metric(f"key_memory_{name}bytes", key=key, tier=tier)


async def test_budgets_come_with_requests_and_hold_at_every_executor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = runner_with()
    async with running(tmp_path, max_model_len=100) as stack, executor(tmp_path, runner=runner):
        await stack.ready(1)
        assert stack.router.budgets is None
        each = stack.executors[0].hello.bytes_per_block
        budgets = (
            MemoryBudget(DEVICE, min=MemorySize(10 * each), high=MemorySize(share=0.5)),
            MemoryBudget(HOST, low=MemorySize(share=0.25)),
        )
        await (await stack.gateway.submit_as(submit("a", list(range(41)), *budgets))).result()
        await stack.all_free()
        assert [shown(stack, name, "a") for name in ("", "min_", "low_", "high_")] == [
            10 * each, 10 * each, 0, 32 * each
        ]  # fmt: skip
        pool = stack.executors[0].scheduler.kv.pool
        assert pool.num_available == 54
        async with executor(tmp_path, "later", runner=runner_with({HOST: 8})):
            await stack.ready(2)
            await until(lambda: shown(stack, "min_", "a") == 20 * each)
            assert shown(stack, "low_", "a", "host") == 2 * 256  # the host holds fewer bits
        # A second key's minimum does not fit beside the first one's.
        caplog.set_level(logging.WARNING)
        greedy = MemoryBudget(DEVICE, min=MemorySize(share=0.9))
        await (await stack.gateway.submit_as(submit("b", [1, 2, 3], greedy))).result()
        await until(lambda: shown(stack, "min_", "b") > 0)
        assert shown(stack, "min_", "a") + shown(stack, "min_", "b") <= 32 * each
        assert "are made smaller by the same factor" in caplog.text
        # The line of the key has lost its budgets.
        await (await stack.gateway.submit_as(submit("a", [1, 2, 3]))).result()
        await until(lambda: shown(stack, "min_", "a") == 0)


async def test_executors_get_the_budgets_of_their_disks(tmp_path: Path) -> None:
    high = MemoryBudget(DISK, high=MemorySize(share=0.1))
    async with running(tmp_path) as stack:
        raw, welcome = await joined(tmp_path, tiers=(TierInfo(HOST, 8), TierInfo(DISK, 0, identity="d")))
        await stack.ready(1)
        stack.router.set_budgets("gateway", "key:a/x", (high, MemoryBudget(REDIS, low=MemorySize(1))), set)

        async def sent() -> SetStoredBudgets:
            while not isinstance(message := await raw.receive(), SetStoredBudgets):
                pass
            return message

        budget = StoredBudget(salt_tag("key:a"), high)
        assert await sent() == SetStoredBudgets(welcome.epoch, DISK, (budget,))
        assert stack.executors[0].scheduler.kv.pool.budgets is None, "the device has none"
        stack.router.set_budgets("gateway", "key:a", (), set)
        assert await sent() == SetStoredBudgets(welcome.epoch, DISK)
        raw.close()


async def test_the_file_that_changed_last_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requests of gateways with different files arrive in turns, and do not change the budgets in turns."""
    before, after = ((MemoryBudget(DEVICE, MemorySize(share=share)),) for share in (0.25, 0.5))
    async with running(tmp_path, max_model_len=100) as stack, executor(tmp_path, runner=runner_with()):
        await stack.ready(1)

        def joined() -> set[str]:
            return {"gateway", "second", "without"}

        def minima(first: tuple[MemoryBudget, ...], second: tuple[MemoryBudget, ...]) -> set[float]:
            caplog.clear()
            found = set()
            for name, own in (("gateway", first), ("second", second), ("without", ())) * 2:
                stack.router.set_budgets(name, "key:a/salt", own, joined)
                found.add(shown(stack, "min_", "a") / 1024)
            return found

        stack.router.set_budgets("gone", "key:a", before, joined)
        assert minima(before, before) == {16}
        assert not caplog.text
        assert minima(after, before) == {32}
        assert "those of gateway count, which changed last, and not those of second" in caplog.text
        assert minima(after, before) == {32}
        assert not caplog.text, "it is said once"
        assert minima(after, after) == {32}
        assert minima((), ()) == {0}


async def test_models_with_groups_of_layers_have_no_budgets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    groups = (LayerGroup(4, 2), LayerGroup(8, 3, 8))
    async with running(tmp_path) as stack:
        raw, _ = await joined(
            tmp_path, groups=groups, num_pages=101, num_blocks=50, page_bytes=64, no_segments="groups"
        )
        await stack.ready(1)
        for share in (0.1, 0.2):
            stack.router.set_budgets("g", "key:a", (MemoryBudget(DEVICE, MemorySize(share=share)),), set)
        assert stack.executors[0].scheduler.kv.pool.budgets is None
        assert caplog.text.count("its layers have several groups") == 1
        raw.close()


def test_the_owner_is_the_part_of_the_salt_that_gateways_choose() -> None:
    salt = "key:alice/anything/else"
    assert owner_of(None) == owner_of(adapter_salt(b"x", None)) == ""
    assert owner_of(adapter_salt(b"x", rope_salt(salt, 9, 10))) == owner_of(salt) == "key:alice"
    assert owner_of(rope_salt(salt, 11, 10)) == "key:alice"


def test_a_scheduler_without_budgets_does_not_load_them() -> None:
    code = "import sys, pagewise_scheduler.main; assert not [name for name in sys.modules if 'budgets' in name]"
    subprocess.run([sys.executable, "-c", code], check=True)

"""The KV of an executor outlives its scheduler, and its KV on the host outlives the executor itself."""

import time
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.profile import measure_tier
from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import (
    DEVICE,
    HOST,
    BlockCopies,
    StepPlan,
    TierInfo,
    Welcome,
    named_blocks,
    pack_int32s,
)

from tests.executor.driver import drive, request
from tests.executor.inventories import PROMPTS, run_and_kill, scheduler_for, serve
from tests.executor.references import reference
from tests.executor.runners import build_runner, host_of
from tests.model_builders import model_fixture

model_path = model_fixture("llama", seed=5)


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return reference(model, PROMPTS, [20] * len(PROMPTS), "cpu")


def test_a_new_scheduler_finds_the_cache_warm(model_path: Path, expected: list[list[int]]) -> None:
    runner = build_runner(model_path)
    first = scheduler_for(runner, 400)
    runner.reset(Welcome(1, 8, 64))
    serve(runner, first)
    inventory = runner.inventory()
    assert inventory is not None
    second = scheduler_for(runner, 400)
    second.kv.expect([named_blocks(inventory)])
    runner.reset(Welcome(1, 8, 64, keeps_blocks=True))
    again = serve(runner, second)
    assert [one.sequences[0].output_token_ids.tolist() for one in again] == expected
    assert [one.num_cached_tokens for one in again] == [(len(prompt) - 1) // 8 * 8 for prompt in PROMPTS]
    # Generated blocks have names too: a conversation continues from them.
    longer = request(PROMPTS[0] + expected[0] + [5], 4, name="longer")
    third = scheduler_for(runner, 400)
    third.kv.expect([named_blocks(runner.inventory())])  # type: ignore[arg-type]
    runner.reset(Welcome(1, 8, 64, keeps_blocks=True))
    drive(runner, third, [longer])
    assert longer.num_cached_tokens == 72


def test_rows_that_run_are_offered_as_far_as_they_are_computed(model_path: Path) -> None:
    runner = build_runner(model_path)
    scheduler = scheduler_for(runner, 400)
    runner.reset(Welcome(1, 8, 64))
    scheduler.add(request(PROMPTS[3], 50))
    for _ in range(12):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(runner.execute(plan).result())
    inventory = runner.inventory()
    assert inventory is not None
    assert len(named_blocks(inventory)[DEVICE]) == (63 + 11) // 8


def test_a_block_that_a_copy_has_overwritten_is_not_offered(model_path: Path) -> None:
    """Not by its old name, also if no row has it: it may have been fetched ahead from another executor."""
    runner = build_runner(model_path)
    runner.reset(Welcome(1, 8, 64))
    serve(runner, scheduler_for(runner, 400))
    before = named_blocks(runner.inventory())[DEVICE]  # type: ignore[arg-type]
    runner.reset(Welcome(2, 8, 64, keeps_blocks=True))
    free = next(block for block in range(400) if block not in before.values())
    name, block = next(iter(before.items()))
    copies = BlockCopies(DEVICE, DEVICE, pack_int32s([free, block]))
    runner.execute(StepPlan(2, 1, copies=(copies,))).result()
    after = named_blocks(runner.inventory())[DEVICE]  # type: ignore[arg-type]
    assert after == {one: at for one, at in before.items() if one != name}


def test_a_welcome_that_keeps_nothing_forgets_everything(model_path: Path) -> None:
    runner = build_runner(model_path)
    runner.reset(Welcome(1, 8, 64))
    serve(runner, scheduler_for(runner, 20))
    runner.reset(Welcome(2, 8, 64))
    assert runner.inventory() is None


def test_an_inventory_waits_for_copies_that_are_on_their_way(model_path: Path) -> None:
    """A block of the host that is about to be written again is not offered by the name that it had."""
    runner = build_runner(model_path, host_bandwidth="200KB", host_memory="100KiB")
    runner.reset(Welcome(1, 8, 64))
    scheduler = scheduler_for(runner, 12)
    for tier in scheduler.kv.pool.lower:
        tier.max_arriving = 10**6
    serve(runner, scheduler, 4)
    inventory = runner.inventory()
    assert inventory is not None
    offered = named_blocks(inventory)[HOST]
    host = host_of(runner)
    assert offered == {name: block for block, name in host.memory.names().items()}
    time.sleep(0.5)
    assert offered == {name: block for block, name in host.memory.names().items()}, "nothing changes later"


@pytest.mark.parametrize(("corrupt", "profile"), [(False, False), (True, False), (False, True)])
def test_an_executor_that_was_killed_finds_its_host_blocks_again(
    model_path: Path, expected: list[list[int]], tmp_path: Path, corrupt: bool, profile: bool
) -> None:
    run_and_kill(model_path, tmp_path)
    runner = build_runner(model_path, host_folder=tmp_path, verify_copies=False, profile=profile)
    inventory = runner.inventory()
    assert inventory is not None
    named = named_blocks(inventory)
    assert DEVICE not in named
    assert len(named[HOST]) > 10
    if corrupt:
        for block in named[HOST].values():
            host_of(runner).memory.slot(block)[0] ^= 1
    scheduler = scheduler_for(runner, 40)
    scheduler.kv.expect([named])
    runner.reset(Welcome(1, 8, 64, keeps_blocks=True))
    again = serve(runner, scheduler)
    assert [one.sequences[0].output_token_ids.tolist() for one in again] == expected
    if corrupt:
        assert scheduler.kv.pool.counters.corrupt > 0
    else:
        assert scheduler.kv.pool.counters.loaded > 10
        assert scheduler.kv.pool.counters.corrupt == 0
    runner.close()
    assert not list(tmp_path.iterdir()), "one that ends in order leaves nothing behind"


@pytest.mark.parametrize("unnamed", [0, 3])
def test_profiling_writes_over_no_host_block_that_has_a_name(model_path: Path, unnamed: int) -> None:
    runner = build_runner(model_path, verify_copies=False)
    host = host_of(runner)
    named = range(unnamed, host.num_blocks)
    for block in named:
        host.memory.slot(block)[:] = block % 251
        host.memory.keep(block, BlockHash(block.to_bytes(32, "big")), 0)
    before = host.memory.names()
    measured = measure_tier(runner, runner._copier.tiers[DEVICE], host, TierInfo(HOST, host.num_blocks))
    assert (measured.number, measured.num_blocks) == (HOST, host.num_blocks)
    assert measured.load_block > 0
    assert measured.store_block > 0
    assert host.memory.names() == before
    assert all((host.memory.slot(block) == block % 251).all() for block in named)


def test_without_room_for_named_memory_there_is_a_warning(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_runner(model_path, host_folder=tmp_path / "missing")
    assert "will be gone with this process" in caplog.text

"""The input batch of several groups of layers: the pages that layers read hold the right tokens, whatever happens."""

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_executor.grouped_batch import GroupedBatch
from pagewise_executor.input_batch import InputBatch
from pagewise_executor.page_labels import KeptBlocks
from pagewise_executor.page_map import NULL_PAGE
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.simulated import SimulatedRunner
from pagewise_scheduler.core.features.registry import FeatureOptions
from pagewise_scheduler.core.memory.prefix_tree import ancestors, hash_of
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import ArenaShape, WindowShape
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_shared.config import ExecutorConfig, SpeculativeConfig
from pagewise_shared.protocol import (
    DEVICE,
    BlockCopies,
    GroupedStepPlan,
    Inventory,
    LayerGroup,
    NewSequence,
    SegmentMove,
    StepPlan,
    StepResult,
    decode_from_scheduler,
    encode,
    named_blocks,
    pack_int32s,
)
from pagewise_shared.sampling import SamplingParams

from tests.executor.driver import request as make_request
from tests.executor.driver import run_requests
from tests.executor.paged_executor import PagedExecutor
from tests.scheduler.core import checking_executor
from tests.scheduler.core.arenas import check_tokens, drive_at_random

LONGEST = 40


def run_to_end(scheduler: Scheduler, executor: PagedExecutor, in_flight: deque[StepResult]) -> None:
    while True:
        while len(in_flight) < 2 and (plan := scheduler.schedule(0.0)) is not None:
            in_flight.append(execute(executor, plan))
        if not in_flight:
            return
        scheduler.update(in_flight.popleft())


def execute(executor: PagedExecutor, plan: StepPlan) -> StepResult:
    decoded = decode_from_scheduler(encode(plan))
    assert isinstance(decoded, StepPlan)
    return executor.execute(decoded)


@pytest.mark.parametrize("drafts", [False, True])
def test_pages_hold_what_layers_read(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences share prefixes, are preempted and aborted, and steps fail, in a small arena."""
    monkeypatch.setattr(checking_executor, "repeats_itself", drafts)

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        _check_pages(random.Random(seed), drafts)

    check()


def _check_pages(rng: random.Random, drafts: bool) -> None:
    windows = tuple(
        WindowShape(rng.choice((1, 3, 4, 8, 13)), rng.choice((1, 2, 5)), rng.random() < 0.3)
        for _ in range(rng.choice((1, 1, 2)))
    )
    pages, budget, size = rng.choice((1, 2, 5)), rng.choice((3, 8, 32)), rng.choice((1, 3, 4))
    needed = GroupedKVCacheManager(ArenaShape(10**6, pages, windows, 2 * budget), size).room_for(LONGEST)
    shape = ArenaShape(needed + rng.randrange(60), pages, windows, 2 * budget)
    speculative = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)
    scheduler = Scheduler(
        num_blocks=shape.num_pages // pages, block_size=size, max_num_seqs=rng.choice((1, 3, 8)),
        max_num_batched_tokens=budget, shape=shape, eviction=rng.choice(("lru", "cost")),
        features=FeatureOptions(speculative=speculative if drafts else None),
    )  # fmt: skip
    groups = [LayerGroup(1, pages), *(LayerGroup(1, one.pages_per_block, one.window, one.chunked) for one in windows)]
    executor = PagedExecutor(groups, shape.num_pages, size, LONGEST, budget)
    requests, in_flight = drive_at_random(rng, scheduler, executor, lambda plan: execute(executor, plan), LONGEST)
    run_to_end(scheduler, executor, in_flight)
    check_tokens(requests)
    check_inventory(scheduler, executor)


def check_inventory(scheduler: Scheduler, executor: PagedExecutor) -> None:
    """All that the scheduler keeps without requests is offered, with the pages that hold it."""
    batch, kv = executor.batch, scheduler.kv
    assert isinstance(kv, GroupedKVCacheManager)
    for row in list(batch.sequences):
        batch.remove(row)
    executor.check_labels()
    kept = KeptBlocks([group.pages_per_block for group in executor.groups])
    inventory = kept.offer({DEVICE: executor.labels.known()}, 10**6) or Inventory()
    ids = [named_blocks(inventory, group).get(DEVICE, {}) for group in range(len(executor.groups))]
    for group in kv.windows:
        for node, snapshot in group.at.items():
            path = [hash_of(one) for one in ancestors(snapshot.node)][::-1]
            assert set(path[snapshot.first :]) <= set(ids[group.number])
            assert {hash_of(one) for one in ancestors(node)} <= set(ids[0])
    fresh = PagedExecutor(executor.groups, executor.num_pages, executor.block_size, LONGEST, executor.most_tokens).batch
    fresh.restore(kept)
    for number, (named, group) in enumerate(zip(ids, executor.groups, strict=True)):
        if named:
            pages = fresh._maps[DEVICE].pages(number, np.array(list(named.values()), np.int32))
            labels = [executor.labels.of(held) for held in pages.tolist()]
            assert [[label[:32] for label in held if label] for held in labels] == [
                [name] * group.pages_per_block for name in named
            ]


# ---- plans that cannot be ----------------------------------------------------------------------------------

GROUPS = (LayerGroup(2, 2), LayerGroup(3, 3, 8))


def batch_of(num_pages: int = 30) -> GroupedBatch:
    return GroupedBatch(GROUPS, {DEVICE: num_pages}, num_rows=2, max_model_len=32, block_size=4)


def joining(
    blocks: list[int], window: tuple[int, list[int]] | None, size: int = 6, computed: int = 0, row: int = 0
) -> NewSequence:
    windows = () if window is None else ((window[0], pack_int32s(window[1])),)
    return NewSequence(
        row, pack_int32s(range(size)), size, computed, pack_int32s(blocks), SamplingParams(temperature=0.0),
        windows=windows,
    )  # fmt: skip


def test_tables_name_pages_and_nothing_behind_the_window() -> None:
    batch = batch_of()
    batch.advance(batch.apply(GroupedStepPlan(1, 1, joined=(joining([4, 1], (0, [3, 0])),), chunks=((0, 6),))))
    full, windowed = batch.slots[:2], batch.slots[2:]
    held = [view.block_tables[0, :2].tolist() for view in batch.slots]
    assert sorted(page for pages in held for page in pages) == list(range(1, 11))
    for step in range(2, 9):  # tokens 6 to 12: at the last one, the first block is behind the window
        more = {"tables": pack_int32s([0, 1 + step // 4, step]), "windows": pack_int32s([0, 1, step])}
        batch.advance(batch.apply(GroupedStepPlan(1, step, **(more if step in (4, 8) else {}))))  # type: ignore[arg-type]
    assert [view.block_tables[0, :2].tolist() for view in full] == held[:2]
    assert all(view.block_tables[0, 0] == NULL_PAGE for view in windowed)
    assert [view.block_tables[0, 1] for view in windowed] == [pages[1] for pages in held[2:]]


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (GroupedStepPlan(1, 1, joined=(joining([0, 1], None),)), "joins with 0 of 1 windows"),
        (GroupedStepPlan(1, 1, joined=(joining([0, 1], (0, [10])),)), "outside the 10 of group 1"),
        (GroupedStepPlan(1, 1, joined=(joining([0, 1], (-1, [0])),)), "joins with blocks -1"),
        (GroupedStepPlan(1, 1, joined=(joining([0, 1], (6, [0, 1, 2])),)), "joins with blocks 6 to 9 of 8"),
        (GroupedStepPlan(1, 1, joined=(joining([15], (0, [])),)), "outside the pool of 15"),
        (
            GroupedStepPlan(1, 1, joined=(joining([0, 1], (0, [0])),), chunks=((0, 6),)),
            "1 blocks of group 1 do not hold 6",
        ),
        (GroupedStepPlan(1, 1, joined=(joining([0, 1], (1, [0])),), chunks=((0, 6),)), "begin at 1, too late"),
        (GroupedStepPlan(1, 1, joined=(joining([*range(9)], (0, [0])),)), "more than 8 blocks"),
        (GroupedStepPlan(1, 1, joined=(joining([*range(6)], (0, [*range(7)])),)), "need 21 pages, and 18 are free"),
        (GroupedStepPlan(1, 1, windows=pack_int32s([0, 1, 0])), "holds no sequence"),
        (GroupedStepPlan(1, 1, windows=pack_int32s([0, 1])), "triples"),
        (GroupedStepPlan(1, 1, windows=b"123"), "whole number"),
        (GroupedStepPlan(1, 1, joined=(joining([0], (0, [])),), windows=pack_int32s([0, 0, 0])), "group 0 of 2"),
        (GroupedStepPlan(1, 1, joined=(joining([0], (0, [])),), windows=pack_int32s([0, 2, 0])), "group 2 of 2"),
        (GroupedStepPlan(1, 1, joined=(joining([0], (0, [])),), windows=pack_int32s([0, 1, -1])), "outside the 10"),
        (GroupedStepPlan(1, 1, joined=(joining([0], (8, [])),), windows=pack_int32s([0, 1, 1])), "more than 8 blocks"),
        (GroupedStepPlan(1, 1, unmapped=pack_int32s([0, 0])), "triples"),
        (GroupedStepPlan(1, 1, unmapped=pack_int32s([1, 0, 0])), "to be unmapped"),
        (GroupedStepPlan(1, 1, unmapped=pack_int32s([0, 2, 0])), "to be unmapped"),
        (GroupedStepPlan(1, 1, unmapped=pack_int32s([0, 1, 10])), "to be unmapped"),
        (GroupedStepPlan(1, 1, copies=(BlockCopies(0, 0, pack_int32s([0, 1]), group=2),)), "group 2 of 2"),
        (GroupedStepPlan(1, 1, copies=(BlockCopies(0, 0, pack_int32s([0, 10]), group=1),)), "has 10 blocks"),
        (GroupedStepPlan(1, 1, copies=(BlockCopies(0, 0, pack_int32s([0, 1]), group=1),)), "has no pages"),
        (GroupedStepPlan(1, 1, moves=(SegmentMove(0, 1, 2, 0, 0, b""),)), "not moved in a model with several groups"),
    ],
)
def test_plans_that_contradict_the_groups_are_refused(plan: StepPlan, why: str) -> None:
    with pytest.raises(InvalidPlanError, match=why):
        batch_of().apply(plan)


@pytest.mark.parametrize(
    "plan",
    [
        GroupedStepPlan(1, 1, windows=pack_int32s([0, 1, 0])),
        GroupedStepPlan(1, 1, unmapped=pack_int32s([0, 0, 0])),
        GroupedStepPlan(1, 1, joined=(joining([0, 1], (0, [0])),)),
    ],
)
def test_a_model_with_one_group_refuses_tables_of_others(plan: StepPlan) -> None:
    batch = InputBatch(num_rows=2, max_model_len=32, block_size=4, pool_blocks=8)
    with pytest.raises(InvalidPlanError, match="one group of layers"):
        batch.apply(plan)
    with pytest.raises(InvalidPlanError, match="group 1 of 1"):
        batch.apply(GroupedStepPlan(1, 1, copies=(BlockCopies(0, 0, pack_int32s([0, 1]), group=1),)))


def test_a_target_may_get_the_pages_of_a_source() -> None:
    """Copies inside the device read all sources, of all groups, where they lay before blocks were unmapped."""
    batch = batch_of(11)
    batch.advance(batch.apply(GroupedStepPlan(1, 1, joined=(joining([0], (0, [0, 1]), 4),), chunks=((0, 4),))))
    before = [view.block_tables[0, :2].tolist() for view in batch.slots]
    copies = (BlockCopies(0, 0, pack_int32s([0, 1])), BlockCopies(0, 0, pack_int32s([1, 2]), group=1))
    plan = GroupedStepPlan(1, 2, left=(0,), copies=copies, unmapped=pack_int32s([0, 1, 0, 0, 1, 1]))
    (job,) = batch.apply(plan).copies
    assert job.pairs[:, 0].tolist() == [*(pages[0] for pages in before[:2]), *(pages[1] for pages in before[2:])]
    assert len(set(job.pairs[:, 1].tolist())) == 5


# ---- the simulated runner ----------------------------------------------------------------------------------


def test_simulated_executors_have_groups() -> None:
    config = ExecutorConfig(simulate=True, num_blocks=400, block_size=4)
    plain = SimulatedRunner(config)
    runner = SimulatedRunner(config, groups=(LayerGroup(2, 1), LayerGroup(10, 5, 16)))
    assert (runner.info.num_pages, runner.info.num_blocks) == (400, 400)
    outputs = []
    for one in (plain, runner):
        requests = [make_request([*range(3, 40 + 7 * number)], 30, f"r{number}") for number in range(6)]
        scheduler, _ = run_requests(one, requests, num_blocks=60, arrive_every=3)
        outputs.append([request.sequences[0].output_token_ids.tolist() for request in requests])
        assert len(scheduler.kv.windows) == len(one.info.groups[1:])
    assert outputs[0] == outputs[1]

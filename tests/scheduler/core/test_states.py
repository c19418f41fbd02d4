"""States of recurrent layers: a sequence's own ones, snapshots for others, and loads from other tiers."""

import pytest
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import WindowShape
from pagewise_scheduler.core.tiers.tier import BlockCopy
from pagewise_shared.config import SpeculativeConfig
from pagewise_shared.protocol import HOST

from tests.scheduler.core import checking_executor
from tests.scheduler.core.arenas import DISK_NAME, check_arena, create
from tests.scheduler.core.builders import create_request
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import executor_for, expected_tokens, num_stored, run

STATES = WindowShape(2, 7, state=True)


def begin(
    scheduler: Scheduler, executor: CheckingExecutor, prompt: list[int], max_tokens: int = 3, n: int = 1
) -> Request:
    """Serve a request alone, and check its tokens."""
    request = create_request(prompt=prompt, max_tokens=max_tokens, n=n)
    if scheduler.kv.hashed:
        request.stored[DISK_NAME] = num_stored(scheduler, executor, request)
    scheduler.add(request)
    run(scheduler, executor)
    assert all(one.output_token_ids.tolist() == expected_tokens(request) for one in request.sequences)
    check_arena(scheduler)
    return request


def test_a_turn_begins_where_the_last_one_ended() -> None:
    scheduler = create(400, 1, (STATES,))
    executor = executor_for(scheduler)
    first = begin(scheduler, executor, [*range(101)], 12)
    answer = first.sequences[0].output_token_ids.tolist()
    assert begin(scheduler, executor, [*range(101), *answer, 7, 7]).num_cached_tokens == 112
    assert begin(scheduler, executor, [*range(101), 9, 9]).num_cached_tokens == 84, "four blocks before its end"
    assert begin(scheduler, executor, [*range(85), 9, 9]).num_cached_tokens == 84, "so a template may change there"
    assert begin(scheduler, executor, [*range(70), *[9] * 30]).num_cached_tokens == 0
    assert begin(scheduler, executor, [*range(70), *[8] * 30]).num_cached_tokens == 68, "the last one left the path"


def test_decoding_takes_few_blocks() -> None:
    scheduler = create(400, 1, (STATES,))
    executor = executor_for(scheduler)
    begin(scheduler, executor, [*range(30)], 200)
    (group,) = scheduler.kv.windows
    assert group.num_used <= 3


@pytest.mark.parametrize("most", [3, 11])
def test_states_are_kept_where_drafts_cross_the_end_of_a_block(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking_executor, "repeats_itself", True)
    ngram = SpeculativeConfig(
        num_speculative_tokens=most, prompt_lookup_max=3, prompt_lookup_min=1, disable_by_batch_size=3
    )
    scheduler = create(600, 1, (STATES,), speculative=ngram)
    executor = executor_for(scheduler)
    for length in range(30, 46):
        answer = begin(scheduler, executor, [*range(length)], 40).sequences[0].output_token_ids.tolist()
        again = begin(scheduler, executor, [*range(length), *answer, 7, 7])
        assert again.num_cached_tokens == (length + 39) // 4 * 4, "behind the last full block of the answer"
    assert 50 < executor.num_accepted < executor.num_drafted - 50


@pytest.mark.parametrize("budget", [29, 31, 32])
def test_a_prompt_that_is_preempted_or_cancelled_loses_less_than_a_block(budget: int) -> None:
    """Its chunks end anywhere in blocks."""
    scheduler = create(900, 1, (STATES,), budget=budget)
    executor = executor_for(scheduler)
    first = create_request(prompt=[*range(300)], max_tokens=3)
    scheduler.add(first)
    (sequence,) = first.sequences
    for steps in (3, 2):
        compute(scheduler, executor, steps)
        (table,) = sequence.table.windows
        assert len(table.blocks) <= 3, "the one that it writes, the one behind the last full block, and one in flight"
        computed = sequence.num_computed_tokens
        scheduler.preempt(sequence, "for a test")
        compute(scheduler, executor, 1)
        assert sequence.num_computed_tokens == computed // 4 * 4 + budget
    compute(scheduler, executor, 1)
    computed = sequence.num_computed_tokens
    scheduler.abort(first.request_id)
    run(scheduler, executor)
    assert begin(scheduler, executor, [*range(300)]).num_cached_tokens == computed // 4 * 4


def compute(scheduler: Scheduler, executor: CheckingExecutor, steps: int) -> None:
    """Compute some steps, one after the other."""
    for _ in range(steps):
        plan = scheduler.schedule(now=0.0)
        assert plan is not None
        scheduler.update(executor.execute(plan))


@pytest.mark.parametrize("budget", [13, 32, 100])
@pytest.mark.parametrize("length", [9, 89, 90])
def test_outputs_begin_behind_all_but_the_last_token_of_their_prompt(length: int, budget: int) -> None:
    scheduler = create(600, 1, (STATES,), budget=budget)
    executor = executor_for(scheduler)
    begin(scheduler, executor, [*range(length)], 8, n=4)
    assert executor.num_computed == length + 7 + 3 * 8


def test_a_prompt_holds_no_more_blocks_than_admission_counts() -> None:
    """Two steps are in flight; the second one has the place where it leaves others and the one near its end."""
    scheduler = create(600, 1, (STATES,), budget=29)
    executor = executor_for(scheduler)
    begin(scheduler, executor, [*range(44)])
    begin(scheduler, executor, [*range(100)])
    request = create_request([*range(78), *[9] * 26], 3)
    scheduler.add(request)
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    check_arena(scheduler)
    for plan in plans:
        assert plan is not None
        scheduler.update(executor.execute(plan))
    run(scheduler, executor)
    assert begin(scheduler, executor, [*range(78), *[8] * 26]).num_cached_tokens == 76


def test_drafts_take_no_more_blocks_than_admission_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking_executor, "repeats_itself", True)
    ngram = SpeculativeConfig(
        num_speculative_tokens=20, prompt_lookup_max=3, prompt_lookup_min=1, disable_by_batch_size=3
    )
    scheduler = create(600, 1, (STATES,), speculative=ngram)
    executor = executor_for(scheduler)
    request = create_request([*range(30)], 100)
    scheduler.add(request)
    while (plan := scheduler.schedule(0.0)) is not None:
        check_arena(scheduler)
        scheduler.update(executor.execute(plan))
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    assert executor.num_drafted > 40


def test_a_prompt_that_loads_states_keeps_the_names_of_its_other_blocks() -> None:
    """It joins with all of them as computed, else an executor would forget them with a sequence that is aborted."""
    scheduler = create(400, 1, (STATES,), host_pages=900, recovery="swap")
    executor = executor_for(scheduler)
    begin(scheduler, executor, [*range(100)])
    copies = list[BlockCopy]()
    while scheduler.kv.windows[0].num_cached:
        scheduler.kv.windows[0].give_up(copies)
    scheduler.plan.copy(copies)
    scheduler.add(create_request([*range(100), 7], 3))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [new.num_computed_tokens for new in plan.joined] == [100]


def test_states_come_back_from_the_host() -> None:
    scheduler = create(160, 1, (STATES, WindowShape(9, 1)), host_pages=900, recovery="swap")
    executor = executor_for(scheduler)
    prompt = [*range(120)]
    answer = begin(scheduler, executor, prompt, 12).sequences[0].output_token_ids.tolist()
    for other in range(4):
        begin(scheduler, executor, [1000 * (other + 1) + i for i in range(130)])
    again = begin(scheduler, executor, [*prompt, *answer, 7, 7])
    assert sum(again.cached_tokens.values()) == 128
    assert executor.num_windows_loaded > 0


def test_states_come_back_from_the_disk() -> None:
    scheduler = create(100, 1, (STATES,), disk=True, recovery="swap")
    executor = executor_for(scheduler)
    prompt = [*range(120)]
    begin(scheduler, executor, prompt, 12)
    for other in range(4):
        begin(scheduler, executor, [1000 * (other + 1) + i for i in range(130)])
    again = begin(scheduler, executor, [*prompt, 7, 7])
    assert sum(again.cached_tokens.values()) == 104


@pytest.mark.parametrize("shift", [0, 1, 100, 333, 600])
def test_prompts_that_leave_a_prefix_anywhere_hit_it(shift: int) -> None:
    """64 prompts share a beginning, at whose end none ends. The first ones take a snapshot where they leave it."""
    scheduler = create(4000, 1, (STATES,), budget=512, block_size=16)
    executor = executor_for(scheduler)
    shared = [*range(1000 + shift)]
    hits = [
        begin(scheduler, executor, [*shared, *(10_000 * (number + 1) + i for i in range(50))]).num_cached_tokens
        for number in range(64)
    ]
    assert hits[2:] == [(1000 + shift) // 16 * 16] * 62


def test_snapshots_are_counted() -> None:
    scheduler = create(100, 1, (STATES,))
    executor = executor_for(scheduler)
    begin(scheduler, executor, [*range(40)], 12)
    begin(scheduler, executor, [*range(40), 7])
    counters = scheduler.kv.pool.counters
    assert (counters.snapshots_taken, counters.snapshots_used, counters.snapshots_unused) == (3, 1, 0)
    for other in range(4):
        begin(scheduler, executor, [1000 * (other + 1) + i for i in range(70)])
    assert counters.snapshots_unused >= 2


def test_an_earlier_snapshot_in_the_host_is_loaded_where_that_is_faster() -> None:
    """Loading a block takes longer than computing it, and of the attention layers the device has the first blocks."""
    scheduler = create(400, 1, (STATES,), host_pages=900)
    executor = executor_for(scheduler)
    prompt = [*range(300)]
    begin(scheduler, executor, prompt[:200])
    begin(scheduler, executor, prompt)
    kv, costs, copies = scheduler.kv, scheduler.recoveries.planner.costs, list[BlockCopy]()
    while kv.windows[0].num_cached:
        kv.windows[0].give_up(copies)
    while kv.pool.num_cached > 50:
        kv.pool.give_up(copies)
    scheduler.plan.copy(copies)
    costs.prefill.constants[:] = [0.0, 1e-3, 0.0, 0.0]
    costs.tiers[HOST].load.constants[:] = [0.0, 8e-3]
    again = begin(scheduler, executor, [*prompt, 7, 7])
    assert (again.cached_tokens["device"], again.cached_tokens["host"]) == (200, 0)
    assert (executor.num_loaded, executor.num_windows_loaded) == (0, 1)

"""Groups of windowed layers: blocks behind the window go, prefixes begin at snapshots, and all share one arena."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pagewise_scheduler.core.memory_report import executor_report
from pagewise_scheduler.core.tiers.arena import WindowShape
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_scheduler.core.tiers.snapshots import MARGIN
from pagewise_shared.config.options import EvictionName
from pagewise_shared.protocol import StepPlan, StepResult, decode_from_scheduler, encode

from tests.scheduler.core.arenas import DISK_NAME, check_arena, check_tokens, create, drive_at_random, serve_alone
from tests.scheduler.core.builders import create_request, evict, host_of
from tests.scheduler.core.driving import executor_for, expected_tokens, num_stored, run


def test_a_sequence_keeps_its_window_alone() -> None:
    scheduler = create(200, 1, (WindowShape(8, 1),))
    serve_alone(scheduler, executor_for(scheduler), [*range(140)], 60)
    assert scheduler.kv.pool.num_used == 199 // 4
    assert scheduler.kv.windows[0].num_used <= 2 * 3 + MARGIN // 4


def test_a_prompt_begins_where_a_chunk_ends() -> None:
    """No token behind the end of a chunk sees the tokens before it, so no snapshot is needed there."""
    scheduler = create(400, 1, (WindowShape(80, 1, chunked=True),))
    executor = executor_for(scheduler)
    for tokens, cached in ((range(200), 0), (range(198), 196), (range(170), 168), (range(158), 80), (range(70), 0)):
        request = create_request(prompt=[*tokens, 7, 7], max_tokens=30)
        scheduler.add(request)
        run(scheduler, executor)
        assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
        assert request.num_cached_tokens == cached
    check_arena(scheduler)


def test_blocks_keep_their_pages_while_no_other_group_needs_them() -> None:
    scheduler = create(140, 1, (WindowShape(8, 1),))
    executor = executor_for(scheduler)
    for expected in (False, True):
        scheduler.add(create_request(prompt=40, max_tokens=360))
        run(scheduler, executor)
        assert (executor.num_unmapped > 0) == expected  # the second sequence evicts blocks of the first
    assert executor.most_mapped <= 140
    check_arena(scheduler)


def test_a_prompt_begins_at_a_snapshot() -> None:
    scheduler = create(400, 1, (WindowShape(8, 1),))
    executor = executor_for(scheduler)
    first = serve_alone(scheduler, executor, [*range(200)], 12)
    answer = first.sequences[0].output_token_ids.tolist()
    for tokens, cached in (
        ([*range(200), *answer, 7, 7], 208),
        ([*range(200), 9, 9], 200),
        ([*range(200 - MARGIN), 9, 9], 200 - MARGIN),
        ([*range(199 - MARGIN), 9, 9], 0),
    ):
        assert serve_alone(scheduler, executor, tokens).num_cached_tokens == cached


def test_the_second_prompt_that_leaves_a_path_takes_a_snapshot_there() -> None:
    scheduler = create(1000, 1, (WindowShape(8, 1), WindowShape(13, 2)))
    executor = executor_for(scheduler)
    shared = [*range(400)]
    for number, cached in enumerate((0, 0, 400, 400)):
        own = [1000 * (number + 1) + i for i in range(100)]
        assert serve_alone(scheduler, executor, [*shared, *own]).num_cached_tokens == cached


def test_a_snapshot_goes_to_the_host_and_comes_back() -> None:
    """A conversation is evicted by others, and its next turn loads its full blocks and its window."""
    scheduler = create(260, 1, (WindowShape(8, 1), WindowShape(13, 2)), host_pages=1200, recovery="swap")
    executor = executor_for(scheduler)
    first = serve_alone(scheduler, executor, [*range(200)], 12)
    for other in range(3):
        serve_alone(scheduler, executor, [1000 * (other + 1) + i for i in range(200)])
    assert executor.num_windows_stored > 0
    report = executor_report("e", scheduler).tiers["host"]
    assert [(one.kind, one.window, one.pages_per_block) for one in report.groups] == [
        ("full", 0, 1), ("window", 8, 1), ("window", 13, 2),
    ]  # fmt: skip
    assert all(one.snapshots for one in report.groups[1:])
    assert sum(one.cached + one.in_use for one in report.groups) == report.used <= 1200
    again = serve_alone(scheduler, executor, [*range(200), *first.sequences[0].output_token_ids.tolist(), 7, 7])
    assert sum(again.cached_tokens.values()) == 208
    assert executor.num_loaded + executor.num_windows_loaded > 40


def test_a_window_that_was_spoilt_in_the_host_is_computed_again() -> None:
    scheduler = create(160, 1, (WindowShape(8, 1),), host_pages=600, recovery="swap")
    executor = executor_for(scheduler)
    serve_alone(scheduler, executor, [*range(200)], 12)
    for other in range(3):
        serve_alone(scheduler, executor, [1000 * (other + 1) + i for i in range(200)])
    executor.spoilt_windows = set(range(600))
    serve_alone(scheduler, executor, [*range(200), 7, 7])
    assert scheduler.kv.pool.counters.corrupt > 0


def test_a_block_that_came_back_corrupt_leaves_the_host() -> None:
    scheduler = create(160, 1, (WindowShape(8, 1),), host_pages=600)
    executor = executor_for(scheduler)
    serve_alone(scheduler, executor, [*range(40)], 2)
    evict(scheduler, 160)
    serve_alone(scheduler, executor, [7] * 5)
    host = host_of(scheduler)
    nodes = [node for node in map(host.node, range(host.num_blocks)) if node is not None]
    corrupt = max(nodes, key=lambda node: node.depth)
    host.drop(corrupt, "corrupt")
    assert not corrupt.num_tiers
    assert host.num_used == len(nodes) - 1
    check_arena(scheduler)


@pytest.mark.parametrize("most", [0, 2])
def test_windows_come_back_from_the_disk(most: int) -> None:
    """``most``: further groups of the same windows; the flags of blocks have bits for each."""
    windows = (*[WindowShape(8, 1)] * (1 + most), WindowShape(9, 1, chunked=True))
    scheduler = create(160 + 60 * most, 1, windows, disk=True, recovery="swap")
    executor = executor_for(scheduler)
    prompt = [*range(200)]
    for num_tokens in (160, 200):  # blocks behind ones that are written are written too
        serve_alone(scheduler, executor, prompt[:num_tokens], 12)
    for other in range(3):
        serve_alone(scheduler, executor, [1000 * (other + 1) + i for i in range(200)])
    again = create_request(prompt=[*prompt, 7, 7], max_tokens=3)
    again.stored[DISK_NAME] = num_stored(scheduler, executor, again)
    assert again.stored[DISK_NAME] == 50
    scheduler.add(again)
    run(scheduler, executor)
    assert again.sequences[0].output_token_ids.tolist() == expected_tokens(again)
    assert sum(again.cached_tokens.values()) == 200
    assert executor.num_recalled > 50


def test_the_host_keeps_what_snapshots_of_one_path_share_once() -> None:
    scheduler = create(160, 1, (WindowShape(80, 1),), host_pages=2000, recovery="swap")
    executor = executor_for(scheduler)
    prompt = [*range(200)]
    for _ in range(4):
        prompt += serve_alone(scheduler, executor, prompt, 12).sequences[0].output_token_ids.tolist()
        serve_alone(scheduler, executor, [5000 + len(prompt) + i for i in range(230)])
    kv = scheduler.kv
    assert isinstance(kv, GroupedKVCacheManager)
    assert kv.host is not None
    (pool,) = kv.host.snapshots
    of_conversation = {node for node in pool.at if node.depth > 48}
    assert len({pool.at[node] for node in of_conversation}) > 1
    assert executor.num_windows_stored < 1.5 * pool.num_used


@pytest.mark.parametrize("eviction", ["lru", "cost"])
@pytest.mark.parametrize("pages", [1, 20])
def test_snapshots_go_together_with_their_blocks(pages: int, eviction: EvictionName) -> None:
    """No block is kept behind which no prompt can begin, except blocks of the conversation that is being evicted, and
    the conversation that was used last is kept whole."""
    scheduler = create(3 * (60 + 20 * pages), 1, (WindowShape(8, pages),), eviction=eviction)
    executor = executor_for(scheduler)
    for number in range(1, 9):
        prompt = [1000 * number + i for i in range(200)]
        answer = serve_alone(scheduler, executor, prompt, 12).sequences[0].output_token_ids.tolist()
        leaves = [node for _, node in scheduler.kv.pool.tree.leaves()]
        assert sum(not scheduler.kv.can_begin(node) for node in leaves) <= 1
        assert serve_alone(scheduler, executor, [*prompt, *answer, 7, 7]).num_cached_tokens == 208
    assert scheduler.kv.pool.counters.evicted > 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
@example(2_918_723_831)  # requests are aborted, and the disk still loads for them
def test_all_tokens_are_right_whatever_shares_the_arena(seed: int) -> None:
    """Sequences share prefixes, are preempted and aborted, and steps fail, in a small arena."""
    rng = random.Random(seed)
    windows = tuple(
        WindowShape(2, rng.choice((1, 3, 9)), state=True)
        if rng.random() < 0.4
        else WindowShape(rng.choice((1, 3, 4, 8, 13)), rng.choice((1, 2, 5)), rng.random() < 0.3)
        for _ in range(rng.choice((1, 1, 2)))
    )
    pages, budget, longest = rng.choice((1, 2, 5)), rng.choice((3, 8, 32)), 40
    needed = create(10**6, pages, windows, budget=budget).kv.room_for(longest)
    scheduler = create(
        needed + rng.randrange(60), pages, windows, budget=budget, seqs=rng.choice((1, 3, 8)),
        eviction=rng.choice(("lru", "cost")), disk=rng.random() < 0.5,
        host_pages=rng.choice((0, 0, 10, needed, 4 * needed)),
        recovery=rng.choice(("auto", "swap", "both", "recompute")),
    )  # fmt: skip
    executor = executor_for(scheduler)
    executor.early_loads = rng.random() < 0.5

    def execute(plan: StepPlan) -> StepResult:
        decoded = decode_from_scheduler(encode(plan))
        assert isinstance(decoded, StepPlan)
        return executor.execute(decoded)

    def copied() -> None:
        if rng.random() < 0.1:
            executor.spoilt_windows = set(range(0, 1000, 3))
            for forgotten in [*executor.stored_windows][::3]:
                del executor.stored_windows[forgotten]
        for message in executor.finish_copies(rng.randrange(4)):
            scheduler.copied(message)

    requests, in_flight = drive_at_random(
        rng, scheduler, executor, execute, longest, lambda: check_arena(scheduler), copied
    )
    while in_flight:
        scheduler.update(in_flight.popleft())
    run(scheduler, executor)
    check_tokens(requests)
    check_arena(scheduler)

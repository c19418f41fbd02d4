"""Shared blocks of a common prefix, across requests and among the outputs of one."""

from array import array
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_scheduler.core.memory.prefix_tree import hash_of
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_shared.block_hash import block_hash, root_hash
from pagewise_shared.protocol import DEVICE, StepPlan
from pagewise_shared.sampling import BeamParams

from tests.core_requests import change
from tests.scheduler.core.builders import cached_prefix, create_request, create_scheduler
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import assert_all_free, check_states, executor_for, expected_tokens, run


def run_recorded(scheduler: Scheduler, executor: CheckingExecutor) -> list[StepPlan]:
    """Run to the end, two steps in flight; returns the plans."""
    plans: list[StepPlan] = []
    results = deque()
    while True:
        while scheduler.num_in_flight < 2 and (plan := scheduler.schedule(0.0)) is not None:
            plans.append(plan)
            results.append(executor.execute(plan))
        if not results:
            return plans
        scheduler.update(results.popleft())


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        (list(range(16)), 15),  # all of it, but the last token is computed for its logits
        (list(range(17)), 16),
        (list(range(10)), 9),
        ([*range(6), 99, 98], 6),  # ends inside a block
        ([99, *range(1, 16)], 0),
        (list(range(3)), 2),
    ],
)
def test_a_prefix_seen_before_is_not_computed_again(prompt: list[int], cached: int) -> None:
    scheduler = create_scheduler(block_size=4)
    executor = executor_for(scheduler)
    scheduler.add(create_request(prompt=list(range(16)), max_tokens=3))
    run(scheduler, executor)
    again = create_request(prompt=prompt, max_tokens=5)
    scheduler.add(again)
    plans = run_recorded(scheduler, executor)
    assert again.num_cached_tokens == cached
    assert sum(size for plan in plans for _, size in plan.chunks) == len(prompt) - cached
    assert again.sequences[0].output_token_ids.tolist() == expected_tokens(again)
    assert scheduler.prefix_hits == (16 + len(prompt), cached)


def test_a_conversation_goes_on_from_its_own_output() -> None:
    scheduler = create_scheduler(block_size=4)
    executor = executor_for(scheduler)
    first = create_request(prompt=list(range(10)), max_tokens=9)
    scheduler.add(first)
    run(scheduler, executor)
    history = [*first.prompt_token_ids, *first.sequences[0].output_token_ids]
    second = create_request(prompt=[*history, 5, 6, 7], max_tokens=4)
    scheduler.add(second)
    run(scheduler, executor)
    # The newest output token was never computed, so 18 of 19 tokens are there, and 16 of them in full blocks.
    assert second.num_cached_tokens == 16
    assert second.sequences[0].output_token_ids.tolist() == expected_tokens(second)


def test_salts_keep_caches_apart() -> None:
    scheduler = create_scheduler(block_size=4)
    executor = executor_for(scheduler)
    cached = []
    for salt in (None, "a", "b", "a"):
        request = create_request(prompt=list(range(12)), max_tokens=2)
        change(request, cache_salt=salt)
        scheduler.add(request)
        run(scheduler, executor)
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 0, 11]


def test_a_running_sequence_shares_what_it_has_computed() -> None:
    scheduler = create_scheduler(block_size=4, num_blocks=64)
    executor = executor_for(scheduler)
    first = create_request(prompt=list(range(16)), max_tokens=30)
    scheduler.add(first)
    for _ in range(2):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(executor.execute(plan))
    second = create_request(prompt=list(range(18)), max_tokens=3)
    scheduler.add(second)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert second.sequences[0].table.blocks[:4] == first.sequences[0].table.blocks[:4]
    assert plan.chunks == ((plan.joined[0].row, 2),)
    scheduler.update(executor.execute(plan))
    run(scheduler, executor)
    assert first.sequences[0].output_token_ids.tolist() == expected_tokens(first)
    assert second.sequences[0].output_token_ids.tolist() == expected_tokens(second)


def test_equal_prompts_that_started_together_end_up_on_the_same_blocks() -> None:
    scheduler = create_scheduler(block_size=4, num_blocks=64, max_num_batched_tokens=64)
    executor = executor_for(scheduler)
    requests = [create_request(prompt=list(range(16)), max_tokens=20) for _ in range(3)]
    for request in requests:
        scheduler.add(request)
    for _ in range(12):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(executor.execute(plan))
        check_states(scheduler.kv.pool)
    tables = [request.sequences[0].table.blocks for request in requests]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    run(scheduler, executor)
    assert all(r.sequences[0].output_token_ids.tolist() == expected_tokens(r) for r in requests)
    assert_all_free(scheduler)


@pytest.mark.parametrize("prompt", [1, 4, 5, 8, 9, 11])
def test_outputs_of_one_request_share_its_prompt_and_copy_one_block_each(prompt: int) -> None:
    scheduler = create_scheduler(block_size=4, num_blocks=64)
    executor = executor_for(scheduler)
    request = create_request(prompt=prompt, max_tokens=6, n=4)
    scheduler.add(request)
    plans = run_recorded(scheduler, executor)
    copies = [copies for plan in plans for copies in plan.copies]
    assert all(copies.source == copies.target == DEVICE for copies in copies)
    assert sum(len(copies.pairs) // 8 for copies in copies) == (3 if (prompt - 1) % 4 else 0)
    assert sum(size for plan in plans for _, size in plan.chunks) == prompt + 3
    assert all(sequence.output_token_ids.tolist() == expected_tokens(request) for sequence in request.sequences)
    assert_all_free(scheduler)


def test_a_preempted_sequence_finds_what_is_left_of_it() -> None:
    scheduler = create_scheduler(block_size=4, num_blocks=12, max_num_seqs=2, max_num_batched_tokens=64)
    executor = executor_for(scheduler)
    requests = [create_request(prompt=12, max_tokens=20) for _ in range(2)]
    for request in requests:
        scheduler.add(request)
    plans = run_recorded(scheduler, executor)
    assert scheduler.num_preemptions > 0
    resumed = [new for plan in plans for new in plan.joined if len(new.tokens) > 4 * 12]
    assert resumed
    assert any(new.num_computed_tokens > 0 for new in resumed)
    assert all(r.sequences[0].output_token_ids.tolist() == expected_tokens(r) for r in requests)


def test_tails_are_evicted_before_their_parents_and_the_least_recently_used_first() -> None:
    kv = KVCacheManager(num_blocks=6, block_size=2)
    tables = []
    for start in (0, 100, 200):
        table = kv.new_table()
        tokens = array("i", range(start, start + 4))
        kv.grow(table, 4)
        kv.cache_full_blocks(table, 4, lambda a, b, tokens=tokens: tokens[a:b].tobytes())  # type: ignore[misc]
        tables.append((table, tokens.tobytes()))
    for table, _ in tables:
        kv.free(table, None)
    assert kv.pool.num_cached == 6
    again = kv.new_table()
    kv.take(again, cached_prefix(kv, tables[0][1], 4))  # the first is used again: the second is the oldest now
    kv.free(again, None)
    found = []
    for _ in range(5):
        kv.pool.reserve(1)
        found.append([cached_prefix(kv, tokens, 4).num_tokens for _, tokens in tables])
    assert found == [[4, 2, 4], [4, 0, 4], [4, 0, 2], [4, 0, 0], [2, 0, 0]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12), st.integers(1, 4))
def test_the_longest_prefix_that_was_cached_is_found(prompts: list[list[int]], block_size: int) -> None:
    kv = KVCacheManager(num_blocks=200, block_size=block_size)
    cached_prompts: list[list[int]] = []
    for prompt in prompts:
        found = cached_prefix(kv, array("i", prompt).tobytes(), len(prompt))
        full = [tokens[: len(tokens) // block_size * block_size] for tokens in cached_prompts]
        best = max((shared(prompt, tokens) for tokens in full), default=0)
        assert found.num_tokens == best
        table = kv.new_table()
        kv.take(table, found)
        kv.grow(table, len(prompt))
        known = array("i", prompt)
        kv.cache_full_blocks(table, len(prompt), lambda a, b, known=known: known[a:b].tobytes())  # type: ignore[misc]
        cached_prompts.append(prompt)
        kv.free(table, None)
        check_states(kv.pool)


def test_block_hashes_chain_over_parents_tokens_and_extra_keys() -> None:
    def leaf(model: str, cache_salt: str | None, *tokens: int) -> bytes:
        kv = KVCacheManager(num_blocks=8, block_size=2, model_fingerprint=model)
        table, known = kv.new_table(cache_salt), array("i", tokens)
        kv.grow(table, len(tokens))
        kv.cache_full_blocks(table, len(tokens), lambda a, b: known[a:b].tobytes())
        assert table.last_node is not None
        return hash_of(table.last_node)

    same = leaf("m", None, 1, 2, 3, 4)
    assert same == leaf("m", None, 1, 2, 3, 4) == block_hash(block_hash(root_hash("m", None), ints(1, 2)), ints(3, 4))
    others = [
        leaf("other", None, 1, 2, 3, 4),
        leaf("m", "salt", 1, 2, 3, 4),
        leaf("m", "None", 1, 2, 3, 4),
        leaf("m", None, 9, 2, 3, 4),
        leaf("m", None, 3, 4),
        leaf("m", None, 1, 2, 3, 4, 5, 6),
    ]
    assert len({same, *others}) == 1 + len(others)


@pytest.mark.parametrize("kind", ["plain", "several", "beams"])
def test_the_outputs_of_one_request_are_one_use_of_its_prompt(kind: str) -> None:
    scheduler = create_scheduler(num_blocks=400, max_num_batched_tokens=100, eviction="cost")
    executor = executor_for(scheduler)
    for number in range(5):
        request = create_request([1000 * number + token for token in range(64)], 6, n=4 if kind == "several" else 1)
        if kind == "beams":
            change(request, beam=BeamParams(4))
        scheduler.add(request)
        run(scheduler, executor)
    node = cached_prefix(scheduler.kv, ints(*range(64)), 64).blocks[3]
    assert scheduler.kv.pool.policy.probability(node) < 0.2, "nobody has asked for it again"
    assert scheduler.prefix_hits[1] == 0


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


def shared(one: list[int], other: list[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count

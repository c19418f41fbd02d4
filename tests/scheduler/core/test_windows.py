"""Groups of windowed layers: blocks behind the window go, prefixes begin at snapshots, and all share one arena."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.kv_cache_manager import ArenaShape
from pagewise_scheduler.core.tiers.windows import WindowShape
from pagewise_shared.config.options import EvictionName
from pagewise_shared.protocol import StepPlan, StepResult, decode_from_scheduler, encode

from tests.scheduler.core import checking_executor
from tests.scheduler.core.builders import create_request
from tests.scheduler.core.driving import check_states, executor_for, expected_tokens, run
from tests.scheduler.core.rules import check_rules
from tests.scheduler.core.test_memory_rules import MemoryRules, SpeculationRules


def create(
    num_pages: int, pages: int, windows: tuple[WindowShape, ...], *, budget: int = 32, seqs: int = 8,
    block_size: int = 4, eviction: EvictionName = "lru",
) -> Scheduler:  # fmt: skip
    shape = ArenaShape(num_pages, pages, windows, 2 * budget)
    return Scheduler(
        num_blocks=num_pages // pages,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        shape=shape,
        eviction=eviction,
    )


def check_arena(scheduler: Scheduler) -> None:
    """Pages add up, and without requests everything that is held may be evicted."""
    kv = scheduler.kv
    check_states(kv.pool)
    arena = kv._arena
    used = kv.pool.num_used * kv.pool.pages_per_block  # type: ignore[attr-defined]
    used += sum(group.num_used * group.pages_per_block for group in kv.windows)
    assert 0 <= arena.num_free == arena.num_pages - used
    for group in kv.windows:
        held = [0] * group.num_blocks
        for snapshot in group.at.values():
            for block in snapshot.blocks:
                held[block] += 1
        assert held == group._snapshots
        assert group.num_cached == sum(1 for block in range(group.num_blocks) if held[block] and not group.users(block))
        free = set(group._free)
        assert len(free) == len(group._free)
        assert all((block in free) == (not held[block] and not group.users(block)) for block in range(group.num_blocks))
    mapped = 0
    for member in arena.members:
        mapped += (member.num_blocks - member.num_unmapped) * member.pages_per_block
        assert 0 <= member.num_unmapped <= member.num_blocks - member.num_used
    assert mapped <= arena.num_pages
    if not scheduler.requests and not scheduler.steps_in_flight:
        assert kv.num_available == arena.num_pages


def test_a_sequence_keeps_its_window_alone() -> None:
    scheduler = create(200, 1, (WindowShape(8, 1),))
    executor = executor_for(scheduler)
    request = create_request(prompt=40, max_tokens=60)
    scheduler.add(request)
    run(scheduler, executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    check_arena(scheduler)
    assert scheduler.kv.pool.num_used == 99 // 4
    assert scheduler.kv.windows[0].num_used <= 2 * 3


def test_a_prompt_begins_where_a_chunk_ends() -> None:
    """No token behind the end of a chunk sees the tokens before it, so no snapshot is needed there."""
    scheduler = create(200, 1, (WindowShape(16, 1, chunked=True),))
    executor = executor_for(scheduler)
    for tokens, cached in ((range(40), 0), (range(38), 32), (range(34), 32), (range(31), 16), (range(15), 0)):
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
    scheduler = create(200, 1, (WindowShape(8, 1),))
    executor = executor_for(scheduler)
    first = create_request(prompt=[*range(40)], max_tokens=12)
    scheduler.add(first)
    run(scheduler, executor)
    answer = first.sequences[0].output_token_ids.tolist()
    for tokens, cached in (([*range(40), *answer, 7, 7], 48), ([*range(40), 9, 9], 40), ([*range(30), 9, 9], 0)):
        request = create_request(prompt=tokens, max_tokens=3)
        scheduler.add(request)
        run(scheduler, executor)
        assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
        assert request.num_cached_tokens == cached
    check_arena(scheduler)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_all_tokens_are_right_whatever_shares_the_arena(seed: int) -> None:
    """Sequences share prefixes, are preempted and aborted, and steps fail, in a small arena."""
    rng = random.Random(seed)
    windows = tuple(
        WindowShape(rng.choice((1, 3, 4, 8, 13)), rng.choice((1, 2, 5)), rng.random() < 0.3)
        for _ in range(rng.choice((1, 1, 2)))
    )
    pages, budget, longest = rng.choice((1, 2, 5)), rng.choice((3, 8, 32)), 40
    needed = create(10**6, pages, windows, budget=budget).kv.room_for(longest)
    scheduler = create(
        needed + rng.randrange(60), pages, windows, budget=budget, seqs=rng.choice((1, 3, 8)),
        eviction=rng.choice(("lru", "cost")),
    )  # fmt: skip
    executor = executor_for(scheduler)
    base = [rng.randrange(1000) for _ in range(30)]
    requests: list[Request] = []
    in_flight: deque[StepResult] = deque()
    epoch = 1
    for _ in range(rng.choice((20, 80))):
        match rng.randrange(12):
            case 0 | 1 | 2:
                prompt = [*base[: rng.randrange(25)], *(rng.randrange(1000) for _ in range(rng.randrange(1, 5)))]
                request = create_request(prompt, rng.randrange(1, longest - len(prompt)), n=rng.choice((1, 1, 2)))
                requests.append(request)
                scheduler.add(request)
            case 3 if requests:
                scheduler.abort(rng.choice(requests).request_id)
            case 4 if in_flight and rng.random() < 0.3:
                epoch += 1
                in_flight.clear()
                failed = scheduler.fail(epoch)
                requests = [request for request in requests if request not in failed]
                executor.reset(epoch)
            case _ if len(in_flight) < 2 and (plan := scheduler.schedule(0.0)) is not None:
                decoded = decode_from_scheduler(encode(plan))
                assert isinstance(decoded, StepPlan)
                in_flight.append(executor.execute(decoded))
            case _ if in_flight:
                scheduler.update(in_flight.popleft())
        check_arena(scheduler)
    while in_flight:
        scheduler.update(in_flight.popleft())
    run(scheduler, executor)
    for request in requests:
        for sequence in request.sequences:
            if sequence.finish_reason != "abort":
                assert sequence.output_token_ids.tolist() == expected_tokens(request)
    check_arena(scheduler)


class WindowRules(MemoryRules):
    """The memory rules with groups of windowed layers."""

    has_segments = False

    def shape(self, num_blocks: int, budget: int) -> ArenaShape:
        rng = random.Random(f"{num_blocks} {budget}")
        windows = tuple(
            WindowShape(rng.randrange(1, 9), rng.choice((1, 2, 5)), rng.random() < 0.3)
            for _ in range(rng.choice((1, 2)))
        )
        pages = rng.choice((1, 2, 5))
        return ArenaShape(
            num_blocks * (pages + sum(one.pages_per_block for one in windows)), pages, windows, 2 * budget
        )

    @invariant()
    def arena_adds_up(self) -> None:
        check_arena(self.scheduler)


class WindowSpeculationRules(WindowRules):
    speculative = SpeculationRules.speculative


@pytest.mark.parametrize("drafts", [False, True])
def test_the_memory_rules_hold_with_windows(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking_executor, "repeats_itself", drafts)
    check_rules(WindowSpeculationRules if drafts else WindowRules, 60)

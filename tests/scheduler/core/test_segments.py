"""Segments in the scheduler: earlier and likely errors."""

from collections.abc import Iterable, Mapping

import pytest
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs
from pagewise_scheduler.core.tiers.device import hottest_prefixes
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_scheduler.server.draining import _copy_request
from pagewise_shared.protocol import HOST, pack_int32s
from pagewise_shared.segments import ALL_BEFORE, make_segments, mark_segments

from tests.scheduler.core.builders import create_request, create_scheduler, evict
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import executor_for, expected_tokens, run

ROOT = list(range(8))
FIRST, SECOND, THIRD = list(range(600, 608)), list(range(500, 540)), list(range(700, 720))


def segmented(
    prompt: list[int], ranges: list[tuple[int, int]], max_tokens: int = 3, root: int = ALL_BEFORE, **fields: object
) -> Request:
    request = create_request(prompt=prompt, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    request.segments = make_segments(len(prompt), ranges, root=root)
    mark_segments(request.prompt_token_ids, request.segments)
    return request


def serve(scheduler: Scheduler, executor: CheckingExecutor, request: Request) -> Request:
    scheduler.add(request)
    run(scheduler, executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    return request


def test_the_first_of_the_queue_may_turn_out_not_to_be_needed() -> None:
    """A better request goes before a waiting one, and computes its segment: ``_best`` asks for the window of a sequence
    that has left the queue, and the whole engine ends with a KeyError."""
    scheduler = create_scheduler(num_blocks=200, max_num_batched_tokens=64, max_num_seqs=1)
    executor = executor_for(scheduler)
    ranges = [(8, 16), (16, 56), (56, 76)]
    waiting = segmented([*ROOT, *FIRST, *SECOND, *THIRD, 9, 9], ranges, priority=1, arrival_time=0.0)
    scheduler.add(waiting)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    result = executor.execute(plan)
    better = segmented([*ROOT, *FIRST, *SECOND, *range(100, 110)], ranges[:2], arrival_time=1.0)
    scheduler.add(better)
    scheduler.update(result)
    run(scheduler, executor, depth=1)
    assert waiting.finished
    assert better.finished


def test_the_first_of_the_queue_ends_when_a_better_choice_lacks_room() -> None:
    """The head of the queue is to compute an original that another request has computed. A sequence of its window finds
    the original, which ends the head, and does not fit: the head must not take its place."""
    scheduler = create_scheduler(num_blocks=64, max_num_batched_tokens=256)
    executor = executor_for(scheduler)
    prefix = list(range(32))
    serve(scheduler, executor, segmented([*prefix, *THIRD, 9], [(32, 52)], root=8))
    first = segmented([*ROOT, *FIRST, 9], [(8, 16)], arrival_time=2000.0)
    scheduler.add(first)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    wanting = segmented([*prefix, *FIRST, *range(100, 180)], [(32, 40)], root=8, arrival_time=1000.0)
    scheduler.add(wanting)
    assert scheduler.schedule(0.0) is None, "the original is being computed"
    better = create_request(prompt=150, max_tokens=1, priority=-1, arrival_time=1000.0)
    scheduler.add(better)
    further = scheduler.schedule(0.0)
    assert further is not None
    scheduler.update(executor.execute(plan))
    last = scheduler.schedule(0.0)
    assert scheduler.features.segments.num_withdrawn == 1
    assert wanting.sequences[0].row < 0
    scheduler.update(executor.execute(further))
    if last is not None:
        scheduler.update(executor.execute(last))
    run(scheduler, executor)
    for request in (first, wanting, better):
        assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)


def nodes(count: int, costs: Costs, num_blocks: Mapping[str, int]) -> list[tuple[Scheduler, CheckingExecutor]]:
    directory, made = PrefixDirectory(), []
    for number in range(count):
        scheduler = create_scheduler(recovery="auto", costs=costs, **num_blocks)
        scheduler.recoveries.planner.join(directory, Peer(f"node {number}", "", scheduler, lambda: None))
        made.append((scheduler, executor_for(scheduler)))
    for _, executor in made:
        executor.peers = {f"node {number}": other for number, (_, other) in enumerate(made)}
    return made


def test_a_peer_has_less_than_the_own_host_and_is_faster() -> None:
    """The originals behind all that is cached here are held, but the sequence begins with the peer's blocks: nothing is
    moved for the segments in between, and their slots hold whatever was there before."""
    costs = Costs(step=1e-4, token=1e-1, tiers={HOST: CopyCosts(load_block=1.0)}, fetch_setup=1e-5, fetch_block=1e-5)
    holder, fetcher = nodes(2, costs, {"num_blocks": 40, "num_host_blocks": 200})
    prompt = [*ROOT, *range(500, 512), *range(20, 28), *range(600, 612), *range(40, 48)]
    ranges = [(8, 20), (28, 40)]
    serve(*fetcher, segmented(prompt, ranges, 20))
    evict(fetcher[0], 40)
    serve(*fetcher, create_request(prompt=list(range(1000, 1150))))
    serve(*holder, segmented([*prompt[:24], 9], ranges[:1]))
    serve(*fetcher, segmented(prompt, ranges))


@pytest.mark.parametrize("fetch_block", [1e-5, 1.0])
def test_a_conversation_goes_on_at_another_executor(fetch_block: float) -> None:
    """Its prefix comes from there with the segments in their places, so they are not computed, unless that is
    faster."""
    costs = Costs(step=1e-4, token=1e-3, fetch_setup=1e-5, fetch_block=fetch_block)
    holder, fetcher = nodes(2, costs, {"num_blocks": 100})
    prompt, ranges = [*ROOT, *SECOND, *THIRD, *range(40, 48)], [(8, 48), (48, 68)]
    first = serve(*holder, segmented(prompt, ranges))
    turn = [*prompt, *first.sequences[0].output_token_ids, *range(60, 70)]
    following = serve(*fetcher, segmented(turn, ranges))
    fetched = fetch_block < 1
    assert fetcher[0].features.segments.num_requests == (0 if fetched else 2)
    assert following.num_cached_tokens >= (len(prompt) // 4 * 4 if fetched else 0)
    assert not fetcher[0].features.prefetches.active
    elsewhere = segmented([*prompt[:68], *range(80, 90)], ranges)
    holder[0].release_all()
    holder[0].recoveries.planner.directory.peers.clear()  # type: ignore[union-attr]
    serve(*fetcher, elsewhere)


def test_what_a_draining_executor_leaves_is_computed_elsewhere() -> None:
    """The copy of a prefix has marked tokens and no segments: missing blocks are neither moved nor computed, and are
    cached under the names of the right ones."""
    scheduler = create_scheduler()
    serve(scheduler, executor_for(scheduler), segmented([*ROOT, *range(500, 512), *range(20, 28)], [(8, 20)]))
    other = create_scheduler()
    executor = executor_for(other)
    for prefix in hottest_prefixes(scheduler.kv.pool, 10):
        other.add(_copy_request(prefix))  # recomputing may be cheaper than fetching, or the fetch fails
        run(other, executor)


def test_originals_are_not_longer_than_the_model_allows() -> None:
    """The rest of a block and one more token come behind root and segment: executors refuse rows that are too long."""
    scheduler = Scheduler(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32)
    too_long, fits = segmented([*range(31)], [(8, 29)], 1), segmented([*range(31)], [(8, 28)], 1)
    assert not scheduler.fits(31, 1, too_long.segments)
    with pytest.raises(ValueError, match="needs more"):
        scheduler.add(too_long)
    scheduler.add(fits)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert all(len(new.tokens) // 4 <= 32 for new in plan.joined)


def test_a_step_fails_that_computes_an_original_nobody_waits_for() -> None:
    """``fail`` returns a request that has ended: ``ExecutorHandle._start_over`` looks for it among the living, with a
    KeyError."""
    scheduler = create_scheduler(max_num_batched_tokens=4)
    request = segmented([*ROOT, *SECOND, 9], [(8, 48)])
    scheduler.add(request)
    assert scheduler.schedule(0.0) is not None
    scheduler.abort(request.request_id)
    assert [one.request_id for one in scheduler.fail(2)] == []


def test_cached_tokens_count_segments_besides_what_was_loaded() -> None:
    scheduler = create_scheduler(num_blocks=40, num_host_blocks=200, recovery="swap")
    executor = executor_for(scheduler)
    for tier in scheduler.kv.pool.lower:
        tier.max_arriving = 1000
    prompt = [*ROOT, *FIRST, *range(20, 28), *SECOND, 9, 9]
    serve(scheduler, executor, segmented([*prompt[:24], 5], [(8, 16)]))
    evict(scheduler, 40)
    serve(scheduler, executor, create_request(prompt=[*ROOT, *SECOND, 5]))
    request = serve(scheduler, executor, segmented(prompt, [(8, 16), (24, 64)]))
    assert request.cached_tokens["host"] == 16
    assert request.num_cached_tokens == 24 + 40


def test_who_waits_lets_go_before_who_runs_is_preempted() -> None:
    """A sequence that waits for a row holds originals; a running one of a better priority that lacks a block loses all
    of its own."""
    scheduler = create_scheduler(num_blocks=48, max_num_batched_tokens=128, max_num_seqs=2)
    executor = executor_for(scheduler)
    running = [create_request(prompt=[one] * 20, max_tokens=70, arrival_time=0.0, priority=-1) for one in (1, 2)]
    scheduler.add(running[0])
    scheduler.add(segmented([*ROOT, *SECOND, *THIRD, 9], [(8, 48), (48, 68)], arrival_time=1.0))
    for step in range(4):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        if step == 1:
            scheduler.add(running[1])
        scheduler.update(executor.execute(plan))
    held = scheduler.features.segments.num_held
    run(scheduler, executor, depth=1)
    assert held == 0 or [one.sequences[0].num_preemptions for one in running] == [0, 0]


def test_planning_many_segments_behind_a_long_root_is_not_work_for_each_of_them() -> None:
    """The root is cut and looked up once, and few originals at a time are computed, each of which has it once more."""
    scheduler = create_scheduler(num_blocks=40_000, block_size=16, max_num_batched_tokens=8192, max_num_seqs=64)
    prompt = [number % 1000 + 1 for number in range(20_000)]
    ranges = []
    for number in range(1000):
        ranges.append((len(prompt), len(prompt) + 20))
        prompt += [(number * 7 + each) % 30000 + 1 for each in range(20)]
    request = segmented([*prompt, 5], ranges)
    scheduler.add(request)
    scheduler.schedule(0.0)
    (prepared,) = scheduler.features.segments._prepared.values()
    keys = [key for original in prepared.distinct for key in original.keys]
    assert len(prepared.root) == 20_000 // 16
    assert sum(map(len, keys)) <= 4 * 2 * len(prompt)
    assert 0 < len(scheduler.features.segments.requests) <= 16


def test_who_dies_with_an_original_is_blamed() -> None:
    """``ExecutorHandle._count_deaths`` looks for the requests of the steps in flight among the living: a request whose
    segment kills executors is never blamed, and moves to the next one without end."""
    scheduler = create_scheduler()
    request = segmented([*ROOT, *SECOND, 9], [(8, 48)])
    scheduler.add(request)
    assert scheduler.schedule(0.0) is not None
    assert request in scheduler.steps_in_flight[0].requests


def test_what_waits_for_a_request_is_about_its_prompt() -> None:
    """Originals wait with their roots, so that one request takes the room of ``--max-waiting-tokens`` from all others,
    and its key is charged for each root."""
    scheduler = create_scheduler(num_blocks=2000)
    root = list(range(1000))
    ranges = [(1000 + 4 * number, 1004 + 4 * number) for number in range(100)]
    request = segmented([*root, *range(1000, 1400), 9], ranges)
    scheduler.add(request)
    scheduler.schedule(0.0)
    assert scheduler.waiting.num_prompt_tokens <= 2 * len(request.prompt_token_ids)
    assert len(scheduler.waiting) <= 2


def test_eviction_learns_that_segments_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = create_scheduler(eviction="cost")
    executor = executor_for(scheduler)
    policy, uses = scheduler.kv.pool.policy, 0
    told = policy.used

    def used(blocks: Iterable[CachedBlock], ending: int) -> None:
        nonlocal uses
        blocks = list(blocks)
        uses += any(pack_int32s(SECOND[4:8]) == block.tokens for block in blocks)
        told(blocks, ending)

    monkeypatch.setattr(policy, "used", used)
    for number in range(5):
        serve(scheduler, executor, segmented([*ROOT, 900 + number, 9, 9, 9, *SECOND, 9], [(12, 52)]))
    assert uses == 5, "titles that stand before the first segment are part of the root: each has its own"
    for number in range(5):
        request = create_request(prompt=[*ROOT, 900 + number, 9, 9, 9, *SECOND, 9], max_tokens=3)
        request.segments = make_segments(len(request.prompt_token_ids), [(12, 52)], root=8)
        mark_segments(request.prompt_token_ids, request.segments)
        serve(scheduler, executor, request)
    assert uses == 5 + 5


def test_what_computes_originals_does_not_wait_for_the_garbage_collector() -> None:
    """A request and its sequences hold each other; here no code outside breaks the cycle when they end."""
    scheduler = create_scheduler()
    executor = executor_for(scheduler)
    scheduler.add(segmented([*ROOT, *SECOND, 9, *FIRST, 9], [(8, 48), (49, 57)]))
    assert scheduler.schedule(0.0) is not None
    known = list(scheduler.features.segments.requests)
    scheduler.fail(2)
    assert scheduler.schedule(0.0) is not None
    known += scheduler.features.segments.requests
    scheduler.fail(3)
    executor.reset(3)
    run(scheduler, executor)
    assert len(known) == 4
    assert all(one.sequences == [] for one in known)


@pytest.mark.parametrize("num_taken", range(4, 16))
def test_originals_that_are_held_for_a_start_leave_less_room_for_it(num_taken: int) -> None:
    """A prompt whose last block matches in part is cached but for a segment in that block. Its start holds the
    original of the segment, which is cached too, and copies the last block: together that may be more than is free."""
    scheduler = create_scheduler(num_blocks=24, block_size=5, max_num_batched_tokens=200)
    executor = executor_for(scheduler)

    def again() -> Request:
        request = create_request(prompt=[*range(36), 800, 801, 802, 9], max_tokens=0)
        request.segments = make_segments(40, [(36, 39)], root=0)
        mark_segments(request.prompt_token_ids, request.segments)
        return request

    scheduler.add(again())
    run(scheduler, executor)
    aborted = create_request(prompt=[7] * (5 * num_taken - 1), max_tokens=4)
    scheduler.add(aborted)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    result = executor.execute(plan)
    scheduler.abort(aborted.request_id)  # its blocks are not free before the step is back, though nothing runs
    scheduler.add(again())
    further = scheduler.schedule(0.0)
    scheduler.update(result)
    if further is not None:
        scheduler.update(executor.execute(further))
    run(scheduler, executor)

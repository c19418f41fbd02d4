"""Which request starts next, which one waits for another, and which one is preempted."""

from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.requests.waiting_queue import AGEING_SECONDS, WaitingQueue
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import CostModel, Costs
from pagewise_shared.protocol import StepPlan

from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.driving import executor_for, expected_tokens, run

SYSTEM = list(range(500, 524))


def joined(plan: StepPlan | None) -> list[bytes]:
    assert plan is not None
    return [new.tokens for new in plan.joined]


def prompt_bytes(request: Request) -> bytes:
    return request.prompt_token_ids.tobytes()


def test_a_prompt_that_somebody_is_computing_is_waited_for_and_not_computed_twice() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=64)
    executor = executor_for(scheduler)
    requests = [create_request(prompt=[*SYSTEM, number], max_tokens=3) for number in range(4)]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert len(joined(plan)) == 1
    assert plan is not None
    scheduler.update(executor.execute(plan))
    run(scheduler, executor)
    assert [request.num_cached_tokens for request in requests] == [0, 24, 24, 24]
    assert [request.sequences[0].output_token_ids.tolist() for request in requests] == [
        expected_tokens(r) for r in requests
    ]


def test_others_go_on_while_one_waits_for_a_prefix() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=64)
    first = create_request(prompt=[*SYSTEM, 1], max_tokens=3)
    duplicate = create_request(prompt=[*SYSTEM, 2], max_tokens=3)
    stranger = create_request(prompt=[9] * 8, max_tokens=3)
    for request in (first, duplicate, stranger):
        scheduler.add(request)
    assert joined(scheduler.schedule(0.0)) == [prompt_bytes(first), prompt_bytes(stranger)]


def test_the_longest_cached_prefix_goes_first_but_the_head_is_not_passed_over_for_ever() -> None:
    scheduler = create_scheduler(max_num_seqs=1, num_blocks=200)
    executor = executor_for(scheduler)
    scheduler.add(create_request(prompt=SYSTEM, max_tokens=1))
    run(scheduler, executor)
    head = create_request(prompt=[7] * 9, max_tokens=1)
    scheduler.add(head)
    served: list[bytes] = []
    for number in range(60):
        follower = create_request(prompt=[*SYSTEM, number], max_tokens=1)
        scheduler.add(follower)
        while not follower.finished and not head.finished:
            plan = scheduler.schedule(0.0)
            assert plan is not None
            served += joined(plan)
            scheduler.update(executor.execute(plan))
        if head.finished:
            break
    assert served.index(prompt_bytes(head)) == 32
    assert served[0] != prompt_bytes(head)


def test_waiting_long_makes_up_for_a_worse_priority() -> None:
    queue = WaitingQueue()
    requests = [
        create_request(priority=1, arrival_time=0.0),
        create_request(priority=0, arrival_time=AGEING_SECONDS - 1),
        create_request(priority=0, arrival_time=AGEING_SECONDS + 1),
    ]
    for request in requests:
        request.create_sequences()
        queue.push(request.sequences[0])
    order = [sequence.request for sequence in queue]
    assert order == [requests[1], requests[0], requests[2]]


def running(scheduler: Scheduler, *requests: Request) -> list[RequestSequence]:
    executor = executor_for(scheduler)
    for request in requests:
        scheduler.add(request)
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(executor.execute(plan))
    return scheduler.running


def victim_of(scheduler: Scheduler) -> Request:
    return scheduler.recoveries.planner.choose_victim(scheduler.running).request


def test_the_lowest_priority_gives_way_and_the_first_in_line_never_does() -> None:
    scheduler = create_scheduler()
    first = create_request(prompt=8, max_tokens=9, priority=0)
    urgent = create_request(prompt=8, max_tokens=9, priority=-1)
    low = create_request(prompt=8, max_tokens=9, priority=5)
    running(scheduler, first, urgent, low)
    assert victim_of(scheduler) is low
    alone = create_scheduler()
    only = create_request(prompt=8, max_tokens=9)
    running(alone, only)
    assert victim_of(alone) is only


def test_the_victim_is_the_cheapest_to_recover_per_block_that_becomes_free() -> None:
    # A step costs more than all tokens in it: a sequence with many blocks pays for it once.
    scheduler = create_scheduler(num_blocks=100, max_num_batched_tokens=64, costs=Costs(step=1.0, token=1e-3))
    oldest = create_request(prompt=4, max_tokens=9)
    large = create_request(prompt=40, max_tokens=9)
    small = create_request(prompt=8, max_tokens=9)
    running(scheduler, oldest, large, small)
    assert victim_of(scheduler) is large
    # Attention that grows with the square makes the long one the expensive one.
    scheduler.recoveries.planner.costs = CostModel(Costs(step=0.0, token=0.0, attention=1.0), 4, 64)
    assert victim_of(scheduler) is small


def test_blocks_that_others_share_are_no_gain() -> None:
    scheduler = create_scheduler(num_blocks=100, max_num_batched_tokens=64, costs=Costs(step=1.0, token=1e-3))
    oldest = create_request(prompt=4, max_tokens=9)
    base = create_request(prompt=SYSTEM, max_tokens=9)
    sharing = create_request(prompt=[*SYSTEM, 1, 2], max_tokens=9)
    alone = create_request(prompt=16, max_tokens=9)
    running(scheduler, oldest, base, sharing, alone)
    assert scheduler.running[2].num_tokens > scheduler.running[3].num_tokens
    assert victim_of(scheduler) is alone, "the others are longer, but their blocks stay in use"

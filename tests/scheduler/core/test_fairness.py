"""Keys that wait are served in turn, by tokens; one key alone is served as if there were none."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_scheduler.core.requests.request import Request, RequestSequence, SequenceStatus
from pagewise_scheduler.core.requests.virtual_tokens import OUTPUT_WEIGHT, PROMPT_WEIGHT, VirtualTokens
from pagewise_scheduler.core.requests.waiting_queue import WaitingQueue
from pagewise_scheduler.core.scheduling.scheduler import Scheduler

from tests.core_requests import change
from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.driving import executor_for, run


class Service:
    """A scheduler under load, and the weighted tokens that it has served each key so far."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.executor = executor_for(scheduler)
        self.served: defaultdict[str, float] = defaultdict(float)
        self.known: dict[Request, int] = {}

    def send(
        self, key: str, prompt: int, max_tokens: int, priority: int = 0, arrival_time: float | None = None
    ) -> Request:
        request = create_request(prompt, max_tokens, priority=priority, arrival_time=arrival_time)
        change(request, key=key)
        self.scheduler.add(request)
        self.known[request] = 0
        return request

    def step(self) -> None:
        plan = self.scheduler.schedule(0.0)
        assert plan is not None
        self.scheduler.update(self.executor.execute(plan))
        for request, told in list(self.known.items()):
            tokens = len(request.sequences[0].output_token_ids)
            if not told and request.scheduled_time == request.scheduled_time:
                self.served[request.params.key] += PROMPT_WEIGHT * len(request.prompt_token_ids)
                told = 1
            self.served[request.params.key] += OUTPUT_WEIGHT * (tokens + 1 - told if told else 0)
            self.known[request] = tokens + 1 if told else 0
            if request.finished:
                del self.known[request]

    def waiting(self, key: str) -> int:
        return sum(sequence.request.params.key == key for sequence in self.scheduler.waiting)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 20))


@settings(max_examples=20, deadline=None)
@given(small=sizes, large=sizes, rows=st.integers(1, 8), flood=st.integers(2, 40), budget=st.integers(8, 64))
def test_two_backlogged_keys_are_served_within_the_bound(
    small: tuple[int, int], large: tuple[int, int], rows: int, flood: int, budget: int
) -> None:
    service = Service(create_scheduler(num_blocks=200, max_num_seqs=rows, max_num_batched_tokens=budget))
    longest = max(small[0], large[0])
    in_batch = rows * max(sum(small), sum(large))
    bound = 2 * max(PROMPT_WEIGHT * longest, OUTPUT_WEIGHT * in_batch)
    for _ in range(flood):
        service.send("flood", *large)
    service.send("steady", *small)
    differences = []
    for _ in range(100):
        while service.waiting("steady") <= rows:  # or a step could start them all
            service.send("steady", *small)
        while service.waiting("flood") <= rows + flood:
            service.send("flood", *large)
        service.step()
        differences.append(service.served["flood"] - service.served["steady"])
    assert max(differences) - min(differences) <= bound
    assert service.served["steady"] > 0


def test_a_key_that_floods_does_not_make_another_wait_for_its_requests() -> None:
    service = Service(create_scheduler(max_num_seqs=2))
    for _ in range(100):
        service.send("flood", 8, 8)
    service.step()
    late = service.send("late", 8, 8)
    while not late.finished:
        service.step()
    assert service.waiting("flood") >= 95


def test_unused_turns_are_not_saved() -> None:
    service = Service(create_scheduler(max_num_seqs=1))
    service.send("idle", 4, 1)
    for _ in range(40):
        service.send("busy", 8, 8)
    for _ in range(200):
        service.step()
    busy = service.served["busy"]
    for _ in range(40):
        service.send("idle", 8, 8)
    before = service.served["idle"]
    for _ in range(160):
        service.step()
    got, other = service.served["idle"] - before, service.served["busy"] - busy
    assert abs(got - other) <= 2 * OUTPUT_WEIGHT * 16, "it has been away, and is served from now on like the other"


def test_fairness_holds_within_a_priority_and_not_between_them() -> None:
    scheduler = create_scheduler(max_num_seqs=1)
    service = Service(scheduler)
    urgent = [service.send("greedy", 20, 4, priority=-5) for _ in range(3)]
    modest = service.send("modest", 4, 4)
    while not modest.finished:
        service.step()
    assert all(request.finished for request in urgent)


def test_requests_that_have_grown_old_do_not_leave_other_keys_behind() -> None:
    """A flood of a worse priority that has waited for minutes is before newer requests, but not before other keys."""
    service = Service(create_scheduler(max_num_seqs=2))
    for _ in range(100):
        service.send("flood", 8, 8, priority=1, arrival_time=0.0)
    service.step()
    late = service.send("late", 8, 8, arrival_time=1000.0)
    while not late.finished:
        service.step()
    assert service.waiting("flood") >= 95


def test_a_key_whose_prompt_somebody_computes_lets_the_next_key_start() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=64)
    prompt = list(range(700, 724))
    sharing = [create_request([*prompt, number], 3, arrival_time=float(number)) for number in range(2)]
    other = create_request(8, 3, arrival_time=5.0)
    change(other, key="other")
    scheduler.add(sharing[0])
    executor = executor_for(scheduler)
    for request in (sharing[1], other):
        scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [new.tokens for new in plan.joined] == [
        request.prompt_token_ids.tobytes() for request in (sharing[0], other)
    ]
    scheduler.update(executor.execute(plan))
    run(scheduler, executor)
    assert sharing[1].num_cached_tokens == 24


def test_schedulers_of_one_fleet_share_the_accounts() -> None:
    shared = VirtualTokens()
    elsewhere, here = WaitingQueue(shared), WaitingQueue(shared)
    requests = {key: create_request(arrival_time=0.0 if key == "served" else 1.0) for key in ("served", "new")}
    for key, request in requests.items():
        change(request, key=key)
        request.create_sequences()
        here.arrive(request)
        here.push(request.sequences[0])
    first = here.peek()
    assert first is not None
    assert first.request.params.key == "served"
    shared.account("served").served += 10
    assert [head.request.params.key for head in here.heads(5)] == ["new", "served"]
    assert len(elsewhere) == 0
    here.clear()
    assert all(shared.account(key).num_waiting == 0 for key in requests)


def test_the_prompt_of_a_beam_search_waits_once() -> None:
    shared = VirtualTokens()
    queue, request = WaitingQueue(shared), create_request(10)
    request.create_sequences()
    queue.arrive(request)
    (first,) = request.sequences
    others = [RequestSequence(request, 0, first.sampling, first.table) for _ in range(2)]
    for number, sequence in enumerate([first, *others]):
        queue.push(sequence)
        assert (len(queue), queue.num_prompt_tokens, request.account.num_prompt_tokens) == (number + 1, 10, 10)
    for sequence in [*others, first]:
        assert queue.num_prompt_tokens == 10
        queue.take(sequence, SequenceStatus.PREFILL)
    assert queue.num_prompt_tokens == request.account.num_prompt_tokens == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 300)), min_size=1, max_size=60))
def test_one_key_waits_in_the_order_of_priority_and_arrival(arrivals: list[tuple[int, float]]) -> None:
    queue = WaitingQueue()
    for priority, arrival in arrivals:
        request = create_request(7, priority=priority, arrival_time=arrival)
        request.create_sequences()
        queue.arrive(request)
        queue.push(request.sequences[0])
    assert queue.num_prompt_tokens == 7 * len(arrivals)
    order = list(queue)
    while order:
        head = queue.peek()
        assert head is order[0]
        assert queue.heads(16) == [head]
        same = [sequence for sequence in order[:16] if sequence.request.params.priority == head.request.params.priority]
        assert queue.window(head, 16) == same
        queue.take(order.pop(0), SequenceStatus.FINISHED)
    assert queue.peek() is None
    assert (len(queue), queue.num_prompt_tokens) == (0, 0)

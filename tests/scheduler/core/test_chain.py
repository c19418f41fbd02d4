"""The chain of tiers: blocks that one evicts move to the next one that wants them, with ids or without, and one prefix
comes back from all of them at once."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pagewise_gateway.http.explanation import sentences
from pagewise_scheduler.core.request_report import request_report
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.routing.executor_view import ExecutorView
from pagewise_scheduler.core.routing.policies import cheapest_recovery, look_up
from pagewise_scheduler.core.routing.prompts import PrefixQuery
from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs, Link, together
from pagewise_scheduler.core.tiers.peer import PrefixDirectory
from pagewise_scheduler.core.tiers.recovery_plan import Offer, RecoveryMode, compose
from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import DEVICE, DISK, HOST, REDIS, StepPlan

from tests.core_requests import change
from tests.scheduler.core.builders import FURTHER, create_request, create_scheduler, evict, host_of, recoveries_of
from tests.scheduler.core.checking_executor import Content
from tests.scheduler.core.driving import assert_all_free, check_states, expected_tokens, num_stored, run
from tests.scheduler.core.fleets import Node
from tests.scheduler.core.rules import check_rules

PROMPT = list(range(60))
IDENTITIES = {DISK: "the disk of all", REDIS: "the store of all"}
CHEAP = Costs(step=1e-4, token=1e-2, fetch_setup=0.0, fetch_block=4e-3, tiers={
    HOST: CopyCosts(0.0, 1e-3), DISK: CopyCosts(0.0, 2e-3), REDIS: CopyCosts(0.0, 3e-3)
})  # fmt: skip


def node(
    storage: dict[BlockHash, Content],
    recovery: RecoveryMode = "swap",
    directory: PrefixDirectory | None = None,
    name: str = "node",
    **options: object,
) -> Node:
    """An executor with a disk cache of that content, and others in the directory from which it fetches."""
    options = {"costs": CHEAP, "hashed": {DISK: IDENTITIES[DISK]}} | options
    made = Node(name, directory or PrefixDirectory(), create_scheduler(recovery=recovery, **options))  # type: ignore[arg-type]
    made.executor.storage = storage
    return made


def serve(at: Node, prompt: list[int], *, looked_up: bool = True) -> Request:
    request = create_request(prompt=prompt, max_tokens=2)
    for tier in at.scheduler.kv.hashed.values() if looked_up else ():
        request.stored[tier.identity] = num_stored(at.scheduler, at.executor, request)
    at.scheduler.add(request)
    run(at.scheduler, at.executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    check_states(at.scheduler.kv.pool)
    return request


def without_write_back(at: Node, prompt: list[int]) -> None:
    """Compute a prompt that nothing is written of when it ends."""
    at.executor.full = True
    serve(at, prompt)
    at.executor.full = False
    assert not at.executor.storage


def evict_host(at: Node) -> list[tuple[int, int]]:
    """Let the host give up all it has; returns the tiers between which the next plan copies."""
    copies = host_of(at.scheduler).evict(1000)
    at.scheduler.plan.copy(copies)
    return [(source, target) for source, _, target, *_ in copies]


@pytest.mark.parametrize("num_host_blocks", [0, 32])
def test_what_the_last_tier_with_ids_gives_up_goes_to_the_disk(num_host_blocks: int) -> None:
    one = node({}, num_blocks=24, num_host_blocks=num_host_blocks)
    without_write_back(one, PROMPT)
    evict(one.scheduler, 24)
    source = HOST if num_host_blocks else DEVICE
    if num_host_blocks:
        assert set(evict_host(one)) == {(HOST, DISK)}
    run(one.scheduler, one.executor)
    serve(one, [1000])  # a plan that takes the copies along
    assert num_stored(one.scheduler, one.executor, create_request(prompt=PROMPT)) == 15
    counters = one.scheduler.kv.pool.counters
    assert counters.written >= 15
    assert counters.dropped == 0
    assert counters.lower_evicted[HOST] == (15 if source == HOST else 0)
    again = serve(node(one.executor.storage), PROMPT)
    assert again.cached_tokens["disk"] == 56
    assert_all_free(one.scheduler)


def test_what_comes_before_the_end_of_a_prefix_goes_down_with_it() -> None:
    """A tier without ids is asked how much it has from the beginning of a prompt on."""
    one = node({}, num_blocks=24, num_host_blocks=32)
    without_write_back(one, PROMPT)
    evict(one.scheduler, 24)
    host = host_of(one.scheduler)
    one.scheduler.plan.copy(host.evict(1))
    assert host.num_used == 14
    run(one.scheduler, one.executor)
    assert num_stored(one.scheduler, one.executor, create_request(prompt=PROMPT)) == 15
    assert host.num_used == 14, "the others stay where they are"
    assert evict_host(one) == [], "and need not be written again"


def test_a_busy_tier_is_passed_over() -> None:
    one = node({}, num_blocks=24, num_host_blocks=32, hashed=IDENTITIES)
    without_write_back(one, PROMPT)
    host_of(one.scheduler).max_arriving = 0
    one.scheduler.kv.hashed[DISK].max_arriving = 0
    copies = one.scheduler.kv.pool.evict(15)
    one.scheduler.plan.copy(copies)
    assert {(source, target) for source, _, target, *_ in copies} == {(DEVICE, REDIS)}


def test_nothing_is_demoted_where_recovering_it_would_not_pay() -> None:
    slow = Costs(step=1e-4, token=1e-6, tiers={DISK: CopyCosts(1.0, 1.0, 1.0, 1.0)})
    one = node({}, "auto", num_blocks=64, costs=slow)
    one.scheduler.kv.hashed[DISK].num_arriving = 1  # so that a copy costs something
    serve(one, PROMPT)
    assert one.scheduler.kv.pool.evict(64) == []
    assert one.scheduler.kv.pool.counters.dropped == 15


@pytest.mark.parametrize("salt", ["private", None])
def test_kv_of_requests_with_a_salt_is_not_demoted_where_it_must_not_be(salt: str | None) -> None:
    one = node({}, num_blocks=24, salted=False)
    request = create_request(prompt=PROMPT, max_tokens=2)
    change(request, cache_salt=salt)
    one.executor.full = True
    one.scheduler.add(request)
    run(one.scheduler, one.executor)
    copies = one.scheduler.kv.pool.evict(24)
    assert len(copies) == (0 if salt else 15)


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_a_prefix_comes_from_the_device_the_host_the_disk_and_a_peer_at_once(mode: RecoveryMode) -> None:
    directory, storage = PrefixDirectory(), dict[BlockHash, Content]()
    serve(node(storage), PROMPT[:40])
    one = node(storage, mode, directory, "one", num_blocks=40, num_host_blocks=32)
    other = node({}, "swap", directory, "other")
    one.executor.peers = {"other": other.executor}
    serve(other, PROMPT)
    serve(one, PROMPT[:24], looked_up=False)
    pool = one.scheduler.kv.pool
    for _ in range(4):
        one.scheduler.plan.copy(pool.evict(1))
    request = create_request(prompt=[*PROMPT, 999], max_tokens=2)
    request.stored[IDENTITIES[DISK]] = 10
    query, costs = PrefixQuery(request), one.scheduler.costs
    costs.tiers[DISK].load.dtype = "int8"
    predicted = cheapest_recovery(*(look_up(ExecutorView(each.scheduler), query) for each in (one, other)))
    rest = costs.compute_seconds(60, 1)
    recoveries = recoveries_of(one.scheduler)
    one.scheduler.add(request)
    plan = one.scheduler.schedule(0.0)
    assert plan is not None
    asked = [(copies.source, copies.peer is not None, len(copies.pairs) // 8) for copies in plan.copies]
    loads = [one for copies, one in zip(plan.copies, asked, strict=True) if copies.target == DEVICE]
    assert sorted(loads) == [(DEVICE, True, 5), (HOST, False, 4), (DISK, False, 4)]
    one.scheduler.update(one.executor.execute(plan))
    run(one.scheduler, one.executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    assert request.loaded_tokens == {"host": 16, "disk": 16, "peer": 20}
    assert request.num_cached_tokens == 60
    report = recoveries[-1]
    assert (report.origin, report.loaded_tokens, report.plan.peer) == ("peer", 52, "other")
    assert (predicted.seconds, predicted.start) == (pytest.approx(report.predicted + rest), 60), "as routing saw it"
    told = request_report(request, one.scheduler, 0.0, 100)
    assert told.events[-1].sources == ["host", "disk", "peer"]
    assert "on the host and on the disk (in int8) and at the executor other" in " ".join(sentences(told))
    assert {source: tokens for source, tokens in told.cached_tokens.items() if tokens} == {
        "device": 8, "host": 16, "disk": 16, "peer": 20
    }  # fmt: skip
    for each in (one, other):
        assert_all_free(each.scheduler)


def test_what_would_take_longer_than_computing_is_left_out() -> None:
    storage: dict[BlockHash, Content] = {}
    serve(node(storage), PROMPT)
    costs = Costs(step=1e-4, token=1e-3, tiers={HOST: CopyCosts(0.0, 1e-4), DISK: CopyCosts(10.0, 1.0)})
    one = node(storage, "auto", num_blocks=40, num_host_blocks=32, costs=costs)
    serve(one, PROMPT[:40], looked_up=False)
    evict(one.scheduler, 40)
    request = serve(one, [*PROMPT, 999])
    assert request.cached_tokens["host"] > 0
    assert request.cached_tokens["disk"] == 0


class _Tier:
    pass


def offer(tier: object, start: int, stop: int) -> Offer:
    return Offer(tier, start, stop, lambda start, stop: [])  # type: ignore[arg-type]


def test_each_block_comes_from_the_first_tier_that_has_it() -> None:
    near, far = _Tier(), _Tier()
    parts = compose([offer(near, 4, 6), offer(near, 8, 9), offer(far, 2, 10)])
    assert [(part.source, part.start, part.stop) for part in parts] == [
        (far, 2, 4), (near, 4, 6), (far, 6, 8), (near, 8, 9), (far, 9, 10)
    ]  # fmt: skip
    gap = compose([offer(near, 0, 2), offer(far, 3, 5)])
    assert [(part.source, part.start, part.stop) for part in gap] == [(near, 0, 2)]


def test_links_that_bring_blocks_at_the_same_time_take_as_long_as_the_slowest() -> None:
    fast, slow = Link(0.0, 1e-3), Link(0.5, 1e-2)
    assert together({fast: 7}, lambda link: 3) == (fast, 3)
    both, queued = together({fast: 90, slow: 10}, lambda link: 20 if link is slow else 0)
    assert both.seconds(100) == pytest.approx(0.5 + 10 * 1e-2)
    assert both.predict(0, queued) == pytest.approx(20 * 1e-2, rel=0.01)


class ChainRules(RuleBasedStateMachine):
    """Two executors with host memory, disk, store, and a further tier with ids below them, which fetch from each other.
    Everything moves at any time, and every read is checked by the executors."""

    @initialize(mode=st.sampled_from(["swap", "both", "auto"]), further=st.sampled_from([0, 12]))
    def begin(self, mode: RecoveryMode, further: int) -> None:
        directory, storage = PrefixDirectory(), dict[BlockHash, Content]()
        costs = Costs(step=1e-4, token=1e-2, fetch_setup=1e-4, fetch_block=1e-4, tiers={
            HOST: CopyCosts(1e-5, 1e-5), DISK: CopyCosts(1e-5, 2e-5), REDIS: CopyCosts(1e-4, 2e-4)
        })  # fmt: skip
        self.nodes = [
            node(storage, mode, directory, name, num_blocks=24, num_host_blocks=10, num_further_blocks=further,
                 max_num_seqs=4, costs=costs, hashed=IDENTITIES)
            for name in ("one", "other")
        ]  # fmt: skip
        for each in self.nodes:
            each.executor.peers = {other.name: other.executor for other in self.nodes}
        self.storage, self.requests = storage, list[Request]()

    @rule(
        at=st.integers(0, 1),
        prefix=st.integers(0, 1),
        length=st.sampled_from([9, 22, 40, 60, 60]),
        found=st.sampled_from([0, 1, 2, 3, 3]),
    )
    def add(self, at: int, prefix: int, length: int, found: int) -> None:
        scheduler, executor = self.nodes[at].scheduler, self.nodes[at].executor
        request = create_request(prompt=[1000 * prefix + i for i in range(length)], max_tokens=5)
        for bit, identity in enumerate(IDENTITIES.values()):
            if found >> bit & 1:
                request.stored[identity] = num_stored(scheduler, executor, request)
        scheduler.add(request)
        self.requests.append(request)

    def _steps(self, at: int, steps: int) -> None:
        each = self.nodes[at]
        for _ in range(steps):
            while each.scheduler.num_in_flight < 2 and (plan := each.scheduler.schedule(0.0)) is not None:
                assert isinstance(plan, StepPlan)
                each.results.append(each.executor.execute(plan))
            if each.results:
                each.scheduler.update(each.results.popleft())

    steps = rule(at=st.integers(0, 1), steps=st.integers(1, 5))(_steps)

    @rule(at=st.integers(0, 1), count=st.integers(1, 4))
    def copies_are_made(self, at: int, count: int) -> None:
        self.nodes[at].deliver(count)

    @rule(number=st.integers(0, 100))
    def the_disk_forgets(self, number: int) -> None:
        if self.storage:
            del self.storage[list(self.storage)[number % len(self.storage)]]

    @rule(at=st.integers(0, 1), full=st.booleans())
    def the_disk_is_full(self, at: int, full: bool) -> None:
        self.nodes[at].executor.full = full

    @rule(at=st.integers(0, 1), tier=st.sampled_from([DEVICE, HOST, FURTHER]), count=st.integers(1, 12))
    def blocks_are_evicted(self, at: int, tier: int, count: int) -> None:
        scheduler = self.nodes[at].scheduler
        if tier == DEVICE:
            evict(scheduler, count)
        elif tier in scheduler.kv.tiers:
            scheduler.plan.copy(scheduler.kv.tiers[tier].evict(count))

    @rule(at=st.integers(0, 1), happens=st.integers(0, 2))
    def executor_is_reset(self, at: int, happens: int) -> None:
        each = self.nodes[at]
        if not happens and each.scheduler.num_in_flight:
            epoch = each.scheduler.epoch + 1
            for request in each.scheduler.fail(epoch):
                self.requests.remove(request)
            each.results.clear()
            each.executor.reset(epoch)

    @rule(at=st.integers(0, 1), which=st.integers(0, 30))
    def abort(self, at: int, which: int) -> None:
        if self.requests:
            request = self.requests[which % len(self.requests)]
            if self.nodes[at].scheduler.abort(request.request_id):
                self.requests.remove(request)

    @invariant()
    def memory_adds_up(self) -> None:
        for each in self.nodes:
            check_states(each.scheduler.kv.pool)

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        for _ in range(5000):
            for at, each in enumerate(self.nodes):
                self._steps(at, 3)
                each.deliver()
            if not any(each.scheduler.requests or each.results for each in self.nodes):
                break
        for each in self.nodes:
            run(each.scheduler, each.executor)
            assert each.scheduler.kv.pool.num_remote_pins == 0
            assert_all_free(each.scheduler)
            assert not any(tier.writes_back or tier.num_arriving for tier in each.scheduler.kv.hashed.values())
        for request in self.requests:
            assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)


def test_blocks_that_go_down_and_come_back_by_any_way_never_make_a_wrong_token() -> None:
    check_rules(ChainRules, 60, steps=40)

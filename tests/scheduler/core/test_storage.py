"""Storage that outlives executors: computed blocks are written to it, loaded from it, and may be lost at any time."""

from collections import deque
from dataclasses import replace

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pagewise_scheduler.core.request_report import request_report
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.routing.executor_view import ExecutorView
from pagewise_scheduler.core.routing.policies import make_routing, place
from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs
from pagewise_scheduler.core.tiers.hashed import MAX_ARRIVING
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_scheduler.core.tiers.stored_drops import drop_salt
from pagewise_shared.block_hash import BlockHash, salt_tags, unpack_names
from pagewise_shared.protocol import DISK, BlockCopies, StepResult

from tests.core_requests import change
from tests.scheduler.core.builders import create_request, create_scheduler, evict, recoveries_of
from tests.scheduler.core.checking_executor import Content
from tests.scheduler.core.driving import assert_all_free, check_states, executor_for, expected_tokens, num_stored, run
from tests.scheduler.core.rules import check_rules

IDENTITY = "the disk of all"


class Node:
    """A scheduler, and its executor, which shares ``storage`` with others."""

    def __init__(
        self,
        storage: dict[BlockHash, Content],
        recovery: RecoveryMode = "swap",
        link: CopyCosts | None = None,
        *,
        costs: Costs | None = None,
        salted: bool = True,
        **options: int,
    ) -> None:
        costs = replace(costs or Costs(), tiers={DISK: link or CopyCosts()})
        self.scheduler = create_scheduler(
            recovery=recovery, costs=costs, hashed={DISK: IDENTITY}, salted=salted, **options
        )
        self.executor = executor_for(self.scheduler)
        self.executor.storage = storage
        self.results: deque[StepResult] = deque()

    @property
    def counters(self) -> dict[str, int]:
        return self.scheduler.kv.pool.counters.by_name()

    def add(self, request: Request) -> None:
        """Place a request here, after it has been looked up."""
        request.stored[IDENTITY] = num_stored(self.scheduler, self.executor, request)
        self.scheduler.add(request)

    def serve(self, prompt: list[int], **options: int) -> Request:
        self.add(request := create_request(prompt=prompt, **options))
        run(self.scheduler, self.executor)
        for sequence in request.sequences:
            assert sequence.output_token_ids.tolist() == expected_tokens(request)
        return request


PROMPT = list(range(50))


@pytest.mark.parametrize("mode", ["swap", "both"])
def test_what_was_computed_outlives_the_executor_that_computed_it(mode: RecoveryMode) -> None:
    storage: dict[BlockHash, Content] = {}
    first = Node(storage, mode)
    first.serve(PROMPT, max_tokens=8)
    assert first.executor.num_written == first.counters["written"] == 14, "57 tokens were computed"
    again = Node(storage, mode)
    request = again.serve(PROMPT, max_tokens=8)
    assert request.cached_tokens["disk"] == request.num_cached_tokens > 0
    assert again.executor.num_computed == 57 - request.num_cached_tokens
    if mode == "swap":
        assert (request.num_cached_tokens, again.counters["recalled"]) == (48, 12)
        (began,) = request_report(request, again.scheduler, 0.0, 10).events
        assert (began.method, began.loaded_tokens, began.source) == ("load", 48, "disk")
        assert again.executor.num_written == 2, "what came from there is not written again"
    assert_all_free(again.scheduler)


def test_a_deletion_waits_for_no_step_that_never_comes() -> None:
    """Blocks were evicted for a request that is gone before a step takes their copies along."""
    node = Node({}, num_host_blocks=16)
    scheduler, tier = node.scheduler, node.scheduler.kv.hashed[DISK]
    node.serve(PROMPT)
    scheduler.plan.copy(scheduler.kv.pool.evict(1))
    drop = drop_salt(scheduler, tier, 1, "")
    assert drop.step == scheduler.last_step + 1
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.step == drop.step


def test_first_blocks_are_written_with_the_tags_of_their_salt() -> None:
    node, written = Node({}), list[BlockCopies]()
    change(request := create_request(prompt=PROMPT), cache_salt="key:a/b")
    node.scheduler.add(request)
    while plan := node.scheduler.schedule(0.0):
        written += [copies for copies in plan.copies if copies.target == DISK]
        node.scheduler.update(node.executor.execute(plan))
        for copied in node.executor.finish_copies():
            node.scheduler.copied(copied)
    assert [copies.salts for copies in written if copies.salts] == [((0, salt_tags("key:a/b")),)]
    assert sum(len(unpack_names(copies.names)) for copies in written) == 13


def test_only_what_is_new_is_written() -> None:
    node = Node({})
    node.serve(PROMPT, max_tokens=4)
    node.serve(PROMPT, max_tokens=4)
    assert node.executor.num_written == 13
    node.serve([*PROMPT[:24], *range(100, 120)], n=3)
    assert node.executor.num_written == 13 + 5, "the outputs of the three are alike"


@pytest.mark.parametrize("gone", [0, 5, 11])
@pytest.mark.parametrize("mode", ["swap", "both"])
def test_what_is_gone_when_it_is_loaded_is_computed(gone: int, mode: RecoveryMode) -> None:
    storage: dict[BlockHash, Content] = {}
    Node(storage).serve(PROMPT)
    # Loading a block is faster than computing it, but not by so much that no step is worth while.
    node = Node(storage, mode, CopyCosts(0.0, 1e-3), costs=Costs(step=0.0, token=1e-3, attention=0.0))
    node.add(request := create_request(prompt=PROMPT, max_tokens=8))
    del storage[list(storage)[gone]]
    run(node.scheduler, node.executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    assert node.counters["recall_failed"] == (1 if mode == "swap" or gone else 0), "the front is computed anyway"
    assert_all_free(node.scheduler)
    check_states(node.scheduler.kv.pool)


def test_storage_from_which_nothing_comes_is_left_alone_for_a_while() -> None:
    storage: dict[BlockHash, Content] = {}
    node = Node(storage)
    for number in range(3):
        request = create_request(prompt=[number, *PROMPT])
        request.stored[IDENTITY] = 12  # as reported; but it is slow, or broken
        node.scheduler.add(request)
        run(node.scheduler, node.executor)
        assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    assert node.counters["recall_failed"] == 12, "it was not asked again"


def test_what_could_not_be_written_is_tried_again_with_the_next_use() -> None:
    node = Node({})
    node.executor.full = True
    node.serve(PROMPT)
    assert (node.counters["written"], node.counters["not_written"]) == (0, 13)
    node.executor.full = False
    node.serve(PROMPT)
    assert node.counters["written"] == 13


def test_blocks_that_the_tier_has_forgotten_are_written_again() -> None:
    node = Node({})
    node.serve(PROMPT)
    assert node.counters["written"] == 13
    node.serve(PROMPT)
    assert node.counters["written"] == 13, "they are there"
    node.executor.storage.clear()
    node.serve(PROMPT)
    assert node.counters["written"] == 26
    assert len(node.executor.storage) == 13


def test_what_is_evicted_before_its_turn_is_not_written_nor_what_follows_it() -> None:
    node = Node({}, num_blocks=13)
    node.scheduler.add(create_request(prompt=PROMPT, max_tokens=3))
    while not node.scheduler.features.write_back.wants_step():
        plan = node.scheduler.schedule(0.0)
        if plan is not None:
            node.results.append(node.executor.execute(plan))
        node.scheduler.update(node.results.popleft())
    tier = node.scheduler.kv.hashed[DISK]
    tier.max_arriving = 0  # it is busy, so it does not take over evicted blocks
    evict(node.scheduler, 5)  # of the end of the prefix, as always
    tier.max_arriving = MAX_ARRIVING
    run(node.scheduler, node.executor)
    assert (node.counters["written"], node.counters["not_written"]) == (8, 5)
    assert num_stored(node.scheduler, node.executor, create_request(prompt=PROMPT)) == 8


def test_few_blocks_are_on_their_way_at_a_time() -> None:
    node = Node({}, num_blocks=512, max_num_batched_tokens=2048)
    node.scheduler.add(create_request(prompt=2000, max_tokens=2))
    running = True
    while running:
        running = False
        while (plan := node.scheduler.schedule(0.0)) is not None and node.scheduler.num_in_flight <= 2:
            node.scheduler.update(node.executor.execute(plan))
        assert sum(len(copies.pairs) // 8 for _, copies in node.executor.copying) <= MAX_ARRIVING
        for message in node.executor.finish_copies(1):
            node.scheduler.copied(message)
            running = True
    assert node.executor.num_written == 500


def test_slow_storage_is_neither_read_nor_written_while_it_is_busy() -> None:
    slow = CopyCosts(load_setup=1.0, load_block=1.0, store_block=1.0)
    costs = Costs(step=1e-4, token=1e-5)
    storage: dict[BlockHash, Content] = {}
    Node(storage).serve(PROMPT)
    node = Node(storage, "auto", slow, costs=costs)
    recoveries = recoveries_of(node.scheduler)
    request = node.serve(PROMPT)
    assert (request.num_cached_tokens, node.executor.num_recalled) == (0, 0)
    assert [report.method for report in recoveries] == ["recompute"]
    for start in range(0, 3000, 100):
        node.scheduler.add(create_request(prompt=[*range(start, start + 60)]))
    run(node.scheduler, node.executor)
    assert node.counters["not_written"] > 0


def test_nothing_is_loaded_if_all_is_to_be_recomputed() -> None:
    storage: dict[BlockHash, Content] = {}
    Node(storage).serve(PROMPT)
    node = Node(storage, "recompute")
    assert node.serve(PROMPT).num_cached_tokens == 0
    assert node.executor.num_written == node.executor.num_recalled == 0


@pytest.mark.parametrize(("salt", "blocks"), [("private", 0), (None, 13)])
def test_kv_of_requests_with_a_salt_may_be_kept_away(salt: str | None, blocks: int) -> None:
    node = Node({}, salted=False)
    request = create_request(prompt=PROMPT)
    change(request, cache_salt=salt)
    node.add(request)
    run(node.scheduler, node.executor)
    assert node.executor.num_written == blocks


def test_log_probabilities_of_the_prompt_come_from_computing_it() -> None:
    storage: dict[BlockHash, Content] = {}
    Node(storage).serve(PROMPT)
    node = Node(storage)
    request = create_request(prompt=PROMPT)
    change(request, sampling=msgspec.structs.replace(request.params.sampling, prompt_logprobs=1))
    node.add(request)
    plan = node.scheduler.schedule(0.0)
    assert plan is not None
    assert (plan.copies, plan.chunks) == ((), ((0, 32),))


def test_a_prompt_goes_to_an_executor_that_can_load_it() -> None:
    storage: dict[BlockHash, Content] = {}
    Node(storage).serve(PROMPT)
    costs = Costs(step=1e-4, token=1e-2)
    with_it, without = Node(storage, "auto", costs=costs), create_scheduler(recovery="auto", costs=costs)
    views = [ExecutorView(without), ExecutorView(with_it.scheduler)]
    request = create_request(prompt=PROMPT)
    request.stored[IDENTITY] = 12
    chosen = place(make_routing("ttft"), request, views, 0.0)
    assert chosen.executor is views[1]
    assert chosen.predicted < 0.2, "50 tokens of 10 ms each are not computed"


class SharedStorage(RuleBasedStateMachine):
    """Executors that share storage, which forgets whatever it likes, and refuses writes now and then."""

    @initialize(mode=st.sampled_from(["swap", "both", "auto"]), host=st.sampled_from([0, 16]))
    def begin(self, mode: RecoveryMode, host: int) -> None:
        self.storage: dict[BlockHash, Content] = {}
        costs = Costs(step=1e-4, token=1e-3)
        self.nodes = [
            Node(self.storage, mode, num_blocks=24, num_host_blocks=host, max_num_seqs=4, costs=costs) for _ in range(2)
        ]
        self.requests: list[Request] = []

    @rule(
        at=st.integers(0, 1),
        prefix=st.integers(0, 3),
        length=st.integers(1, 60),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 2),
    )
    def add(self, at: int, prefix: int, length: int, max_tokens: int, n: int) -> None:
        prompt = [1000 * prefix + i for i in range(length)]
        request = create_request(prompt=prompt, max_tokens=max_tokens, n=n)
        self.nodes[at].add(request)
        self.requests.append(request)

    @rule(at=st.integers(0, 1), steps=st.integers(1, 5))
    def step(self, at: int, steps: int) -> None:
        node = self.nodes[at]
        for _ in range(steps):
            while node.scheduler.num_in_flight < 2 and (plan := node.scheduler.schedule(0.0)) is not None:
                node.results.append(node.executor.execute(plan))
            if node.results:
                node.scheduler.update(node.results.popleft())

    @rule(at=st.integers(0, 1), count=st.integers(1, 3))
    def copies_are_made(self, at: int, count: int) -> None:
        for message in self.nodes[at].executor.finish_copies(count):
            self.nodes[at].scheduler.copied(message)

    @rule(number=st.integers(0, 100))
    def storage_forgets(self, number: int) -> None:
        if self.storage:
            del self.storage[list(self.storage)[number % len(self.storage)]]

    @rule(at=st.integers(0, 1), full=st.booleans())
    def storage_is_full(self, at: int, full: bool) -> None:
        self.nodes[at].executor.full = full

    @rule(at=st.integers(0, 1), count=st.integers(1, 24))
    def blocks_are_evicted(self, at: int, count: int) -> None:
        evict(self.nodes[at].scheduler, count)

    @invariant()
    def known_content_hangs_together(self) -> None:
        for node in self.nodes:
            check_states(node.scheduler.kv.pool)

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        for node in self.nodes:
            while node.results:
                node.scheduler.update(node.results.popleft())
            run(node.scheduler, node.executor)
            assert_all_free(node.scheduler)
        for request in self.requests:
            for sequence in request.sequences:
                assert sequence.output_token_ids.tolist() == expected_tokens(request)


def test_shared_storage_never_makes_a_wrong_token() -> None:
    check_rules(SharedStorage, 60, steps=40)

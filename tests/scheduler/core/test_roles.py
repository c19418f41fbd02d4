"""Prefill and decode apart: where requests go, when they move, and that nothing is lost and no token differs."""

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pagewise_scheduler.core.features import prefetches as prefetch_module
from pagewise_scheduler.core.features.registry import FeatureOptions
from pagewise_scheduler.core.requests.request import Request, SequenceStatus
from pagewise_scheduler.core.routing.policies import RoutingName
from pagewise_scheduler.core.tiers.cost_model import Costs
from pagewise_shared.block_hash import adapter_salt
from pagewise_shared.protocol import Adapter, AdapterCapacity, AdapterLoaded, LoadAdapter, Role
from pagewise_shared.sampling import BeamParams

from tests.core_requests import change
from tests.scheduler.core.builders import create_request, evict
from tests.scheduler.core.driving import assert_all_free, check_states, expected_beams, expected_tokens
from tests.scheduler.core.role_fleet import Fleet
from tests.scheduler.core.rules import check_rules


def serve(served: Fleet, request: Request) -> Request:
    served.add(request)
    served.run()
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    return request


def test_a_request_moves_after_its_prompt_and_its_blocks_come_while_that_is_computed() -> None:
    served = Fleet(["prefill", "decode"], max_num_batched_tokens=16)
    source, target = served.nodes
    request = create_request(prompt=list(range(60)), max_tokens=9)
    served.add(request)
    assert served.node_of(request) == 0
    before = 0
    while not request.sequences[0].prefilled:
        before = target.executor.num_fetched
        served.step(0)
        served.step(1)
        target.deliver()
    assert before >= 8, "the first chunks are there before the last one is computed"
    served.run()
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    assert served.moved[request] == 1
    assert served.node_of(request) == 1
    assert target.executor.num_fetched == 15
    assert target.executor.num_computed < 4 + 9, "the rest of the last block, and the outputs"
    assert source.executor.num_computed >= 60
    for node in served.nodes:
        assert_all_free(node.scheduler)


@pytest.mark.parametrize("routing", ["ttft", "prefix", "least-loaded", "round-robin"])
def test_prompts_are_computed_by_those_that_are_for_them(routing: RoutingName) -> None:
    served = Fleet(["prefill", "decode", "decode", "prefill"], routing)
    requests = [create_request(prompt=40, max_tokens=20) for _ in range(8)]
    for request in requests:
        served.add(request)
        assert served.node_of(request) in (0, 3)
    served.run()
    assert [served.moved.get(request, 0) for request in requests] == [1] * 8
    assert {served.node_of(request) for request in requests} == {1, 2}
    assert all(request.sequences[0].output_token_ids.tolist() == expected_tokens(request) for request in requests)


def test_with_a_grammar_a_request_stays_if_some_executors_follow_none() -> None:
    served = Fleet(["prefill", "decode"])
    served.views[1].grammars = False
    requests = [create_request(prompt=40, max_tokens=20) for _ in range(2)]
    change(requests[0], sampling=msgspec.structs.replace(requests[0].params.sampling, grammar="start: /.*/"))
    for request in requests:
        served.add(request)
    served.run()
    assert [served.moved.get(request, 0) for request in requests] == [0, 1]


def with_adapter(rank: int, max_tokens: int) -> Request:
    request = create_request(prompt=40, max_tokens=max_tokens)
    adapter = Adapter("one", "/adapters/one", b"1" * 32, 1000, rank)
    change(request, adapter=adapter, cache_salt=adapter_salt(adapter.content, None))
    return request


def serve_adapters(served: Fleet, *slots: tuple[int, int]) -> None:
    """The executors have so many slots, for adapters up to some rank."""
    for view, (number, rank) in zip(served.views, slots, strict=True):
        view.scheduler.features.options = FeatureOptions(AdapterCapacity(number, rank))


def test_with_an_adapter_a_request_goes_on_where_adapters_of_its_rank_are_served() -> None:
    served = Fleet(["prefill", "decode", "decode", "decode"])
    serve_adapters(served, (1, 8), (0, 8), (1, 4), (1, 8))
    requests = [with_adapter(8, 20), with_adapter(4, 20)]
    for request in requests:
        served.add(request)
    served.run()
    assert [served.moved[request] for request in requests] == [1, 1]
    assert served.node_of(requests[0]) == 3
    assert served.node_of(requests[1]) in (2, 3)


def test_who_can_go_nowhere_else_with_its_adapter_holds_up_nobody() -> None:
    served = Fleet(["prefill", "decode", "decode"])
    serve_adapters(served, (1, 8), (1, 8), (0, 8))
    stays, moves = with_adapter(8, 80), create_request(prompt=40, max_tokens=20)
    served.add(stays)
    served.kill(1)  # where it was to go on
    served.add(moves)
    served.run()
    assert [served.moved.get(request, 0) for request in (stays, moves)] == [0, 1]
    assert stays.sequences[0].output_token_ids.tolist() == expected_tokens(stays)


def test_a_move_costs_the_load_of_an_adapter() -> None:
    """The one that holds it is chosen, though the other one is otherwise as good and comes first."""
    served = Fleet(["prefill", "decode", "decode"])
    request = with_adapter(8, 20)
    assert request.params.adapter is not None
    serve_adapters(served, (1, 8), (1, 8), (1, 8))
    held = served.views[2].scheduler.features.adapters
    other = with_adapter(8, 20)
    other.create_sequences()
    held.enter(other)
    (load,) = held.messages(0.0)
    assert isinstance(load, LoadAdapter)
    held.take(AdapterLoaded(1, load.number), 0.0)
    held.leave(other, 0)
    served.add(request)
    served.run()
    assert served.node_of(request) == 2


def test_without_roles_nothing_moves() -> None:
    served = Fleet(["both", "both"])
    assert not {serve(served, create_request(prompt=40)) for _ in range(3)} & served.moved.keys()


def test_a_prompt_that_is_cached_where_others_decode_is_computed_there() -> None:
    slow_link = Costs(step=1e-4, token=1e-3, fetch_setup=1e-4, fetch_block=1e-2)
    served = Fleet(["prefill", "decode"], costs=slow_link)
    prompt = list(range(40))
    first = serve(served, create_request(prompt=prompt, max_tokens=8))
    output = first.sequences[0].output_token_ids.tolist()
    evict(served.nodes[0].scheduler, 64)
    again = create_request(prompt=[*prompt, *output, 7, 7, 7], max_tokens=8)
    served.add(again)
    assert served.node_of(again) == 1
    served.run()
    assert again not in served.moved


@pytest.mark.parametrize("roles", [["prefill", "prefill"], ["decode", "decode"], ["prefill"], ["decode"]])
def test_if_one_role_is_missing_the_others_do_both(roles: list[Role]) -> None:
    served = Fleet(roles)
    for _ in range(3):
        assert serve(served, create_request(prompt=40)) not in served.moved


def test_who_finds_no_room_stays_and_leaves_when_there_is_some() -> None:
    served = Fleet(["prefill", "decode"], max_num_seqs=2)
    requests = [create_request(prompt=20, max_tokens=40) for _ in range(4)]
    for request in requests[:2]:
        served.add(request)
    while any(served.node_of(request) == 0 for request in requests[:2]):
        served.step(0)
        served.step(1)
        served.nodes[1].deliver()
    for request in requests[2:]:
        served.add(request)
    while served.moves[0].num_staying < 2:
        served.step(0)
    served.run()
    assert [len(request.sequences[0].output_token_ids) for request in requests] == [40] * 4
    assert all(request.sequences[0].output_token_ids.tolist() == expected_tokens(request) for request in requests)


def test_who_stays_when_its_executor_is_reset_leaves_once_its_prompt_is_computed_again() -> None:
    served = Fleet(["prefill", "decode"], max_num_seqs=1, max_num_batched_tokens=8)
    first, second = (create_request(prompt=20, max_tokens=40) for _ in range(2))
    served.add(first)
    while served.node_of(first) == 0:
        served.step(0)
        served.step(1)
        served.nodes[1].deliver()
    served.add(second)
    while served.moves[0].num_staying < 1:
        served.step(0)
    source = served.nodes[0]
    source.scheduler.fail(source.scheduler.epoch + 1, shrink_steps=False)
    source.results.clear()
    source.executor.reset(source.scheduler.epoch)
    while second.sequences[0].status is not SequenceStatus.DECODE:  # its last chunk is in flight
        served.step(0)
    served.nodes[1].scheduler.abort(first.request_id)
    served.placements[first].end(0.0)
    served.roles.ended(3)
    served.run()
    assert served.moved[second] == 1
    assert second.sequences[0].output_token_ids.tolist() == expected_tokens(second)


def test_all_outputs_of_a_request_move_together_before_the_others_begin() -> None:
    served = Fleet(["prefill", "decode"])
    request = create_request(prompt=list(range(30)), max_tokens=12, n=3)
    served.add(request)
    served.run()
    assert served.moved[request] == 1
    assert [one.output_token_ids.tolist() for one in request.sequences] == [expected_tokens(request)] * 3
    assert served.nodes[1].executor.num_computed < 3 * 16


@pytest.mark.parametrize("kind", ["beam", "prompt_logprobs"])
def test_beam_searches_and_logprobs_of_prompts_stay(kind: str) -> None:
    served = Fleet(["prefill", "decode"])
    request = create_request(prompt=list(range(30)), max_tokens=6)
    if kind == "beam":
        change(request, beam=BeamParams(width=2))
    else:
        change(request, sampling=msgspec.structs.replace(request.params.sampling, prompt_logprobs=0))
    served.add(request)
    served.run()
    assert not served.moved
    if kind == "beam":
        assert [one.output_token_ids.tolist() for one in request.sequences] == expected_beams(request)
    else:
        assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("steps", [1, 3, 6, 12, 20])
def test_an_executor_of_either_role_dies_at_any_time(victim: int, steps: int) -> None:
    served = Fleet(["prefill", "decode"], max_num_batched_tokens=16)
    requests = [create_request(prompt=30, max_tokens=10) for _ in range(3)]
    for request in requests:
        served.add(request)
    for _ in range(steps):
        for where in (0, 1):
            served.step(where)
        served.nodes[1].deliver(1)
    served.kill(victim)
    served.run()
    assert all(request.sequences[0].output_token_ids.tolist() == expected_tokens(request) for request in requests)


class RoleRules(RuleBasedStateMachine):
    """Executors of all roles, and everything in between left to chance."""

    @initialize(
        roles=st.sampled_from(
            [["prefill", "decode", "decode"], ["prefill", "prefill", "decode"], ["prefill", "decode", "both"]]
        ),
        num_blocks=st.integers(10, 40),
        recovery=st.sampled_from(["auto", "swap", "both"]),
        piece=st.sampled_from([1, 2, 128]),
    )
    def start(self, roles: list[Role], num_blocks: int, recovery: str, piece: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefetch_module, "_PIECE_BLOCKS", piece)
        self.served = Fleet(roles, num_blocks=num_blocks, recovery=recovery, max_num_batched_tokens=12)
        self.requests: list[Request] = []
        self.aborted: set[str] = set()

    @rule(
        head=st.sampled_from([0, 6, 12]),
        tail=st.lists(st.integers(1, 2), min_size=1, max_size=30),
        max_tokens=st.integers(0, 12),
        n=st.integers(1, 2),
        salt=st.sampled_from([None, None, "tenant"]),
    )
    def admit(self, head: int, tail: list[int], max_tokens: int, n: int, salt: str | None) -> None:
        request = create_request(prompt=[*range(head), *tail], max_tokens=max_tokens, n=n)
        change(request, cache_salt=salt)
        if all(view.scheduler.fits(len(request.prompt_token_ids), max_tokens) for view in self.served.views):
            self.served.add(request)
            self.requests.append(request)

    @rule(where=st.integers(0, 2), steps=st.integers(1, 4))
    def some_steps(self, where: int, steps: int) -> None:
        if where in self.served.alive:
            self.served.step(where, steps)

    @rule(where=st.integers(0, 2), count=st.integers(1, 3))
    def copies_arrive(self, where: int, count: int) -> None:
        self.served.nodes[where].deliver(count)

    @rule(where=st.integers(0, 2), count=st.integers(1, 30))
    def blocks_are_taken(self, where: int, count: int) -> None:
        if where in self.served.alive:
            evict(self.served.nodes[where].scheduler, count)

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        if self.requests:
            victim = self.requests[which % len(self.requests)]
            if any(self.served.nodes[where].scheduler.abort(victim.request_id) for where in self.served.alive):
                self.served.placements[victim].end(0.0)
                self.aborted.add(victim.request_id)

    @rule(where=st.integers(0, 2), happens=st.integers(0, 3))
    def executor_is_reset(self, where: int, happens: int) -> None:
        node = self.served.nodes[where]
        if happens or where not in self.served.alive or not node.scheduler.num_in_flight:
            return
        epoch = node.scheduler.epoch + 1
        for request in node.scheduler.fail(epoch):
            self.served.placements[request].end(0.0)
            self.aborted.add(request.request_id)
        node.results.clear()
        node.executor.reset(epoch)

    @rule(where=st.integers(0, 2), happens=st.integers(0, 5))
    def executor_dies_or_comes_back(self, where: int, happens: int) -> None:
        if where not in self.served.alive:
            self.served.come_back(where)
        elif not happens and len(self.served.alive) > 1:
            self.served.kill(where)

    @invariant()
    def memory_adds_up(self) -> None:
        for where in self.served.alive:
            scheduler = self.served.nodes[where].scheduler
            pool = scheduler.kv.pool
            check_states(pool)
            sequences = [sequence for request in scheduler.requests for sequence in request.sequences]
            tables = sum(len(sequence.table.blocks) for sequence in sequences)
            tables += sum(len(one.table.blocks) for one in scheduler.features.prefetches.active.values())
            references = sum(pool.references(block) for block in range(pool.num_blocks))
            assert (
                references
                == scheduler.kv.num_retiring
                + tables
                + scheduler.recoveries.transfers.num_loading
                + pool.num_remote_pins
            )

    def teardown(self) -> None:
        if not hasattr(self, "served"):
            return
        self.patch.undo()
        self.served.run()
        for request in self.requests:
            expected = expected_tokens(request)
            for sequence in request.sequences:
                produced = sequence.output_token_ids.tolist()
                ended = request.request_id in self.aborted
                assert produced == (expected[: len(produced)] if ended else expected)
        for where in self.served.alive:
            view = self.served.views[where]
            assert view.scheduler.kv.pool.num_remote_pins == 0
            assert view.load == view.num_expected == view.num_decoding == self.served.moves[where].num_staying == 0
            assert_all_free(view.scheduler)


def test_nothing_is_lost_and_the_memory_adds_up() -> None:
    check_rules(RoleRules, 60)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nothing_is_lost_and_the_memory_adds_up_over_200_000_operations() -> None:
    check_rules(RoleRules, 2000)

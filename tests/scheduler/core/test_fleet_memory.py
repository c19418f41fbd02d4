"""The memory rules of a fleet: executors that fetch each other's blocks, are reset and vanish, in any order."""

from itertools import chain

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pagewise_scheduler.core.request_report import request_report
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers import recovery as pointers
from pagewise_scheduler.core.tiers.arena import WindowShape
from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.peer import PeerTiers, PrefixDirectory
from pagewise_scheduler.core.tiers.recovery import Recoveries
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.protocol import DEVICE, HOST

from tests.core_requests import change
from tests.scheduler.core.arenas import check_arena
from tests.scheduler.core.builders import create_request, create_scheduler, evict, recoveries_of
from tests.scheduler.core.driving import (
    assert_all_free,
    check_states,
    every_node,
    expected_tokens,
    run,
)
from tests.scheduler.core.fleets import Node, fleet, mixed_fleet
from tests.scheduler.core.rules import check_rules


def serve(node: Node, prompt: list[int], max_tokens: int = 3) -> Request:
    request = create_request(prompt=prompt, max_tokens=max_tokens)
    node.scheduler.add(request)
    run(node.scheduler, node.executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    return request


def test_what_another_executor_holds_is_fetched() -> None:
    holder, fetcher = fleet(2)
    prompt = list(range(50))
    serve(holder, prompt)
    computed = holder.executor.num_computed
    again = serve(fetcher, prompt)
    assert fetcher.executor.num_fetched == 12
    assert again.cached_tokens["peer"] == again.num_cached_tokens == 48
    (began,) = request_report(again, fetcher.scheduler, 0.0, 10).events
    assert (began.method, began.device_tokens, began.loaded_tokens, began.source) == ("load", 0, 48, "peer")
    assert fetcher.executor.num_computed == 2 + 2, "the rest of the prompt, and the outputs"
    assert holder.executor.num_computed == computed
    assert holder.scheduler.kv.pool.num_remote_pins == 0
    serve(fetcher, prompt)
    assert fetcher.executor.num_fetched == 12, "it is cached here now"


@pytest.mark.parametrize("num_blocks", range(14, 26))
def test_a_sequence_starts_while_blocks_of_its_prefetch_are_in_flight(num_blocks: int) -> None:
    """The blocks in flight are released after the sequence has taken its own: admission does not count them as free."""
    holder, fetcher = fleet(2, "recompute", num_blocks=num_blocks)
    scheduler, prompt = fetcher.scheduler, list(range(50))
    serve(holder, prompt)
    scheduler.add(create_request(prompt=[*prompt[:4], 99], max_tokens=1))
    request = create_request(prompt=prompt, max_tokens=3)
    request.create_sequences()
    results = []
    for _ in range(2):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        results.append(fetcher.executor.execute(plan))
        scheduler.features.prefetches.want(request.sequences[0], 32)
    scheduler.add(request)
    scheduler.update(results.pop(0))  # the first block is cached now, so that the sequence does not wait for it
    assert len(scheduler.features.prefetches.active[request].pieces) == 1
    plan = scheduler.schedule(0.0)
    assert (request.sequences[0].row >= 0) == (num_blocks >= 8 + 13)
    results += [fetcher.executor.execute(plan)] if plan is not None else []
    for result in results:
        scheduler.update(result)
    run(scheduler, fetcher.executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    assert_all_free(scheduler)


def test_what_lies_on_a_peers_host_is_fetched_too() -> None:
    holder, fetcher = fleet(2, num_blocks=14, num_host_blocks=40)
    serve(holder, list(range(50)))
    serve(holder, list(range(100, 150)))
    assert holder.executor.num_stored > 0
    serve(fetcher, list(range(50)))
    assert fetcher.executor.num_fetched == 12
    check_states(holder.scheduler.kv.pool)


def test_nobody_fetches_blocks_of_another_format() -> None:
    directory = PrefixDirectory()
    holder, fetcher = (
        Node(name, directory, create_scheduler(recovery="swap"), block_format=name) for name in ("one", "other")
    )
    serve(holder, list(range(50)))
    serve(fetcher, list(range(50)))
    assert fetcher.executor.num_fetched == 0


def test_blocks_go_to_those_with_blocks_of_the_same_size_only() -> None:
    holder, other, alike = mixed_fleet((4, 8, 4), "swap", 256, 0, Costs())
    serve(holder, list(range(50)))
    serve(other, list(range(50)))
    serve(alike, list(range(50)))
    assert [node.executor.num_fetched for node in (holder, other, alike)] == [0, 0, 12]


def test_a_slow_link_to_a_peer_is_not_used() -> None:
    slow = Costs(step=1e-4, token=1e-5, fetch_setup=1.0, fetch_block=1.0)
    holder, fetcher = fleet(2, "auto", costs=slow)
    recoveries = recoveries_of(fetcher.scheduler)
    serve(holder, list(range(50)))
    serve(fetcher, list(range(50)))
    assert fetcher.executor.num_fetched == 0
    assert [report.method for report in recoveries] == ["recompute"]


def test_a_peer_may_be_faster_than_the_own_host() -> None:
    """The own host has the beginning, a peer has it all: one of them is asked, whichever ends first."""
    host = CopyCosts(load_block=1e-5)
    costs = Costs(step=1e-4, token=1e-1, tiers={HOST: host}, fetch_setup=1e-5, fetch_block=1e-5)
    holder, fetcher = fleet(2, "auto", costs=costs, num_blocks=24, num_host_blocks=24)
    serve(fetcher, list(range(40)))
    serve(fetcher, [*range(40), *range(300, 340)])
    serve(fetcher, list(range(100, 190)))
    serve(holder, list(range(80)))
    request = serve(fetcher, list(range(80)))
    assert list(request.loaded_tokens) == ["peer"]


def test_a_peer_that_dies_is_done_without() -> None:
    holder, fetcher = fleet(2)
    prompt = list(range(50))
    serve(holder, prompt)
    request = create_request(prompt=prompt, max_tokens=3)
    fetcher.scheduler.add(request)
    plan = fetcher.scheduler.schedule(0.0)
    assert plan is not None
    assert [copies.peer.endpoint for copies in plan.copies if copies.peer is not None] == ["node 0"]
    result = fetcher.executor.execute(plan)
    fetcher.executor.peers = {}
    del fetcher.scheduler.recoveries.planner.directory.peers["node 0"]  # type: ignore[union-attr]
    fetcher.scheduler.peer_lost("node 0")
    assert fetcher.scheduler.recoveries.transfers.take_cancelled() == [(plan.step, "node 0", DEVICE)]
    fetcher.scheduler.update(result)
    run(fetcher.scheduler, fetcher.executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    assert fetcher.executor.num_fetched == 0
    assert_all_free(fetcher.scheduler)


def test_a_peer_that_fails_is_left_alone_for_a_while() -> None:
    holder, fetcher = fleet(2)
    prompt = list(range(50))
    serve(holder, prompt)
    fetcher.executor.peers = {}
    request = serve(fetcher, prompt)
    assert request.sequences[0].num_preemptions == 1
    assert fetcher.scheduler.kv.pool.counters.fetch_failed == 12
    fetcher.executor.peers = {"node 0": holder.executor}
    serve(holder, list(range(200, 250)))
    assert serve(fetcher, list(range(200, 250))).loaded_tokens == {}


def test_a_sequence_that_is_aborted_does_not_fetch_on() -> None:
    holder, fetcher = fleet(2)
    serve(holder, list(range(50)))
    request = create_request(prompt=list(range(50)), max_tokens=3)
    fetcher.scheduler.add(request)
    plan = fetcher.scheduler.schedule(0.0)
    assert plan is not None
    fetcher.scheduler.abort(request.request_id)
    assert fetcher.scheduler.recoveries.transfers.take_cancelled() == [(plan.step, "node 0", DEVICE)]
    assert holder.scheduler.kv.pool.num_remote_pins > 0, "until the executor has confirmed that nobody reads it"
    fetcher.scheduler.update(fetcher.executor.execute(plan))
    fetcher.deliver()
    assert holder.scheduler.kv.pool.num_remote_pins == 0
    assert_all_free(fetcher.scheduler)


def test_blocks_from_before_are_found_by_their_hashes() -> None:
    (node,) = fleet(1, num_host_blocks=8, num_blocks=20)
    prompt = list(range(50))
    serve(node, prompt)
    serve(node, list(range(100, 140)))
    inventory = node.executor.inventory()
    node.executor.reset(keeps_blocks=True)
    fresh = create_scheduler(num_blocks=20, num_host_blocks=8, recovery="swap")
    fresh.kv.expect(inventory)
    assert fresh.kv.pool.num_cached == len(inventory[0][DEVICE]) > 0
    request = create_request(prompt=prompt, max_tokens=3)
    fresh.add(request)
    run(fresh, node.executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    assert request.num_cached_tokens >= 44
    check_states(fresh.kv.pool)


def test_blocks_on_the_host_outlive_the_device() -> None:
    """The host has the end of a prefix: its beginning is computed, the rest loaded."""
    (node,) = fleet(1, num_host_blocks=40, num_blocks=20)
    prompt = list(range(50))
    serve(node, prompt)
    serve(node, list(range(100, 140)))
    host = node.executor.inventory()[0][HOST]
    node.executor.reset(keeps_blocks=True)
    node.executor.blocks.clear()
    computed = node.executor.num_computed
    for recovery in ("swap", "both"):
        fresh = create_scheduler(num_blocks=20, num_host_blocks=40, recovery=recovery)  # type: ignore[arg-type]
        fresh.kv.expect([{HOST: dict(host)}])
        node.executor.reset(keeps_blocks=True)
        request = create_request(prompt=prompt, max_tokens=3)
        fresh.add(request)
        run(fresh, node.executor)
        assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
        assert request.cached_tokens["host"] > 0
        assert node.executor.num_computed - computed < 50
        check_states(fresh.kv.pool)


def test_blocks_that_nobody_asks_for_make_room() -> None:
    (node,) = fleet(1, num_blocks=20)
    serve(node, list(range(70)))
    inventory = node.executor.inventory()
    node.executor.reset(keeps_blocks=True)
    fresh = create_scheduler(num_blocks=20)
    fresh.kv.expect(inventory)
    node.scheduler = fresh
    serve(node, list(range(200, 270)))
    assert fresh.kv.pool.counters.evicted > 0
    check_states(fresh.kv.pool)


class FleetRules(RuleBasedStateMachine):
    """Three executors, with blocks of the same size or not, and everything in between left to chance."""

    windows: tuple[WindowShape, ...] = ()

    @initialize(
        sizes=st.one_of(
            st.integers(1, 4).map(lambda size: [size] * 3), st.sampled_from([[2, 2, 4], [1, 4, 4], [2, 3, 4]])
        ),
        num_blocks=st.integers(8, 30),
        num_host_blocks=st.sampled_from([0, 5, 40]),
        recovery=st.sampled_from(["auto", "swap", "both"]),
        piece=st.sampled_from([1, 2, 128]),
    )
    def start(
        self, sizes: list[int], num_blocks: int, num_host_blocks: int, recovery: RecoveryMode, piece: int
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(pointers, "_FETCHED_BLOCKS", piece)
        costs = Costs(step=1e-4, token=1e-2, fetch_setup=1e-4, fetch_block=1e-4)
        num_tokens, num_host_tokens = sizes[0] * num_blocks, sizes[0] * num_host_blocks
        self.nodes = mixed_fleet(sizes, recovery, num_tokens, num_host_tokens, costs, self.windows)
        self.requests: list[Request] = []
        self.aborted: set[str] = set()

    @rule(
        where=st.integers(0, 2),
        head=st.sampled_from([0, 6, 12]),
        tail=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        max_tokens=st.integers(0, 8),
        n=st.integers(1, 2),
        salt=st.sampled_from([None, None, "tenant"]),
    )
    def admit(self, where: int, head: int, tail: list[int], max_tokens: int, n: int, salt: str | None) -> None:
        request = create_request(prompt=[*range(head), *tail], max_tokens=max_tokens, n=n)
        change(request, cache_salt=salt)
        scheduler = self.nodes[where].scheduler
        if scheduler.fits(len(request.prompt_token_ids), max_tokens):
            scheduler.add(request)
            self.requests.append(request)

    def step(self, where: int, steps: int) -> None:
        node = self.nodes[where]
        for _ in range(steps):
            if node.scheduler.num_in_flight < 2 and (plan := node.scheduler.schedule(0.0)) is not None:
                node.results.append(node.executor.execute(plan))
            elif node.results:
                node.scheduler.update(node.results.popleft())

    some_steps = rule(where=st.integers(0, 2), steps=st.integers(1, 3))(step)

    @rule(where=st.integers(0, 2), count=st.integers(1, 3))
    def copies_arrive(self, where: int, count: int) -> None:
        self.nodes[where].deliver(count)

    @rule(where=st.integers(0, 2), count=st.integers(1, 30))
    def blocks_are_taken(self, where: int, count: int) -> None:
        evict(self.nodes[where].scheduler, count)

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        if self.requests:
            victim = self.requests[which % len(self.requests)]
            for node in self.nodes:
                if node.scheduler.abort(victim.request_id):
                    self.aborted.add(victim.request_id)

    @rule(where=st.integers(0, 2), happens=st.integers(0, 3))
    def executor_is_reset(self, where: int, happens: int) -> None:
        node = self.nodes[where]
        if happens or not node.scheduler.num_in_flight:
            return
        epoch = node.scheduler.epoch + 1
        self.aborted |= {request.request_id for request in node.scheduler.fail(epoch)}
        node.results.clear()
        node.executor.reset(epoch)

    @rule(where=st.integers(0, 2), to=st.integers(0, 2), happens=st.integers(0, 3))
    def requests_move(self, where: int, to: int, happens: int) -> None:
        """An executor gives up all requests, which continue at another one; its own blocks stay."""
        node = self.nodes[where]
        if happens or where == to or node.scheduler.num_in_flight:
            return
        if not all(
            self.nodes[to].scheduler.fits(len(r.prompt_token_ids), r.max_tokens) for r in node.scheduler.requests
        ):
            return
        for request in node.scheduler.release_all():
            self.nodes[to].scheduler.add(request)
        node.executor.copying.clear()
        epoch = node.scheduler.epoch + 1
        node.scheduler.fail(epoch)
        node.executor.reset(epoch)

    @invariant()
    def memory_adds_up(self) -> None:
        for node in self.nodes:
            scheduler, pool = node.scheduler, node.scheduler.kv.pool
            check_states(pool)
            for one in every_node(pool):
                block, parent = one.block, one.parent
                if one.depth > 1 and block >= 0 and pool.references(block):
                    assert parent is not None
                    assert pool.references(parent.block), "what is in use stands on what may be evicted"
            sequences = [sequence for request in scheduler.requests for sequence in request.sequences]
            tables = sum(len(sequence.table.blocks) for sequence in sequences)
            references = sum(pool.references(block) for block in range(pool.num_blocks))
            assert (
                references
                == scheduler.kv.num_retiring
                + tables
                + scheduler.recoveries.transfers.num_loading
                + pool.num_remote_pins
            )
            assert pool.num_remote_pins <= sum(_most_lent(other.scheduler.recoveries, pool) for other in self.nodes)

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        self.patch.undo()
        for _ in range(5000):
            for where in range(3):
                self.step(where, 3)
                self.nodes[where].deliver()
            if not any(node.scheduler.requests for node in self.nodes):
                break
        for node in self.nodes:
            assert not node.scheduler.requests, "it waits for ever"
            run(node.scheduler, node.executor)
        for request in self.requests:
            expected = expected_tokens(request)
            for sequence in request.sequences:
                produced = sequence.output_token_ids.tolist()
                ended = request.request_id in self.aborted
                assert produced == (expected[: len(produced)] if ended else expected)
        for node in self.nodes:
            assert node.scheduler.kv.pool.num_remote_pins == 0
            assert_all_free(node.scheduler)
            assert node.scheduler.kv.num_available == node.scheduler.kv.num_total


class WindowFleetRules(FleetRules):
    """The same with groups of windowed layers and of states."""

    windows = (WindowShape(3, 1), WindowShape(4, 2, chunked=True), WindowShape(2, 3, state=True))

    @invariant()
    def memory_adds_up(self) -> None:
        for node in self.nodes:
            check_arena(node.scheduler, lends=True)


def _most_lent(recoveries: Recoveries, pool: BlockPool) -> int:
    """The most blocks of ``pool`` that recoveries may hold: the blocks that they fetch, and all before them."""
    sources = [place.source for one in recoveries._active.values() for place in one.locations]
    loads = chain.from_iterable(recoveries.transfers.from_afar().values())
    sources += [place.source for load in loads for part in load.parts for place in part[1]]
    unique = {source for source in sources if isinstance(source, PeerTiers) and source._device is pool}
    return sum(len(source._pinned) for source in unique)


@pytest.mark.parametrize("rules", [FleetRules, WindowFleetRules])
def test_the_memory_rules_hold_in_a_fleet(rules: type[FleetRules]) -> None:
    check_rules(rules, 60)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rules", [FleetRules, WindowFleetRules])
def test_the_memory_rules_hold_in_a_fleet_over_200_000_operations(rules: type[FleetRules]) -> None:
    check_rules(rules, 2000)

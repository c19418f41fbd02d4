"""Loads of KV ahead of its use: by advice from all tiers, and at learned times."""

import pytest
from pagewise_scheduler.core.memory.eviction import CostAware
from pagewise_scheduler.core.tiers.arena import WindowShape
from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_shared.protocol import DISK, HOST, pack_int32s

from tests.scheduler.core.advising import Clients, prompt
from tests.scheduler.core.arenas import check_arena
from tests.scheduler.core.builders import evict
from tests.scheduler.core.driving import assert_all_free, check_states

LONG = prompt(1, 48)
WINDOWS = (WindowShape(2, 3, state=True), WindowShape(5, 1))


def on_device(clients: Clients, tokens: list[int] = LONG) -> int:
    return sum(node.block >= 0 for node in clients.path(tokens))


def beside(first: Clients, second: Clients) -> None:
    """Let two executors fetch each other's blocks."""
    directory = PrefixDirectory()
    for name, one in (("first", first), ("second", second)):
        one.scheduler.recoveries.planner.join(directory, Peer(name, "", one.scheduler, lambda: None))
        one.executor.peers = {"first": first.executor, "second": second.executor}


def with_disk(**options: object) -> Clients:
    clients = Clients(hashed={DISK: "a disk"}, **options)
    clients.turn(LONG, "a")
    evict(clients.scheduler, 64)
    clients.settle()
    return clients


@pytest.mark.parametrize("num_host_blocks", [0, 5])
def test_kv_comes_from_the_disk_ahead_of_its_use(num_host_blocks: int) -> None:
    """Of several tiers, each has a part."""
    clients = with_disk(num_host_blocks=num_host_blocks)
    assert on_device(clients) == 0
    assert len(clients.path(LONG)) == num_host_blocks
    assert clients.advise("willneed", "a", seconds=5.0).blocks == 12
    clients.settle()
    assert on_device(clients) == 12
    assert clients.executor.num_recalled == 12 - num_host_blocks
    check_states(clients.scheduler.kv.pool)
    assert clients.turn([*LONG, 7, 7], "a").num_cached_tokens == 48
    assert clients.executor.num_recalled == 12 - num_host_blocks
    counts = clients.advice.counts()
    assert (counts["advice_loaded_blocks"], counts["advice_used_blocks"]) == (12, 12)
    assert clients.advise("dontneed", "a").outcome == "accepted", "its blocks are still its own"
    assert_all_free(clients.scheduler)


def test_a_disk_that_has_lost_a_block_gives_the_blocks_before_it() -> None:
    clients = with_disk()
    name = list(clients.executor.storage)[8]
    del clients.executor.storage[name]
    clients.advise("willneed", "a", seconds=5.0)
    clients.settle()
    assert on_device(clients) == 8
    assert clients.turn([*LONG, 7, 7], "a").num_cached_tokens == 32
    check_states(clients.scheduler.kv.pool)
    assert_all_free(clients.scheduler)


@pytest.mark.parametrize("lost", [False, True])
def test_a_prompt_comes_from_another_executor(lost: bool) -> None:
    holder, clients = Clients(), Clients()
    beside(holder, clients)
    holder.turn(LONG, "a")
    done = clients.advise("willneed", tokens=pack_int32s(LONG), seconds=5.0)
    assert (done.outcome, done.blocks) == ("accepted", 12)
    if lost:
        plan = clients.scheduler.schedule(0.0)
        assert plan is not None
        clients.executor.peers.clear()
        clients.scheduler.peer_lost("first")
        clients.scheduler.update(clients.executor.execute(plan))
    clients.settle()
    assert on_device(clients) == (0 if lost else 12)
    assert holder.scheduler.kv.pool.num_remote_pins == 0
    assert clients.turn([*LONG, 7, 7], "a").num_cached_tokens == (0 if lost else 48)
    check_states(clients.scheduler.kv.pool)
    assert_all_free(clients.scheduler)


def test_the_time_that_a_tier_needs_decides_when_a_load_pays() -> None:
    """The value of a block that displaces others counts from the time at which it can be there."""
    clients = Clients(costs=Costs(tiers={HOST: CopyCosts(load_block=1e-4)}), num_host_blocks=64)
    clients.turn(LONG, "a")
    clients.advise("willneed", "a", seconds=100.0)
    policy = clients.scheduler.kv.pool.policy
    assert isinstance(policy, CostAware)
    node = clients.path(LONG)[-1]
    assert 0 < policy.uses_from(node, 0.0) < policy.uses_from(node, 80.0)


def test_a_load_does_not_count_as_the_use_that_it_expects() -> None:
    clients = Clients(num_host_blocks=16)
    clients.turn(LONG, "a")
    clients.advise("cold", "a")
    clients.settle()
    clients.advise("willneed", "a", seconds=50.0)
    before = [node.last_used for node in clients.path(LONG)]
    clients.now = 40.0
    clients.turn(prompt(9), "b")
    assert on_device(clients) == 12
    assert [node.last_used for node in clients.path(LONG)] == before


def away_from_device(clients: Clients) -> None:
    clients.advise("cold", "a")
    clients.settle()
    assert on_device(clients) == 0


def learn(clients: Clients, returns: int) -> None:
    """Let the session return so often a minute after it has called a tool."""
    for _ in range(returns):
        clients.turn(LONG, "a")
        clients.advise("called", "a", tools=("run_tests",))
        clients.now += 60.0


def test_kv_comes_at_the_time_at_which_a_tool_has_returned_before() -> None:
    clients = Clients(num_host_blocks=64)
    learn(clients, 40)
    clients.now -= 60.0
    away = on_device(clients)
    nodes = clients.path(LONG)
    clients.scheduler.plan.copy(clients.scheduler.kv.pool.evict_nodes(reversed(nodes)))
    clients.turn(prompt(9, 4), "b")
    assert (away, on_device(clients)) == (12, 0), "the session has just left"
    clients.now += 30.0
    clients.turn(prompt(9, 4), "b")
    assert on_device(clients) == 0
    clients.now += 27.0
    assert clients.scheduler.features.are_due(clients.now), "a step is planned for it alone"
    clients.settle()
    assert on_device(clients) == 12
    assert clients.turn([*LONG, 7], "a").num_cached_tokens == 48
    assert clients.advice.counts()["advice_used_blocks"] == 12
    assert_all_free(clients.scheduler)

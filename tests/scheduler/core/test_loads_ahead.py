"""Loads of KV ahead of its use: by advice from all tiers, and at learned times."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from pagewise_scheduler.core.tiers.arena import WindowShape
from pagewise_scheduler.core.tiers.cache_reset import reset_cache
from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_scheduler.server.advice import advise
from pagewise_shared.protocol import DISK, HOST, Advise, pack_int32s

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
    counts = clients.scheduler.features.counts()
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


@pytest.mark.parametrize("num_stored", [0, 7, 12])
def test_a_prompt_that_others_have_written_is_looked_up(num_stored: int) -> None:
    first, clients = with_disk(), Clients(hashed={DISK: "a disk"})
    clients.executor.storage = dict(list(first.executor.storage.items())[:num_stored])
    assert clients.advise("willneed", tokens=pack_int32s(LONG), seconds=5.0).outcome == "accepted"
    clients.settle()
    assert on_device(clients) == clients.executor.num_recalled == num_stored
    assert clients.turn([*LONG, 7, 7], "a").num_cached_tokens == 4 * num_stored
    assert clients.advise("dontneed", "a").outcome == "accepted"
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


def test_of_several_executors_the_one_of_the_last_turn_loads() -> None:
    first, last = Clients(num_host_blocks=16), Clients(num_host_blocks=16)
    for number, clients in enumerate((first, last, first), 1):
        clients.now = 10.0 * number
        clients.turn(LONG, "a")
    for clients in (first, last):
        clients.advise("cold", "a")
        clients.settle()
    handles: Any = [SimpleNamespace(scheduler=one.scheduler, touch=lambda: None) for one in (last, first)]
    told = advise(Advise(7, 1, "willneed", session="a", seconds=5.0), handles, lambda _: nullcontext())
    assert (told.outcome, told.blocks, told.tokens) == ("accepted", 12, 48)
    for clients in (first, last):
        clients.settle()
    assert (on_device(first), on_device(last)) == (12, 0)


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


def learn(clients: Clients, returns: int, **costs: float) -> None:
    """Let a session return so often a minute after it has called a tool. At last, its KV goes to host memory."""
    for number in range(returns):
        clients.now += 60.0 * (number > 0)
        clients.turn(LONG, "a")
        clients.advise("called", "a", tools=("run_tests",))
    kv = clients.scheduler.kv
    clients.scheduler.plan.copy(kv.pool.evict_nodes(reversed(clients.path(LONG))))


@pytest.mark.parametrize(("block", "absent", "there"), [(1e-4, 50.0, 57.0), (1.5, 30.0, 40.0)])
def test_kv_comes_when_a_tool_has_returned_before_and_earlier_over_slow_links(
    block: float, absent: float, there: float
) -> None:
    clients = Clients(num_host_blocks=64, costs=Costs(tiers={HOST: CopyCosts(load_block=block)}))
    learn(clients, 40)
    left = clients.now
    for seconds in (0.0, absent):
        clients.now = left + seconds
        clients.turn(prompt(9, 4), "b")
        assert on_device(clients) == 0
    clients.now = left + there
    assert clients.scheduler.features.are_due(clients.now), "a step is planned for it alone"
    clients.settle()
    assert on_device(clients) == 12
    assert clients.turn([*LONG, 7], "a").num_cached_tokens == 48
    assert clients.scheduler.features.counts()["advice_used_blocks"] == 12
    assert_all_free(clients.scheduler)


def test_loads_at_learned_times_that_are_in_vain_are_bounded() -> None:
    """Sessions of a tool that returned after a minute stay away: so many blocks are loaded for them, and no more."""
    clients = Clients(num_blocks=400, num_host_blocks=400)
    learn(clients, 40)
    clients.scheduler.features.loads_ahead.forget(clients.path(LONG))
    for number in range(2, 14):
        clients.turn(prompt(number, 40), f"s{number}")
        clients.advise("called", f"s{number}", tools=("run_tests",))
        clients.scheduler.plan.copy(clients.scheduler.kv.pool.evict_nodes(reversed(clients.path(prompt(number, 40)))))
    clients.now += 57.0
    clients.settle()
    assert 64 <= clients.scheduler.features.counts()["advice_loaded_blocks"] <= 64 + 10
    assert clients.scheduler.features.counts()["advice_used_blocks"] == 0


def groups(**options: int) -> Clients:
    clients = Clients(**({"num_pages": 200, "pages": 1, "host_pages": 60} | options), windows=WINDOWS)
    clients.turn(prompt(1, 20), "a")
    return clients


def test_pins_keep_the_windows_and_states_that_a_sequence_needs() -> None:
    clients = groups()
    done = clients.advise("pin", "a", seconds=30.0)
    assert (done.outcome, done.blocks, done.seconds) == ("accepted", 5, 30.0)
    evict(clients.scheduler, 200)
    assert on_device(clients, prompt(1, 20)) == 5
    again = clients.turn([*prompt(1, 20), 7], "a")
    assert again.cached_tokens["device"] == 20
    check_arena(clients.scheduler, lends=True)
    assert clients.advise("unpin", "a").blocks == 5
    evict(clients.scheduler, 200)
    assert on_device(clients, prompt(1, 20)) == 0
    check_arena(clients.scheduler)


def test_a_pin_counts_all_pages_and_ends_where_a_sequence_can_begin() -> None:
    clients = groups()  # of 200 pages, a key pins 20
    done = clients.advise("pin", "a")
    assert done.blocks == 5
    clients.turn(prompt(2, 90), "b")
    refused = clients.advise("pin", "b")
    assert (refused.outcome, refused.reason) == ("refused", "an API key pins at most a tenth of the device")
    clients.turn([*prompt(2, 90), 7, 7], "b", "other key")
    assert clients.advise("pin", tokens=pack_int32s(prompt(2, 12))).outcome == "refused", "no windows are there"
    clients.turn(prompt(3, clients.scheduler.kv.capacity_tokens - 1))  # it fits only without the pinned pages
    check_arena(clients.scheduler)
    assert_all_free(clients.scheduler)


def test_windows_and_states_go_to_host_memory_and_come_back_ahead_of_their_use() -> None:
    clients = groups()
    done = clients.advise("cold", "a")
    clients.settle()
    assert (done.outcome, done.blocks) == ("accepted", 5)
    path = clients.path(prompt(1, 20))
    assert [node.block for node in path] == [-1] * 5
    kv = clients.scheduler.kv
    assert not any(node in group.at for group in kv.windows for node in path)
    assert kv.can_begin(path[-1])
    check_arena(clients.scheduler)
    assert clients.advise("willneed", "a", seconds=5.0).blocks == 5
    clients.settle()
    assert kv.can_begin(path[-1], device_only=True)
    check_arena(clients.scheduler)
    assert clients.executor.num_windows_loaded > 1
    again = clients.turn([*prompt(1, 20), 7], "a")
    assert again.cached_tokens["device"] == again.num_cached_tokens == 20
    assert clients.scheduler.features.counts()["advice_used_blocks"] == 5


@pytest.mark.parametrize("lost", [False, True])
def test_windows_that_do_not_come_leave_nothing(lost: bool) -> None:
    clients = groups()
    clients.advise("cold", "a")
    clients.settle()
    clients.advise("willneed", "a", seconds=5.0)
    if lost:
        assert clients.scheduler.schedule(clients.now) is not None
        assert not clients.scheduler.fail(2)
        clients.executor.reset(2)
    else:
        clients.executor.spoilt_windows = set(range(60))
    clients.settle()
    path = clients.path(prompt(1, 20))
    assert not any(clients.scheduler.kv.can_begin(node, device_only=True) for node in path)
    check_arena(clients.scheduler)
    assert clients.turn([*prompt(1, 20), 7], "a").num_cached_tokens < 20
    check_arena(clients.scheduler)


@pytest.mark.parametrize("way", ["hint", "willneed", "fork"])
def test_what_is_predicted_keeps_windows_and_states(way: str) -> None:
    """Of two sessions, the one that is said to come back soon keeps its last windows and states."""
    clients = Clients(num_pages=120, pages=1, windows=WINDOWS)
    kept, lost = prompt(1, 40), prompt(2, 40)
    clients.turn(kept, "soon", returns_in=20.0 if way == "hint" else -1.0)
    clients.turn(lost, "late", returns_in=1e5)
    if way != "hint":
        assert clients.advise(way, "soon", seconds=20.0).outcome == "accepted"
    clients.now += 1.0
    clients.turn(prompt(3, 40), "now", returns_in=1.0)
    kv = clients.scheduler.kv
    while any(kv.can_begin(node, device_only=True) for node in clients.path(lost)):
        assert any(kv.can_begin(node, device_only=True) for node in clients.path(kept)[-2:])
        evict(clients.scheduler, kv.num_free + 1)
    assert any(kv.can_begin(node, device_only=True) for node in clients.path(kept)[-2:])
    check_arena(clients.scheduler)


@pytest.mark.parametrize("salt", ["", "key:other"])
def test_a_load_in_flight_brings_nothing_back_after_a_reset_of_the_cache(salt: str) -> None:
    clients = with_disk()
    clients.advise("willneed", "a", seconds=5.0)
    plan = clients.scheduler.schedule(0.0)
    assert plan is not None
    clients.scheduler.features.loads_ahead.cache_reset(salt)
    reset_cache(clients.scheduler.kv, salt)
    clients.scheduler.update(clients.executor.execute(plan))
    clients.settle()
    assert on_device(clients) == (12 if salt else 0)
    check_states(clients.scheduler.kv.pool)
    assert_all_free(clients.scheduler)

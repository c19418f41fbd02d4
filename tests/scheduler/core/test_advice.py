"""Sessions, and advice on their KV."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_scheduler.core.features.advice import Advice
from pagewise_scheduler.core.features.trust import Trust
from pagewise_scheduler.core.memory.eviction_history import ENDED, key_of
from pagewise_scheduler.core.memory.predicted_uses import (
    _MOST_ALONE,
    _MOST_OF_KEY,
    SHARED,
    TOOLS,
    PredictedUses,
)
from pagewise_scheduler.core.memory.prefix_tree import PrefixTree, left_behind, name_of
from pagewise_scheduler.core.tiers.arena import WindowShape
from pagewise_shared.block_hash import unpack_names
from pagewise_shared.protocol import DISK, HOST, DropStored

from tests.scheduler.core.advising import Clients, prompt
from tests.scheduler.core.arenas import check_arena
from tests.scheduler.core.builders import create_request, evict
from tests.scheduler.core.driving import assert_all_free, check_states, run


def test_ended_sessions_give_way_before_all_others() -> None:
    clients = Clients()
    clients.turn(prompt(1), "a")
    clients.turn(prompt(2), "b", ends=True)
    clients.turn(prompt(3), "c")
    evict(clients.scheduler, clients.scheduler.kv.num_free + 4)
    assert [len(clients.path(prompt(n))) for n in (1, 2, 3)] == [4, 0, 4]


def test_blocks_that_the_next_turn_has_not_taken_give_way() -> None:
    clients = Clients()
    clients.turn(prompt(1), "a")
    changed = prompt(1)[:8] + prompt(9)
    clients.turn(changed, "a")
    left = [node for node in clients.path(prompt(1)) if node not in clients.path(changed)]
    assert len(left) == 2
    assert all(node.prediction == ENDED for node in left)
    assert all(node.prediction > ENDED for node in clients.path(changed))


@pytest.mark.parametrize(("before", "last"), [(1, 1), (5, 8), (8, 5), (3, 0), (0, 3)])
def test_blocks_are_left_behind_where_two_prefixes_part(before: int, last: int) -> None:
    tree = PrefixTree(1)
    common = tree.extend(tree.root(None), [bytes([number]) for number in range(4)])
    ends = [common[-1], common[-1]]
    for side, length in enumerate((before, last)):
        path = tree.extend(common[-1], [bytes([10 + side, number]) for number in range(length)])
        ends[side] = path[-1] if path else common[-1]
        if not side:
            left = path[::-1]
    assert [*left_behind(*ends)] == left
    elsewhere = tree.extend(tree.root("other"), [b"a", b"b"])[-1]
    assert [*left_behind(common[-1], elsewhere)] == common[::-1]


def test_blocks_of_several_sessions_keep_their_class() -> None:
    clients = Clients()
    clients.turn(prompt(1), "a", returns_in=5.0)
    clients.turn(prompt(1), "b", ends=True)
    assert {node.session for node in clients.path(prompt(1))} == {SHARED}
    assert not any(node.prediction for node in clients.path(prompt(1)))
    assert clients.advise("dontneed", "b").outcome == "refused"
    assert len(clients.path(prompt(1))) == 4


def test_requests_without_sessions_use_no_advice() -> None:
    clients = Clients()
    clients.turn(prompt(1))
    assert not any(isinstance(one, Advice) for one in clients.scheduler.features.in_use)


def test_a_key_that_lies_loses_its_trust_alone() -> None:
    clients = Clients()
    for number in range(6):
        clients.now = 100.0 * number
        clients.turn(prompt(1), "a", "liar", ends=True)
        clients.turn(prompt(2), "b", "honest", returns_in=100.0)
        clients.turn(prompt(3), "c", "early", returns_in=1.0)
    counts = clients.advice.counts()
    assert (counts["hints_broken"], counts["hints_kept"]) == (10, 5)
    assert clients.path(prompt(1))[0].prediction > ENDED, "the session of a key whose ends are mostly broken waits"
    assert clients.advise("end", "a", "liar").outcome == "refused"
    assert clients.advise("end", "b", "honest").outcome == "accepted"
    hints = clients.advice._hints
    shares = {key: (hints._ends if key == "liar" else hints._trust)[key].share for key in ("liar", "honest", "early")}
    assert shares["honest"] == 1
    assert shares["liar"] == shares["early"] == 8 / 9


def test_what_broken_hints_have_claimed_is_charged_to_their_key_alone() -> None:
    clients = Clients()
    for number in range(24):
        clients.now = 100.0 * number
        for key, seconds in (("liar", 1.0), ("honest", 100.0), ("new", -1.0)):
            clients.turn(prompt(ord(key[0])), key, key, returns_in=seconds)
    clients.turn(prompt(2), "b", "liar", returns_in=100.0)
    clients.turn(prompt(1), "a", "honest", returns_in=100.0)
    clients.turn(prompt(3), "c", "new", returns_in=100.0)
    policy = clients.scheduler.kv.pool.policy
    honest, liar, new = (policy.value(clients.path(prompt(number))[0]) for number in (1, 2, 3))
    assert liar < min(honest, new) / 2


def test_ends_are_kept_if_the_session_stays_away() -> None:
    clients = Clients()
    for number in range(9):
        clients.turn(prompt(number), f"s{number}", ends=True)
    for now in (599.0, 1200.0):
        clients.now = now
        clients.turn(prompt(10), "other")
        assert clients.advice.counts()["hints_kept"] == (9 if now > 600 else 0)
    clients.turn(prompt(1), "s1")
    assert clients.advice.counts()["hints_broken"] == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), max_size=80))
def test_broken_hints_are_charged_by_their_blocks(hints: list[tuple[int, bool]]) -> None:
    trust, truth = Trust(), Trust()
    for blocks, kept in hints:
        trust.count(blocks, kept=kept)
        truth.count(blocks, kept=True)
    assert truth.share == 1
    assert 0 < trust.share <= 1
    if len(hints) < 64 and sum(blocks for blocks, kept in hints if kept) * 2 >= sum(blocks for blocks, _ in hints):
        assert trust.share == 1
    before = trust.share
    trust.count(10_000, kept=False)
    assert trust.share <= before


_OBSERVED = st.lists(
    st.tuples(st.integers(0, 80), st.floats(0.1, 1e5), st.booleans(), st.sampled_from(["liar", "honest", "other"])),
    max_size=40,
)


@settings(max_examples=25, deadline=None)
@given(_OBSERVED, st.integers(1, 40))
def test_what_a_key_does_is_bounded_for_others(seen: list[tuple[int, float, bool, str]], times: int) -> None:
    """Its hints change nothing. A table of waits hears of it as much as of all others, and a little more."""
    uses, alone = PredictedUses(), PredictedUses()
    for what, seconds, returned, key in [("honest", 3.0, True, "honest"), *seen] * times:
        for each in (uses, alone) if key == "honest" else (uses,):
            for source in (each.hints_of(key), each.source(TOOLS, (f"tool {what}",), key)):
                count = each.returned if returned else each.reach
                count(each.time(source, 32.0), seconds, 0, key)
    rates = [each._tables[each.hints_of("honest")].rates for each in (uses, alone)]
    assert rates[0] == rates[1]
    assert sum(by == "liar" for _, by in uses._sources.values()) <= _MOST_OF_KEY
    for table in uses._tables.values():
        if len(told := table._told) > 1:
            heard_alone = 40 * times  # at most, before another key was seen
            assert 2 * told["liar"] <= told.total() + _MOST_ALONE + heard_alone


def test_a_key_that_many_use_with_learns_from_all_and_one_cannot_outvote_them() -> None:
    uses = PredictedUses()
    source = uses.source(TOOLS, ("read_file",), "honest")
    for number in range(2000):
        uses.returned(uses.time(source, 32.0), 2.0, 0, f"honest {number % 4}" if number % 20 == 0 else "liar")
        uses.reach(uses.time(source, 32.0), 1e4, 0, "liar")
    told = uses._tables[source]._told
    assert told["liar"] <= 100 + _MOST_ALONE + 1


def test_dontneed_deletes_the_blocks_of_the_session_in_storage() -> None:
    clients = Clients(hashed={DISK: "disk"})
    clients.turn(prompt(1), "a")
    clients.turn(prompt(2), "b")
    names, storage = [name_of(node) for node in clients.path(prompt(1))], clients.executor.storage
    assert (len(names), len(storage)) == (4, 8)
    evict(clients.scheduler, clients.scheduler.kv.num_free + 3)
    assert len(clients.path(prompt(1))) == 1, "storage alone has the others"
    outcome = clients.advise("dontneed", "a")
    assert (outcome.outcome, outcome.blocks) == ("accepted", 4)
    (drop,) = clients.scheduler.features.messages(0.0)
    assert isinstance(drop, DropStored)
    assert (drop.tier, set(unpack_names(drop.names)), drop.tag) == (DISK, set(names), b"")
    assert clients.scheduler.features.messages(0.0) == []
    for name in names:
        del storage[name.hash]
    clients.turn(prompt(1), "a")
    assert set(storage) >= {name.hash for name in names}, "written again"

    evict(clients.scheduler, clients.scheduler.kv.num_total)
    clients.turn(prompt(1), "c")
    clients.turn(prompt(1), "d")
    assert clients.advise("dontneed", "a").outcome == "refused", "other sessions have brought them back"
    assert clients.scheduler.features.messages(0.0) == []


@pytest.mark.parametrize("kind", ["cold", "dontneed"])
def test_advice_releases_memory_of_the_session_alone(kind: str) -> None:
    clients = Clients(num_host_blocks=16)
    clients.turn(prompt(1), "a")
    clients.turn(prompt(2), "b")
    assert clients.advise(kind, "a", "other key").outcome == "refused"
    done = clients.advise(kind, "a")
    assert (done.outcome, done.blocks) == ("accepted", 4)
    run(clients.scheduler, clients.executor)
    found = clients.path(prompt(1))
    assert [node.block for node in found] == ([-1] * 4 if kind == "cold" else [])
    assert all(node.num_tiers == 1 for node in found)
    assert len(clients.path(prompt(2))) == 4


def test_kv_comes_from_host_memory_ahead_of_its_use() -> None:
    clients = Clients(num_host_blocks=16)
    clients.turn(prompt(1), "a")
    clients.advise("cold", "a")
    run(clients.scheduler, clients.executor)
    assert [node.block for node in clients.path(prompt(1))] == [-1] * 4
    assert clients.advise("willneed", "a", seconds=5.0).outcome == "accepted"
    run(clients.scheduler, clients.executor)
    assert all(node.block >= 0 for node in clients.path(prompt(1)))
    assert clients.scheduler.features.counts()["advice_loaded_blocks"] == 4
    check_states(clients.scheduler.kv.pool)
    assert_all_free(clients.scheduler)


def test_a_turn_that_comes_while_its_blocks_are_loaded_gets_them() -> None:
    clients = Clients(num_host_blocks=16)
    scheduler, executor = clients.scheduler, clients.executor
    clients.turn(prompt(1), "a")
    clients.advise("cold", "a")
    run(scheduler, executor)
    clients.advise("willneed", "a", seconds=5.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    request = create_request([*prompt(1), 7, 7], 1)
    scheduler.add(request)
    scheduler.update(executor.execute(plan))
    run(scheduler, executor)
    assert request.num_cached_tokens == 16
    check_states(scheduler.kv.pool)
    assert_all_free(scheduler)


def test_turns_that_the_session_has_left_are_released_with_it() -> None:
    clients = Clients()
    clients.turn(prompt(1), "a")
    clients.turn(prompt(1)[:8] + prompt(9), "a")
    assert clients.advise("dontneed", "a").outcome == "accepted"
    assert not clients.path(prompt(1))
    assert clients.scheduler.kv.num_free == clients.scheduler.kv.num_total


@pytest.mark.parametrize("lost", [False, True])
def test_loads_ahead_that_fail_leave_nothing(lost: bool) -> None:
    """Either a copy comes back corrupt, or the executor is reset before it comes."""
    clients = Clients(num_host_blocks=16)
    scheduler, executor = clients.scheduler, clients.executor
    clients.turn(prompt(1), "a")
    clients.advise("cold", "a")
    run(scheduler, executor)
    path = clients.path(prompt(1))
    clients.advise("willneed", "a", seconds=5.0)
    if lost:
        assert scheduler.schedule(clients.now) is not None
        assert not scheduler.fail(2)
        executor.reset(2)
    else:
        executor.spoil = {path[2].copies[HOST]}
        run(scheduler, executor)
        assert [node.block >= 0 for node in clients.path(prompt(1))] == [True, True]
        check_states(scheduler.kv.pool)
    assert_all_free(scheduler)
    clients.turn(prompt(1), "a")
    assert_all_free(scheduler)


def test_kv_that_is_used_later_displaces_nothing() -> None:
    clients = Clients(num_blocks=16, num_host_blocks=64)
    clients.turn(prompt(1), "late")
    clients.advise("cold", "late")
    for number in range(2, 5):
        clients.now += 1.0
        clients.turn(prompt(number, 20), f"soon {number}", returns_in=1.0)
    clients.turn(prompt(9), "now")
    on_device = [node for number in range(2, 5) for node in clients.path(prompt(number, 20)) if node.block >= 0]
    clients.advise("willneed", "late", seconds=1e6)
    clients.turn(prompt(8, 2), "now")
    assert len([node for node in clients.path(prompt(1)) if node.block >= 0]) <= clients.scheduler.kv.num_free
    assert all(node.block >= 0 for node in on_device)


@pytest.mark.parametrize("way", ["hint", "end", "dontneed"])
def test_the_end_of_a_session_releases_its_states(way: str) -> None:
    windows = (WindowShape(2, 3, state=True), WindowShape(5, 1))
    clients = Clients(num_pages=200, pages=1, windows=windows, host_pages=60)
    for number in (1, 2):
        clients.turn(prompt(number, 20), f"s{number}", ends=way == "hint" and number == 1)
    if way != "hint":
        assert clients.advise(way, "s1").outcome == "accepted"
    states, window = clients.scheduler.kv.windows
    for group in (states, window):
        assert not any(node in group.at for node in clients.path(prompt(1, 20)))
        assert any(node in group.at for node in clients.path(prompt(2, 20)))
    assert len(clients.path(prompt(1, 20))) == (0 if way == "dontneed" else 5)
    check_arena(clients.scheduler)
    clients.turn([*prompt(2, 20), 7], "s2")
    clients.turn([*prompt(1, 20), 7], "s1")
    check_arena(clients.scheduler)


def test_lost_blocks_tell_what_advice_did() -> None:
    clients = Clients()
    ends = {}
    for number, hints in ((1, {}), (2, {"ends": True}), (3, {})):
        clients.turn(prompt(number), f"s{number}", **hints)
        ends[number] = key_of(clients.path(prompt(number))[-1])
    clients.advise("dontneed", "s1")
    evict(clients.scheduler, clients.scheduler.kv.num_free + 8)
    found = {number: clients.scheduler.kv.eviction_history.lost.find(key) for number, key in ends.items()}
    said = {number: (one.reason, one.policy) for number, one in found.items() if one is not None}
    assert said == {1: ("advice", "CostAware"), 2: ("evicted", "EndedSession"), 3: ("evicted", "CostAware")}


def test_pins_end_when_their_time_is_over() -> None:
    clients = Clients()
    clients.turn(prompt(1), "a")
    assert clients.advise("pin", "a", seconds=30.0).seconds == 30.0
    for now, held in ((20.0, 4), (40.0, 0)):
        clients.now = now
        clients.turn(prompt(2, 2), "b")
        evict(clients.scheduler, 64)
        assert len(clients.path(prompt(1))) == held


def test_a_pin_ends_on_an_executor_that_has_nothing_to_do() -> None:
    clients = Clients()
    clients.turn(prompt(1), "a")
    clients.advise("pin", "a", seconds=30.0)
    features = clients.scheduler.features
    assert not features.are_due(clients.now + 29.0)
    assert features.are_due(clients.now + 31.0)
    assert clients.scheduler.schedule(clients.now + 31.0) is None
    assert not features.are_due(clients.now + 31.0)
    assert_all_free(clients.scheduler)


def test_pins_are_bounded_expire_and_give_way() -> None:
    clients = Clients()  # 64 blocks, of which a key pins 6
    clients.turn(prompt(1, 40), "a")
    done = clients.advise("pin", "a", seconds=1e6)
    assert (done.outcome, done.blocks, done.seconds) == ("clipped", 6, 3600.0)
    evict(clients.scheduler, 64)
    assert len(clients.path(prompt(1, 40))) == 6
    assert clients.advise("unpin", "a").blocks == 6
    clients.advise("pin", "a")
    clients.turn(prompt(2, 63 * 4))  # it fits only without the pinned blocks
    assert_all_free(clients.scheduler)


def test_tools_that_take_long_make_their_sessions_worth_less_until_then() -> None:
    clients = Clients()
    for number in range(24):
        clients.turn(prompt(1), "slow")
        clients.advise("called", "slow", tools=("run_tests",))
        for part in range(4):
            clients.turn(prompt(2), "fast")
            clients.advise("called", "fast", tools=("read_file",))
            clients.turn(prompt(3 + 4 * number + part), ends=True)  # time is counted in blocks that come in
            clients.now += 2.0
    policy, worth = clients.scheduler.kv.pool.policy, []
    for first, session, tool in ((1, "slow", "run_tests"), (2, "fast", "read_file")):
        clients.turn(prompt(first), session)
        clients.advise("called", session, tools=(tool,))
        worth.append(policy.value(clients.path(prompt(first))[0]))
    assert 0 < worth[0] < worth[1]


def test_a_session_that_has_waited_long_is_expected_to_do_so_again() -> None:
    clients = Clients(num_blocks=64)
    for number in range(16):
        clients.now = 100.0 * number
        clients.turn(prompt(1), "slow")
        for step in range(4):
            clients.now += 2.0 * (step > 0)
            clients.turn(prompt(2 + number), f"fast {number}")
    clients.now += 2.0
    clients.turn(prompt(50), "new")
    clients.turn(prompt(1), "slow")
    clients.turn(prompt(17), "fast 15")
    evict(clients.scheduler, 64 - 8)
    assert [len(clients.path(prompt(n))) for n in (1, 17, 50)] == [0, 4, 4]


def test_a_sub_agent_leaves_the_blocks_of_its_parent_to_it() -> None:
    clients = Clients()
    clients.turn(prompt(1), "parent", returns_in=9.0)
    before = [(node.session, node.prediction) for node in clients.path(prompt(1))]
    clients.turn(prompt(1) + prompt(2), "child", parent="parent", ends=True)
    assert [(node.session, node.prediction) for node in clients.path(prompt(1))] == before
    assert all(node.prediction == ENDED for node in clients.path(prompt(1) + prompt(2))[4:])


def test_a_parent_that_ends_leaves_its_blocks_to_live_sub_agents() -> None:
    clients = Clients()
    clients.turn(prompt(1), "parent")
    clients.turn(prompt(1) + prompt(2), "first", parent="parent", returns_in=9.0)
    clients.turn(prompt(1)[:8] + prompt(3), "second", parent="parent")
    clients.turn(prompt(1)[:4] + prompt(4), "ended", parent="parent", ends=True)
    clients.turn([*prompt(1), *prompt(5)], "parent", ends=True)
    first, second = clients.path(prompt(1) + prompt(2)), clients.path(prompt(1)[:8] + prompt(3))
    assert [node.session for node in first[:2]] == [SHARED] * 2
    assert {(node.session, node.prediction) for node in first[2:]} == {(first[-1].session, first[-1].prediction)}
    assert second[-1].session not in (SHARED, first[-1].session)
    assert all(node.prediction == ENDED for node in clients.path(prompt(1) + prompt(5))[4:])
    assert clients.advise("end", "first").blocks == 6
    assert second[-1].prediction > ENDED


@pytest.mark.parametrize("kind", ["end", "dontneed", "cold"])
def test_advice_on_a_sub_agent_leaves_its_parent_alone(kind: str) -> None:
    clients = Clients(num_host_blocks=16)
    clients.turn(prompt(1), "parent", returns_in=9.0)
    clients.turn(prompt(1) + prompt(2), "child", parent="parent")
    before = [(node.block, node.session, node.prediction) for node in clients.path(prompt(1))]
    assert clients.advise(kind, "child").blocks == 4
    assert [(node.block, node.session, node.prediction) for node in clients.path(prompt(1))] == before
    if kind == "dontneed":
        clients.turn(prompt(1) + prompt(2), "child", parent="parent")
        assert clients.advise(kind, "parent").outcome == "refused", "a live session begins with its blocks"


@pytest.mark.parametrize("comes", [True, False])
def test_a_fork_keeps_the_parents_blocks_until_it_begins(comes: bool) -> None:
    """They are worth at least what the parent's return makes them worth, the whole time."""
    clients = Clients()
    clients.turn(prompt(1), "parent", returns_in=1e5)
    clients.turn(prompt(9), ends=True)
    policy, path = clients.scheduler.kv.pool.policy, clients.path(prompt(1))
    alone, before = [policy.value(node) for node in path], [node.prediction for node in path]
    assert clients.advise("fork", "child", parent="parent", seconds=10.0).blocks == 4
    assert all(policy.value(node) > value for node, value in zip(path, alone, strict=True))
    if comes:
        clients.turn(prompt(1) + prompt(2), "child")
    for clients.now in (30.0, 60.0):
        clients.turn(prompt(9), "other")
    assert [node.prediction for node in path] == before
    assert {node.session for node in path} == {1}, "they are the parent's still"
    counts = clients.advice.counts()
    assert (counts["hints_kept"], counts["hints_broken"]) == (comes, not comes)
    assert clients.advise("fork", "late", parent="parent", seconds=1e5).outcome == "accepted"
    assert [node.prediction for node in path] == before, "the parent's return makes them worth more"


def test_hints_again_and_again_do_not_put_off_the_judgement() -> None:
    clients = Clients()
    clients.turn(prompt(1), "a")
    clients.turn(prompt(2))
    tokens = b"".join(token.to_bytes(4, "little") for token in prompt(2))
    for clients.now in map(float, range(3, 90, 3)):
        clients.advise("willneed", "a", seconds=1.0)
        clients.advise("willneed", tokens=tokens, seconds=1.0)
        clients.turn(prompt(3), "other", "other key")
    assert clients.advice.counts()["hints_broken"] >= 20
    assert clients.advice._hints._trust[""].share < 0.5
    clients.advise("willneed", tokens=tokens, seconds=1.0)
    for clients.now in (91.0, 120.0):
        clients.turn(prompt(2))
    assert clients.advice.counts()["hints_kept"] == 1


def test_advice_by_the_id_of_a_request_reaches_its_own_blocks() -> None:
    clients = Clients()
    clients.turn(prompt(1), "a")
    ids = {}
    for number, session in ((2, ""), (3, ""), (4, "a"), (5, "a")):
        clients.turn(prompt(number), session, ends=session == "a")
        ids[number] = list(clients.advice._sessions._ended)[-1][1]
    for number in (2, 3):
        assert clients.advise("dontneed", key="other", request_id=ids[number]).outcome == "refused"
        assert clients.advise("dontneed", request_id=ids[number]).blocks == 4
        assert not clients.path(prompt(number))
    assert clients.advise("dontneed", request_id=ids[4]).blocks == 4, "an earlier turn of a session"
    assert [len(clients.path(prompt(number))) for number in (4, 5)] == [0, 4]


_KINDS = st.sampled_from(["willneed", "cold", "dontneed", "pin", "unpin", "fork", "end", "called"])
_ACTIONS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 24), st.none() | _KINDS), max_size=12
)


_GROUPS = {"num_pages": 90, "pages": 1, "windows": (WindowShape(2, 3, state=True), WindowShape(5, 1)), "host_pages": 40}


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 24, "num_host_blocks": 8},
        {"num_blocks": 24, "num_host_blocks": 8, "hashed": {DISK: "a disk"}},
        _GROUPS,
    ],
    ids=["host", "disk", "groups"],
)
def test_memory_stays_right_whatever_is_advised(options: dict[str, Any]) -> None:
    """Pinned blocks stay until their time is over or a sequence needs them, and nothing is held in the end."""

    @settings(max_examples=8, deadline=None)
    @given(_ACTIONS)
    def check(actions: list[tuple[int, int, int, str | None]]) -> None:
        clients = Clients(**options)
        scheduler = clients.scheduler
        for number, first, length, kind in actions:
            clients.now += 7.0
            if kind is None:
                clients.turn(prompt(first, 3 * length), f"s{number}", f"k{number % 2}", returns_in=float(first - 1))
            else:
                clients.advise(kind, f"s{number}", f"k{number % 2}", seconds=5.0, tools=("t",))
            clients.settle()
            check_states(scheduler.kv.pool)
            pinned = [node for pin in clients.advice.pins._pins for node in pin.nodes]
            evict(scheduler, 2)
            assert all(node.block >= 0 for node in pinned)
            assert all(scheduler.kv.can_begin(node, device_only=True) for node in clients.advice.pins.ends)
        clients.settle()
        for feature in scheduler.features.in_use:
            feature.clear()
        assert_all_free(scheduler)
        if scheduler.kv.windows:
            check_arena(scheduler)

    check()

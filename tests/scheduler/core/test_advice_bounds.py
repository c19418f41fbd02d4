"""Wrong or plenty of advice costs the API key that gave it, and the tables of advice are bounded."""

import pytest
from pagewise_scheduler.core.features.sessions import _LEAST_BLOCKS, _MOST_SESSIONS, Sessions
from pagewise_scheduler.core.memory.eviction_history import ENDED, key_of
from pagewise_scheduler.core.memory.predicted_uses import _MOST_SOURCES, TOOLS, PredictedUses
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_shared.protocol import DISK, HOST, pack_int32s

from tests.scheduler.core.advising import Clients, prompt
from tests.scheduler.core.builders import evict
from tests.scheduler.core.driving import assert_all_free


def block(depth: int) -> CachedBlock:
    node = CachedBlock(None, b"", ())
    node.depth = depth
    return node


# ---- trust -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [0, 20])
def test_a_key_that_lies_does_not_get_its_trust_back_by_new_sources(others: int) -> None:
    uses = PredictedUses()
    source = uses.hints_of("liar")
    uses.charge(source, 0.1)
    prediction = uses.time(source, 10.0)
    before = uses.value(prediction, 0)
    for number in range(_MOST_SOURCES):
        uses.source(TOOLS, (f"tool {number}",), f"other {number % others}" if others else "liar")
    assert uses.value(prediction, 0) == before


def test_ends_of_a_key_are_believed_again_when_it_says_the_truth() -> None:
    clients = Clients()
    for number in range(8):
        clients.now = 100.0 * number
        clients.turn(prompt(1), "a", ends=True)
    hints = clients.advice._hints
    assert not hints.believes_ends("")
    for number in range(16):
        clients.now += 700.0
        clients.turn(prompt(2 + number % 8), f"s{number}", ends=number % 2 == 0)
        if number % 2:
            clients.advise("end", f"s{number}")
    assert hints.believes_ends("")
    assert clients.advise("end", "a").outcome == "accepted"


def test_an_end_that_is_not_believed_does_not_replace_the_hint_before_it() -> None:
    clients = Clients()
    for number in range(8):
        clients.now = 100.0 * number
        clients.turn(prompt(1), "a", ends=True)
    clients.turn(prompt(2), "b", returns_in=10.0)
    clients.advise("willneed", "b", seconds=10.0)
    before = clients.advice.counts()["hints_broken"]
    assert clients.advise("end", "b").outcome == "refused"
    assert len(clients.scheduler.features.loads_ahead._wanted) == 1
    clients.now += 100.0
    clients.turn(prompt(3), "other", "other key")
    assert clients.advice.counts()["hints_broken"] == before + 1


@pytest.mark.parametrize("lay", ["device", "disk", "nowhere"])
def test_advice_on_a_prompt_is_kept_if_it_is_used_wherever_its_blocks_were(lay: str) -> None:
    clients = Clients(hashed={DISK: "a disk"} if lay == "disk" else {})
    if lay == "disk":
        other = Clients(hashed={DISK: "a disk"})
        other.turn(prompt(1), "a")
        clients.executor.storage = dict(other.executor.storage)
    else:
        clients.turn(prompt(1))
    clients.turn(prompt(2), "b", "other key")
    assert clients.advise("willneed", tokens=pack_int32s(prompt(1)), seconds=5.0).outcome == "accepted"
    clients.settle()
    if lay == "nowhere":
        evict(clients.scheduler, 64)
    clients.now = 3.0
    clients.turn([*prompt(1), 7])
    clients.now = 60.0
    clients.turn(prompt(9), "b", "other key")
    counts = clients.advice.counts()
    assert (counts["hints_kept"], counts["hints_broken"]) == (1, 0)


def test_each_key_is_judged_by_its_own_advice_on_the_same_blocks() -> None:
    clients = Clients()
    clients.turn(prompt(1))
    clients.turn(prompt(2), "b")
    for key, seconds in (("", 2.0), ("liar", 5.0)):
        for node in clients.path(prompt(1)):
            assert node.cached_by is not None
            node.cached_by.key = key
        assert clients.advise("willneed", key=key, tokens=pack_int32s(prompt(1)), seconds=seconds).outcome == "accepted"
    for clients.now in (10.0, 30.0):
        clients.turn(prompt(9), "b", "other key")
    counts = clients.advice.counts()
    assert (counts["hints_kept"], counts["hints_broken"]) == (0, 2)


def test_a_session_that_begins_at_another_executor_keeps_the_advice_here() -> None:
    clients, elsewhere = Clients(), Clients()
    clients.turn(prompt(1), "parent", returns_in=1e4)
    clients.advise("fork", "child", parent="parent", seconds=10.0)
    for session in ("child", "parent", "unknown"):
        clients.scheduler.features.advice.placed_elsewhere(elsewhere.turn(prompt(1) + prompt(2), session))
    clients.now = 100.0
    clients.turn(prompt(3), "other", "other key")
    counts = clients.advice.counts()
    assert (counts["hints_kept"], counts["hints_broken"]) == (2, 0)


# ---- bounds ------------------------------------------------------------------------------------------


def test_a_key_with_many_sessions_forgets_its_own() -> None:
    sessions = Sessions(1)
    honest = sessions.of("honest", None, "a")
    for number in range(2 * _MOST_SESSIONS):
        sessions.of("liar", None, f"s{number}", "s0")
    assert sessions.numbered(honest.number) is honest
    assert sum(1 for _ in sessions) == len(sessions._by_number) == _MOST_SESSIONS
    assert len(sessions.heirs(honest)) == 0
    assert sessions.live_parent(next(reversed([*sessions]))) == 0, "the parent is forgotten"


def test_sessions_and_requests_are_bounded_by_the_blocks_that_they_hold() -> None:
    sessions, depth = Sessions(1), 1 << 13
    most = _LEAST_BLOCKS // depth
    for number in range(100):
        for key in ("busy", "busy", "honest") if number < 4 else ("busy",):
            session = sessions.of(key, None, f"s{number}")
            sessions.leave(session, block(depth))
            sessions.ended(key, f"r{number}", block(depth))
    assert sum(1 for _ in sessions) == len(sessions._ended) == most
    assert all(sessions.find("honest", None, f"s{number}") is not None for number in range(4))
    assert sessions.last_of("honest", "r0") is not None
    assert sessions.last_of("busy", "r99") is not None
    sessions.clear()
    assert not [*sessions]
    sessions.leave(sessions.of("busy", None, "s"), block(depth))
    assert len([*sessions]) == 1


def test_the_key_that_wants_the_most_loads_gives_up_its_own() -> None:
    clients = Clients(num_host_blocks=16)
    clients.turn(prompt(1), "a")
    ahead, path = clients.scheduler.features.loads_ahead, clients.path(prompt(1))
    ahead.want(path, None, 1e4, 1e5, key="honest")
    for _ in range(200):
        ahead.want([*path, block(5)], None, 1e4, 1e5, key="liar")
    wanted = [one.key for one in ahead._wanted.values()]
    assert wanted == ["honest", *["liar"] * 63]


def test_pins_of_all_keys_take_at_most_half_of_the_device() -> None:
    clients = Clients(num_blocks=100)
    for number in range(1, 7):
        clients.turn(prompt(number, 40), f"s{number}", f"k{number}")
    done = [clients.advise("pin", f"s{number}", f"k{number}") for number in range(1, 7)]
    assert [one.blocks for one in done] == [10] * 5 + [0]
    assert (done[-1].outcome, done[-1].reason) == ("refused", "all API keys together pin at most half of the device")
    assert clients.advise("unpin", "s1", "k1").outcome == "accepted"
    unpinned = clients.advise("unpin", "s1", "k1")
    assert (unpinned.outcome, unpinned.reason) == ("refused", "it has no pin")
    assert clients.advise("pin", "s6", "k6").blocks == 10
    clients.scheduler.features.advice.clear()
    assert_all_free(clients.scheduler)


# ---- parents and children ----------------------------------------------------------------------------


@pytest.mark.parametrize("begins", ["after", "before"])
def test_a_sub_agent_of_an_ended_session_does_not_keep_its_predictions(begins: str) -> None:
    """Its first turn has begun before, or begins after, the end of its parent."""
    clients = Clients()
    clients.turn(prompt(1), "parent", ends=begins == "after")
    if begins == "before":
        clients.advice._sessions.of("", None, "child", "parent")
        clients.advise("end", "parent")
    clients.turn(prompt(1) + prompt(2), "child", parent="parent", returns_in=5.0)
    path = clients.path(prompt(1) + prompt(2))
    assert not any(node.prediction == ENDED for node in path)
    assert all(node.prediction > ENDED for node in path[4:])


@pytest.mark.parametrize("by", ["advice", "hint"])
def test_a_parent_that_ends_leaves_its_blocks_to_a_session_that_has_not_begun(by: str) -> None:
    clients = Clients()
    clients.turn(prompt(1), "parent")
    clients.advise("fork", "child", parent="parent", seconds=100.0)
    if by == "advice":
        clients.advise("end", "parent")
    else:
        clients.turn([*prompt(1), *prompt(4)], "parent", ends=True)
    assert all(node.prediction > ENDED for node in clients.path(prompt(1)))
    clients.turn(prompt(1) + prompt(2), "child", returns_in=5.0)
    path = clients.path(prompt(1) + prompt(2))
    assert {(node.session, node.prediction) for node in path} == {(path[-1].session, path[-1].prediction)}


# ---- what came of it ---------------------------------------------------------------------------------


def test_advice_cancels_no_loads_of_others() -> None:
    clients = Clients(num_host_blocks=64)
    clients.turn(prompt(1), "parent")
    clients.turn(prompt(1) + prompt(2), "child", parent="parent")
    assert clients.advise("willneed", "parent", seconds=1e4).outcome == "accepted"
    for kind in ("called", "cold", "end", "dontneed"):
        assert clients.advise(kind, "child", tools=("run_tests",)).outcome == "accepted"
    clients.advise("fork", "other", parent="parent")
    ahead = clients.scheduler.features.loads_ahead
    assert len(ahead._wanted) == 1
    clients.advise("called", "parent", tools=("run_tests",))
    assert len(ahead._wanted) == 1, "a client's time counts more"
    clients.advise("end", "parent")
    assert not ahead._wanted


@pytest.mark.parametrize("kind", ["cold", "dontneed"])
def test_advice_on_an_earlier_turn_leaves_later_turns_alone(kind: str) -> None:
    clients = Clients(num_host_blocks=64)
    first = clients.turn(prompt(1) + prompt(2), "a")
    clients.turn(prompt(1) + prompt(3), "a")
    done = clients.advise(kind, request_id=first.request_id)
    clients.settle()
    assert (done.outcome, done.blocks) == ("accepted", 4)
    assert all(node.block >= 0 for node in clients.path(prompt(1) + prompt(3)))
    first = clients.turn(prompt(1) + prompt(3), "a")
    clients.turn(prompt(1) + prompt(3) + prompt(4), "a")
    done = clients.advise(kind, request_id=first.request_id)
    assert (done.outcome, done.reason) == ("refused", "other turns or sessions use it too")
    assert len(clients.path(prompt(1) + prompt(3) + prompt(4))) == 12


def test_blocks_on_the_disk_that_later_turns_have_are_not_deleted_with_an_earlier_turn() -> None:
    clients = Clients(hashed={DISK: "a disk"})
    first = clients.turn(prompt(1), "a")
    clients.turn(prompt(1) + prompt(2), "a")
    evict(clients.scheduler, 64)
    assert clients.advise("dontneed", request_id=first.request_id).outcome == "refused"
    assert clients.advise("dontneed", "a").blocks == 8


def test_pins_of_blocks_that_are_not_on_the_device_are_refused() -> None:
    clients = Clients(num_host_blocks=16)
    clients.turn(prompt(1), "a")
    clients.advise("cold", "a")
    done = clients.advise("pin", "a")
    assert (done.outcome, done.reason) == ("refused", "nothing of it is on the device")


@pytest.mark.parametrize("room", [0, 2])
def test_blocks_that_cold_loses_are_not_charged_to_another_request(room: int) -> None:
    clients = Clients(num_host_blocks=2)
    host = clients.scheduler.kv.cache_tier(HOST)
    assert host is not None
    host.max_arriving = room
    clients.turn(prompt(1), "a")
    clients.turn(prompt(2), "b", "other key")
    keys = [key_of(node) for node in clients.path(prompt(1))]
    assert clients.advise("cold", "a").outcome == "accepted"
    found = [clients.scheduler.kv.eviction_history.lost.find(key) for key in keys]
    lost = {(run.reason, run.taker) for run in found if run is not None}
    assert lost == {("evicted" if room else "advice", None)}


def test_cold_without_a_tier_below_the_device_is_refused() -> None:
    clients = Clients()
    clients.turn(prompt(1), "a")
    done = clients.advise("cold", "a")
    assert (done.outcome, done.reason) == ("refused", "there is no tier below the device")
    assert len(clients.path(prompt(1))) == 4


def test_gateways_that_name_tools_are_not_counted_as_advice() -> None:
    clients = Clients()
    clients.turn(prompt(1), "a")
    clients.advise("called", "a", tools=("run_tests",))
    assert clients.advice.counts()["advice_accepted"] == 0

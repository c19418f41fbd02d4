"""Starts and stops of processes: in a simulation of a cluster that follows its orders, step by step."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st
from pagewise.cluster.reconcile import (
    KINDS,
    PATIENCE,
    Kind,
    Member,
    Start,
    StartPauses,
    State,
    Stop,
    reconcile,
)

WANTED: dict[Kind, int] = {"scheduler": 1, "gateway": 2, "executor": 3}
DIGESTS: dict[Kind, str] = dict.fromkeys(KINDS, "new")


def members_of(kind: Kind, *states: State, digest: str = "new") -> list[Member]:
    return [Member(f"{kind}-{number}", kind, digest, state) for number, state in enumerate(states)]


def settled(wanted: dict[Kind, int] = WANTED) -> list[Member]:
    return [one for kind in KINDS for one in members_of(kind, *["ready"] * wanted[kind])]


def test_everything_is_started_once_the_scheduler_first() -> None:
    actions = reconcile(WANTED, DIGESTS, [])
    assert [action.name for action in actions] == [
        "scheduler-0",
        "executor-0",
        "executor-1",
        "executor-2",
        "gateway-0",
        "gateway-1",
    ]
    assert reconcile(WANTED, DIGESTS, settled()) == []


def test_what_has_died_is_started_under_a_name_that_is_free() -> None:
    left = [one for one in settled() if one.name != "executor-1"]
    (action,) = reconcile(WANTED, DIGESTS, left)
    assert isinstance(action, Start)
    assert action.name == "executor-1"
    leaving = [replace(one, state="stopping") if one.name == "executor-1" else one for one in settled()]
    (action,) = reconcile(WANTED, DIGESTS, leaving)
    assert action.name == "executor-3", "the one that leaves has its name until it is gone"


def test_the_executor_with_the_least_to_do_goes() -> None:
    busy = [
        replace(one, load=load) for one, load in zip(members_of("executor", *["ready"] * 3), (5, 1, 3), strict=True)
    ]
    rest = [one for one in settled() if one.kind != "executor"]
    (action,) = reconcile(WANTED | {"executor": 2}, DIGESTS, rest + busy)
    assert (type(action), action.name) == (Stop, "executor-1")
    busy[0] = replace(busy[0], state="pending")
    (action,) = reconcile(WANTED | {"executor": 2}, DIGESTS, rest + busy)
    assert action.name == "executor-0", "the one that does nothing yet"


def test_a_scheduler_goes_before_the_next_one_comes() -> None:
    wanted: dict[Kind, int] = {"scheduler": 1, "gateway": 0, "executor": 0}
    (action,) = reconcile(wanted, DIGESTS, members_of("scheduler", "ready", digest="old"))
    assert isinstance(action, Stop)
    assert reconcile(wanted, DIGESTS, members_of("scheduler", "stopping", digest="old")) == []
    (action,) = reconcile(wanted, DIGESTS, [])
    assert isinstance(action, Start)


def test_others_are_replaced_when_the_next_scheduler_is_ready() -> None:
    """They would take the room of the old one."""
    wanted: dict[Kind, int] = {"scheduler": 1, "gateway": 1, "executor": 1}
    old = [one for kind in ("gateway", "executor") for one in members_of(kind, "ready", digest="old")]
    steps: list[list[Member]] = [members_of("scheduler", "ready", digest="old"), []]
    states: list[State] = ["pending", "starting"]
    steps += [members_of("scheduler", state) for state in states]
    for scheduler in steps:
        actions = reconcile(wanted, DIGESTS, [*scheduler, *old])
        assert [action.name for action in actions if not action.name.startswith("scheduler")] == []
    actions = reconcile(wanted, DIGESTS, [*members_of("scheduler", "ready"), *old])
    assert [action.name for action in actions] == ["executor-1", "gateway-1"]


def test_without_room_for_a_replacement_an_old_one_makes_room() -> None:
    wanted: dict[Kind, int] = {"scheduler": 0, "gateway": 0, "executor": 2}
    old = members_of("executor", "ready", "ready", digest="old")
    new = Member("executor-2", "executor", "new", "pending", waited=PATIENCE - 1)
    assert reconcile(wanted, DIGESTS, [*old, new]) == []
    (action,) = reconcile(wanted, DIGESTS, [*old, replace(new, waited=PATIENCE + 1)])
    assert isinstance(action, Stop)
    assert action.name in ("executor-0", "executor-1")


states: st.SearchStrategy[State] = st.sampled_from(["pending", "starting", "ready", "stopping"])
entries = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(["new", "old"]), states, st.integers(0, 9)))


@given(entries, st.integers(1, 4), st.integers(1, 4), st.booleans())
@example([("gateway", "new", "starting", 0), ("gateway", "old", "ready", 0)], 1, 1, False)
def test_whatever_is_there_becomes_what_is_wanted_without_an_interruption(
    found: list[tuple[Kind, str, State, int]], gateways: int, executors: int, room: bool
) -> None:
    """Each round follows its orders. A process starts once there is room, and is ready once a scheduler is."""
    wanted: dict[Kind, int] = {"scheduler": 1, "gateway": gateways, "executor": executors}
    members = {
        f"{kind}-{number}": Member(f"{kind}-{number}", kind, digest, state, load)
        for number, (kind, digest, state, load) in enumerate(found)
    }
    bound = max(len(members), sum(wanted.values()))  # the cluster's room, if it has none for more
    for _ in range(200):
        ready_before = {kind: _ready(members, kind) for kind in KINDS}
        actions = reconcile(wanted, DIGESTS, list(members.values()))
        for action in actions:
            if isinstance(action, Start):
                assert action.name not in members
                members[action.name] = Member(action.name, action.kind, "new", "pending")
            else:
                assert members[action.name].state not in ("stopping", "stopped")
                members[action.name] = replace(members[action.name], state="stopping")
        for kind in ("gateway", "executor"):
            # A ready process is stopped only where enough others are ready, or where a replacement finds no room.
            lost = ready_before[kind] - _ready(members, kind)
            assert not lost or room is False or _ready(members, kind) >= min(wanted[kind], ready_before[kind]) - 1
        if not actions and not any(one.state != "ready" for one in members.values()):
            break
        enough, scheduled = room or len(members) <= bound, _ready(members, "scheduler") > 0
        members = {name: _aged(one, enough, scheduled) for name, one in members.items() if one.state != "stopping"}
    for kind in KINDS:
        there = [one for one in members.values() if one.kind == kind]
        assert len(there) == wanted[kind]
        assert {one.digest for one in there} <= {"new"}
        assert all(one.state == "ready" for one in there)


def _ready(members: dict[str, Member], kind: Kind) -> int:
    return sum(one.kind == kind and one.state == "ready" for one in members.values())


def _aged(one: Member, room: bool, scheduled: bool) -> Member:
    """``scheduled``: a scheduler is ready. Without one nothing else becomes ready."""
    if one.state == "pending":
        return replace(one, state="starting") if room else replace(one, waited=one.waited + PATIENCE)
    if one.state == "starting" and (scheduled or one.kind == "scheduler"):
        return replace(one, state="ready")
    return one


def test_pauses_grow_up_to_a_minute_and_end_with_an_answer() -> None:
    pauses, now = StartPauses(), 0.0
    assert pauses.may_start("executor", now)
    seconds = []
    for _ in range(9):
        seconds.append(pauses.died("executor", now))
        assert not pauses.may_start("executor", now + 0.99 * seconds[-1])
        now += seconds[-1]
        assert pauses.may_start("executor", now)
    assert seconds == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert pauses.may_start("gateway", 0.0), "another kind"
    pauses.answered("executor")
    assert pauses.died("executor", now) == 1


def test_three_deaths_in_a_row_are_a_problem() -> None:
    pauses = StartPauses()
    for _ in range(2):
        pauses.died("gateway", 0.0)
    assert pauses.failing() == []
    pauses.died("gateway", 0.0)
    assert pauses.failing() == ["gateway"]
    pauses.answered("gateway")
    assert pauses.failing() == []

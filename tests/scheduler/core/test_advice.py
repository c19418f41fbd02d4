"""Sessions, and advice on their KV."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_scheduler.core.features.advice import Advice, Outcome
from pagewise_scheduler.core.features.trust import Trust
from pagewise_scheduler.core.memory.eviction_history import ENDED, key_of
from pagewise_scheduler.core.memory.predicted_uses import (
    _MOST_OF_KEY,
    _MOST_TOLD,
    HINTS,
    PEOPLE,
    SHARED,
    TOOLS,
    PredictedUses,
)
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, block_keys
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import WindowShape
from pagewise_shared.protocol import HOST, Advise, ReuseHints

from tests.core_requests import change
from tests.scheduler.core.arenas import check_arena, create
from tests.scheduler.core.builders import create_request, create_scheduler, evict
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import assert_all_free, check_states, executor_for, run


class Clients:
    """Sends turns of sessions, and advice, at a time that tests set."""

    def __init__(self, **options: Any) -> None:
        make = create if "windows" in options else create_scheduler
        self.scheduler: Scheduler = make(eviction="cost", **options)
        self.executor: CheckingExecutor = executor_for(self.scheduler)
        self.now = 0.0

    @property
    def advice(self) -> Advice:
        return self.scheduler.features.advice

    def turn(self, prompt: list[int], session: str = "", key: str = "", **hints: Any) -> None:
        request = create_request(prompt, 1, arrival_time=self.now)
        change(request, key=key, reuse=ReuseHints(session=session, **hints))
        self.scheduler.add(request)
        while (plan := self.scheduler.schedule(self.now)) is not None:
            self.scheduler.update(self.executor.execute(plan))
            for copied in self.executor.finish_copies():
                self.scheduler.copied(copied)

    def advise(self, kind: Any, session: str = "", key: str = "", **fields: Any) -> Outcome:
        return self.advice.advise(Advise(1, 1, kind, key=key, session=session, **fields), self.now)

    def path(self, prompt: list[int]) -> list[CachedBlock]:
        tree, size = self.scheduler.kv.pool.tree, self.scheduler.kv.block_size
        tokens = b"".join(token.to_bytes(4, "little") for token in prompt)
        return tree.walk(tree.root_of(None), block_keys(tokens, size))


def prompt(first: int, length: int = 16) -> list[int]:
    return [first * 100 + i for i in range(length)]


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
    shares = {key: clients.advice._trust_of(key, ends=key == "liar").share for key in ("liar", "honest", "early")}
    assert shares["honest"] == 1
    assert shares["liar"] == shares["early"] == 8 / 9


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
    st.tuples(st.sampled_from([HINTS, TOOLS, PEOPLE]), st.integers(0, 80), st.floats(0.1, 1e5), st.booleans()),
    max_size=30,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.1, 1e4), min_size=16, max_size=16), _OBSERVED, st.integers(1, 20))
def test_what_a_key_does_changes_little_for_others(
    own: list[float], lies: list[tuple[int, int, float, bool]], times: int
) -> None:
    """Its hints change nothing. Of its waits, others hear at most ``_MOST_TOLD`` observations, whose weight in a table
    falls with each observation of the table's own."""

    def told(lied: bool) -> PredictedUses:
        uses = PredictedUses()
        for kind, what, seconds, returned in lies * times if lied else ():
            source = uses.source(kind, (f"tool {what}",) if kind != HINTS else (), "liar")
            if returned:
                uses.returned(uses.time(source, 32.0), seconds)
            else:
                uses.reach(uses.time(source, 32.0), seconds)
        for kind in (HINTS, TOOLS, PEOPLE):
            source = uses.source(kind, ("tool 1",) if kind != HINTS else (), "honest")
            for seconds in own:
                uses.returned(uses.time(source, 32.0), seconds)
        return uses

    with_liar, alone = told(True), told(False)
    for kind in (TOOLS, PEOPLE):
        assert with_liar._tables[kind]._num_observed <= 2 * _MOST_TOLD
        source = [uses.source(kind, ("tool 1",), "honest") for uses in (with_liar, alone)]
        rates = [uses._tables[number].rates for uses, number in zip((with_liar, alone), source, strict=True)]
        for one, other, count in zip(*rates, alone._tables[source[1]]._reached, strict=True):
            assert abs(one - other) <= 4 / (4 + count)
    hints = [uses.source(HINTS, (), "honest") for uses in (with_liar, alone)]
    assert with_liar._tables[hints[0]].rates == alone._tables[hints[1]].rates
    assert len(with_liar._sources.get("liar", ())) <= _MOST_OF_KEY


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
    assert clients.advice.counts()["advice_loaded_blocks"] == 4
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


_KINDS = st.sampled_from(["willneed", "cold", "dontneed", "pin", "unpin", "fork", "end", "called"])
_ACTIONS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 24), st.none() | _KINDS), max_size=12
)


@settings(max_examples=15, deadline=None)
@given(_ACTIONS)
def test_memory_stays_right_whatever_is_advised(actions: list[tuple[int, int, int, str | None]]) -> None:
    clients = Clients(num_blocks=24, num_host_blocks=8)
    for number, first, length, kind in actions:
        clients.now += 7.0
        if kind is None:
            clients.turn(prompt(first, 3 * length), f"s{number}", f"k{number % 2}", returns_in=float(first - 1))
        else:
            clients.advise(kind, f"s{number}", f"k{number % 2}", seconds=5.0, tools=("t",))
        run(clients.scheduler, clients.executor)
        check_states(clients.scheduler.kv.pool)
    clients.advice.clear()
    assert_all_free(clients.scheduler)

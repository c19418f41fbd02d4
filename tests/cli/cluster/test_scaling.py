"""When executors come and go."""

from hypothesis import given
from hypothesis import strategies as st
from pagewise.cluster.scaling import Load, Policy, Scaler

POLICY = Policy(minimum=1, maximum=8, queue=4, rows=10, up_after=10.0, down_after=60.0)


def run(scaler: Scaler, load: Load, executors: int, begin: float, seconds: int) -> tuple[int, list[str]]:
    """The number of executors after some seconds of this load, and the reasons of every change."""
    reasons = []
    for second in range(seconds):
        decision = scaler.decide(begin + second, load._replace(ready=executors), executors)
        if decision is not None:
            executors = decision.executors
            reasons.append(decision.reason)
    return executors, reasons


def test_a_queue_that_stays_brings_executors_and_one_that_does_not_brings_none() -> None:
    scaler = Scaler(POLICY)
    assert run(scaler, Load(9, 10, 1), 1, 0.0, 9) == (1, [])
    assert run(scaler, Load(0, 10, 1), 1, 9.0, 1) == (1, []), "it was gone for a moment"
    assert run(scaler, Load(9, 10, 1), 1, 10.0, 10) == (1, [])
    executors, reasons = run(scaler, Load(9, 10, 1), 1, 20.0, 2)
    assert executors == 2
    assert reasons == ["9 sequences have waited for 10 s or more"]


def test_nothing_is_decided_until_those_that_were_asked_for_have_joined() -> None:
    scaler = Scaler(POLICY)
    for second in range(100):
        assert scaler.decide(float(second), Load(90, 10, 1), 2) is None
    assert scaler.decide(100.0, Load(90, 10, 2), 2) is None, "the time begins now"


def test_one_that_never_joins_goes_when_it_is_not_needed_and_the_others_after_it() -> None:
    scaler, executors, changes = Scaler(POLICY), 4, []
    for second in range(600):  # the cluster has room for three
        decision = scaler.decide(float(second), Load(0, 0, min(executors, 3)), executors)
        if decision is not None:
            executors = decision.executors
            changes.append(executors)
    assert changes == [3, 2, 1]


def test_one_that_never_joins_is_not_counted_with_those_that_remain() -> None:
    scaler = Scaler(POLICY)
    assert all(scaler.decide(float(second), Load(0, 17, 2), 4) is None for second in range(300)), (
        "16 of 20 rows is most"
    )


def test_nothing_goes_while_fewer_serve_than_the_minimum() -> None:
    scaler = Scaler(POLICY._replace(minimum=2))
    assert all(scaler.decide(float(second), Load(0, 0, 1), 4) is None for second in range(300))


def test_one_goes_after_long_quiet_if_its_work_fits_elsewhere() -> None:
    scaler = Scaler(POLICY)
    assert run(scaler, Load(0, 9, 2), 2, 0.0, 300) == (2, []), "nine of ten rows would leave no slack"
    executors, reasons = run(scaler, Load(0, 8, 2), 2, 300.0, 62)
    assert executors == 1
    assert reasons == ["nothing has waited for 60 s, and 8 running sequences fit into 1 executors"]
    assert run(scaler, Load(0, 0, 1), 1, 400.0, 1000) == (1, []), "the minimum stays"


def test_a_long_queue_at_most_doubles_them_and_never_exceeds_the_maximum() -> None:
    scaler = Scaler(POLICY)
    executors, _ = run(scaler, Load(1000, 10, 1), 1, 0.0, 11)
    assert executors == 2
    assert run(scaler, Load(1000, 10, 1), 2, 20.0, 100)[0] == 8


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 80)), min_size=1, max_size=150), st.integers(1, 8))
def test_bounds_hold_and_changes_have_their_time(loads: list[tuple[int, int]], executors: int) -> None:
    scaler, last, begun = Scaler(POLICY), 0.0, False
    for second, (waiting, running) in enumerate(loads):
        decision = scaler.decide(float(second), Load(waiting, running, executors), executors)
        if decision is None:
            continue
        assert POLICY.minimum <= decision.executors <= POLICY.maximum
        assert decision.executors != executors
        assert decision.executors >= executors - 1, "one at a time"
        assert not begun or second - last >= POLICY.up_after
        executors, last, begun = decision.executors, second, True


@given(st.integers(0, 200), st.integers(1, 8))
def test_a_constant_load_makes_no_executor_come_back_that_has_gone(running: int, executors: int) -> None:
    """Running requests wait where there are no rows for them; the number of executors moves in one direction, then
    stays."""
    scaler, changes = Scaler(POLICY), []
    for second in range(600):
        rows = POLICY.rows * executors
        load = Load(max(0, running - rows), min(running, rows), executors)
        decision = scaler.decide(float(second), load, executors)
        if decision is not None:
            changes.append(decision.executors - executors)
            executors = decision.executors
    assert all(change > 0 for change in changes) or all(change < 0 for change in changes)

"""Pauses after processes that died before they said a word."""

from pagewise.cluster.start_pauses import StartPauses


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

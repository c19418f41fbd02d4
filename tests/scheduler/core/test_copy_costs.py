"""The predicted work of a link."""

from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.core.tiers.cost_model import Link

SECONDS = st.floats(1e-4, 0.5)
LISTS = st.lists(st.tuples(st.lists(st.integers(1, 64), min_size=1, max_size=3), SECONDS), min_size=1, max_size=60)


@given(lists=LISTS)
def test_a_link_that_is_never_idle_is_busy_until_the_true_end_of_its_work(lists: list[tuple[list[int], float]]) -> None:
    """Each list, of one or more receivers' blocks, takes the link a time of its own; the link is never without work."""
    link = Link(1e-4, 1e-3)
    asked, ended = 0.0, 0.0
    before: tuple[int, float, float] | None = None
    for counts, seconds in lists:
        predicted = sum(link.asked(count, asked) for count in counts)
        if before is not None:
            link.done(*before)
            link.observe(before[2], 1, before[0])
            # The rest is the last list: the time of all lists before it is known.
            assert abs(link.busy_until - (ended + predicted)) < 1e-6 * len(lists)
        before = sum(counts), predicted, seconds
        asked, ended = ended, ended + seconds
    assert before is not None
    link.done(*before)
    assert (link.busy_until, link.num_loading) == (0.0, 0)

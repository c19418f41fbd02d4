"""The state of a thinking budget against its definition, for any outputs."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from pagewise_shared.thinking import UNLIMITED, ThinkingBudget, ThinkingState

END = 1
OPENING = (2, 3)
SHOWN = ("num_tokens", "forced", "num_free", "over")
tokens = st.integers(0, 4)


@st.composite
def budgets(draw: st.DrawFn) -> ThinkingBudget:
    before, after = (
        draw(st.lists(tokens.filter(lambda one: one != END), max_size=2)),
        draw(st.lists(tokens, max_size=2)),
    )
    within = draw(st.sampled_from((0, 1, 3, UNLIMITED)))
    others = draw(st.sampled_from(((), (0,))))
    return ThinkingBudget(draw(st.integers(0, 4)), END, (*before, END, *after), OPENING, within, others)


def num_thoughts(budget: ThinkingBudget, output: list[int]) -> int:
    """The tokens of an output that are thinking, where no budget limits it."""
    inside, count, at = budget.opens_within == 0, 0, 0
    while at < len(output):
        if inside:
            inside = output[at] not in (END, *budget.other_ends)
            count += inside
        elif tuple(output[at : at + 2]) == OPENING and at < budget.opens_within:
            inside = True
            at += 1
        at += 1
    return count


@given(budgets(), st.lists(tokens, min_size=1, max_size=30))
def test_forced_tokens_come_when_the_budget_is_used_up_and_not_before(budget: ThinkingBudget, free: list[int]) -> None:
    state, output, promised = ThinkingState(budget), [], 0
    for token in free:
        forced, num_free = state.forced, state.num_free
        assert (forced is None) == (num_free > 0)
        assert num_free >= promised - 1, "a promise is kept"
        assert state.over == (num_free == UNLIMITED)
        promised = num_free
        output.append(token if forced is None else forced)
        state.push(output[-1])
        assert state.num_tokens == len(output)
    extra = len(budget.forced) - 1
    # Further thinking, where it may begin again, is ended at once, but with the texts around its end.
    openings = sum(pair == OPENING for pair in pairwise(output)) + 1
    assert num_thoughts(budget, output) <= budget.num_tokens + extra * openings
    if not extra:
        assert num_thoughts(budget, output) <= budget.num_tokens
    unlimited = ThinkingState(ThinkingBudget(30, END, budget.forced, OPENING, budget.opens_within))
    for token in free:
        assert unlimited.forced is None
        unlimited.push(token)
    half, whole = ThinkingState(budget), ThinkingState(budget)
    for part in (output[: len(output) // 2], output[len(output) // 2 :]):
        half.extend(part)
    whole.extend(output)
    for other in (half, whole):
        assert [getattr(other, name) for name in SHOWN] == [getattr(state, name) for name in SHOWN]


def test_a_call_that_ends_thinking_is_not_cut_in_two() -> None:
    state = ThinkingState(ThinkingBudget(3, END, (END,), OPENING, other_ends=(4,)))
    for token in (0, 4, 0, 0, 0, 0):
        state.push(token)
        assert state.forced is None


def test_a_refused_token_is_forced_again() -> None:
    state = ThinkingState(ThinkingBudget(1, END, (4, END, 4), OPENING))
    for token, forced in ((0, None), (4, 4), (0, END), (4, 4), (END, END), (0, 4), (0, None)):
        assert state.forced == forced
        state.push(token)
    assert state.over

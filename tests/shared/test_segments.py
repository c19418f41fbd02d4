"""Segments of a prompt: marks, computed and moved tokens, and how many of them a budget allows."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_shared import segments as module
from pagewise_shared.segments import (
    ALL_BEFORE,
    MOVED,
    TOKEN_ID,
    Segment,
    furthest,
    make_segments,
    mark_segments,
    num_computed,
    original_tokens,
)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], int, int]:
    """How long a prompt is, its segments, their root, and the boundary."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=5))
    ranges, at = [], 0
    for gap, length in lengths:
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    first = ranges[0][0] if ranges else 0
    root = draw(st.sampled_from([ALL_BEFORE, 0, draw(st.integers(0, first))]))
    return at + draw(st.integers(1, 5)), ranges, root, draw(st.integers(0, 4))


def computed(segments: tuple[Segment, ...], start: int, stop: int) -> list[int]:
    return [at for at in range(start, stop) if not any(one.moved <= at < one.stop for one in segments)]


@given(prompts(), st.integers(0, 30), st.integers(1, 12), st.sampled_from([3, 1 << 18]))
def test_a_budget_goes_as_far_as_its_tokens_are_computed(
    prompt: tuple[int, list[tuple[int, int]], int, int], start: int, budget: int, most_moved: int
) -> None:
    num_tokens, ranges, root, boundary = prompt
    segments = make_segments(num_tokens, ranges, root=root, boundary=boundary)
    start = min(start, num_tokens - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_MOVED_TOKENS", most_moved)
        stop = furthest(segments, start, num_tokens, budget)
    assert start < stop <= num_tokens
    done = computed(segments, start, stop)
    assert len(done) == num_computed(segments, start, stop) <= budget
    assert stop - start - len(done) <= most_moved
    if most_moved > num_tokens:
        assert len(done) == min(budget, len(computed(segments, start, num_tokens)))
        assert done[-1] == stop - 1, "what is moved comes with what is computed behind it"


@given(prompts(), prompts())
def test_marks_tell_prompts_apart(
    one: tuple[int, list[tuple[int, int]], int, int], other: tuple[int, list[tuple[int, int]], int, int]
) -> None:
    """Two prompts of the same token whose marked tokens are alike up to somewhere mean the same up to there."""
    marked, meaning = [], []
    for num_tokens, ranges, root, boundary in (one, other):
        segments = make_segments(num_tokens, ranges, root=root, boundary=boundary)
        tokens = array("i", [7] * num_tokens)
        mark_segments(tokens, segments)
        assert all(token & TOKEN_ID == 7 for token in tokens)
        assert [at for at in range(num_tokens) if not tokens[at] & MOVED] == computed(segments, 0, num_tokens)
        marked.append(tokens)
        # The inputs of a token's KV: whether it is moved, and if so from how far, and behind which root.
        meaning.append(
            [
                next(((one.start, one.root) for one in segments if one.moved <= at < one.stop), None)
                for at in range(num_tokens)
            ]
        )
    for at in range(min(map(len, marked))):
        if marked[0][at] != marked[1][at]:
            break
        assert meaning[0][at] == meaning[1][at]


def test_an_original_is_the_root_and_the_segment_and_fills_its_blocks() -> None:
    tokens = array("i", range(20))
    segments = make_segments(20, [(5, 9), (9, 15)], root=3, boundary=2)
    mark_segments(tokens, segments)
    assert [original_tokens(tokens, segment, 4).tolist() for segment in segments] == [
        [0, 1, 2, 5, 6, 7, 8, 0],
        [0, 1, 2, 9, 10, 11, 12, 13, 14, 0, 0, 0],
    ]
    assert [(one.moved, one.distance, one.num_original_tokens) for one in segments] == [(7, 2, 7), (11, 6, 9)]


@pytest.mark.parametrize(
    ("ranges", "root", "text"),
    [
        ([(3, 3)], ALL_BEFORE, "empty"),
        ([(3, 21)], ALL_BEFORE, "outside the 20 tokens"),
        ([(3, 6), (5, 8)], ALL_BEFORE, "begins before the end"),
        ([(3, 20)], ALL_BEFORE, "ends the prompt"),
        ([(3, 6)], 4, "in the root of 4 tokens"),
        ([(at, at + 1) for at in range(1100)], ALL_BEFORE, "too many|outside"),
    ],
)
def test_what_cannot_be_is_named(ranges: list[tuple[int, int]], root: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_segments(20 if len(ranges) < 9 else 2000, ranges, root=root)

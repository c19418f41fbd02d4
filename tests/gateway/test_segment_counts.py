"""Windows that were repeated are joined to segments, by place and by how often they were."""

import random
from array import array

from pagewise_gateway.repeats import RepeatFinder
from pagewise_gateway.segment_report import Segment, SegmentCounts

SLOTS = 1 << 18
EDGE = 15
"""Tokens that are not counted at either end of a repeated text, at most."""


def text(rng: random.Random, length: int) -> "array[int]":
    return array("i", (rng.randrange(1 << 31) for _ in range(length)))


def segments_of(prompts: list["array[int]"], most: int = 10) -> list[Segment]:
    finder, counts = RepeatFinder(SLOTS), SegmentCounts(SLOTS)
    for number, prompt in enumerate(prompts):
        counts.count(number, finder.examine(prompt, None))
    return counts.segments(most)


def test_texts_side_by_side_that_come_again_unequally_often_are_segments_apart() -> None:
    rng = random.Random(0)
    one, two = text(rng, 300), text(rng, 400)
    prompts = [text(rng, 20) + one + two, *(text(rng, 20) + one for _ in range(9)), text(rng, 20) + two]
    first, second, *rest = segments_of(prompts)
    assert (first.prompt, first.times, second.prompt, second.times) == (0, 9, 0, 1)
    assert 20 <= first.offset <= 20 + EDGE
    assert 300 - 2 * EDGE <= first.num_tokens <= 300
    assert 320 <= second.offset <= 320 + EDGE
    assert 400 - 2 * EDGE <= second.num_tokens <= 400
    assert all(one.num_tokens <= 2 * EDGE for one in rest), "windows across an end, at most"


def test_what_saves_the_most_comes_first_and_no_more_than_is_asked_for() -> None:
    rng = random.Random(1)
    texts = [text(rng, length) for length in (140, 900, 300)]  # 4 times 140 is more than 300, also without edges
    prompts = [text(rng, 9) + one for one in texts]
    prompts += [text(rng, 9) + one for one, times in zip(texts, (4, 2, 1), strict=True) for _ in range(times)]
    assert [(one.prompt, one.times) for one in segments_of(prompts)] == [(1, 2), (0, 4), (2, 1)]
    assert [one.prompt for one in segments_of(prompts, 1)] == [1]


def test_nothing_repeated_makes_no_segment() -> None:
    rng = random.Random(2)
    assert segments_of([]) == []
    assert segments_of([text(rng, 500), text(rng, 500)]) == []


def test_a_text_that_its_first_prompt_repeats_was_first_at_its_first_place() -> None:
    rng = random.Random(3)
    one = text(rng, 200)
    (segment,) = segments_of([text(rng, 40) + one + text(rng, 40) + one, text(rng, 7) + one])
    assert 40 <= segment.offset <= 40 + EDGE
    assert segment.times == 1

"""Texts found in earlier prompts: planted anywhere, prefixes apart, salts apart, bounded memory."""

import random
from array import array
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_gateway import repeats as repeats_module
from pagewise_gateway.repeats import (
    SURELY_FOUND,
    WINDOW,
    RepeatFinder,
    Repeats,
    SeenKeys,
    mixed,
    powers_of,
    sampled,
    window_hashes,
)

SLOTS = 1 << 18
"""So many that none of the keys of a test is forgotten."""
EDGE = WINDOW - 1
"""Tokens of a repeated text that are not counted at either end, at most."""


def text(rng: random.Random, length: int) -> "array[int]":
    """Tokens that no other prompt has."""
    return array("i", (rng.randrange(1 << 31) for _ in range(length)))


def joined(*parts: "array[int]") -> "array[int]":
    whole = array("i")
    for part in parts:
        whole.extend(part)
    return whole


def contained(tokens: "array[int]", earlier: list["array[int]"]) -> set[int]:
    """Positions of a prompt in a window that an earlier one contains, found by comparing them."""
    known = {tuple(one[i : i + WINDOW]) for one in earlier for i in range(len(one) - EDGE)}
    starts = [i for i in range(len(tokens) - EDGE) if tuple(tokens[i : i + WINDOW]) in known]
    return {i + offset for i in starts for offset in range(WINDOW)}


@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(SURELY_FOUND, 300), min_size=1, max_size=4),
    gaps=st.lists(st.integers(1, 90), min_size=10, max_size=10),
)
@settings(deadline=None)
def test_planted_texts_are_found_in_any_order_at_any_offset(seed: int, lengths: list[int], gaps: list[int]) -> None:
    rng, finder = random.Random(seed), RepeatFinder(SLOTS)
    texts = [text(rng, length) for length in lengths]
    gap = iter(gaps)
    first = joined(*(part for one in texts for part in (text(rng, next(gap)), one)))
    assert finder.examine(first, None)[:3] == (len(first), 0, 0)
    rng.shuffle(texts)
    second = joined(*(part for one in texts for part in (text(rng, next(gap)), one)), text(rng, next(gap)))
    repeats = finder.examine(second, None)
    assert repeats.prefix == 0
    planted = sum(lengths)
    assert planted - 2 * EDGE * len(texts) <= repeats.repeated <= planted
    assert repeats.repeated >= WINDOW * len(texts), "none of them is overlooked"
    assert repeats.new == len(second) - repeats.repeated


@given(seed=st.integers(0, 2**32), num_prompts=st.integers(2, 6), vocabulary=st.integers(2, 40))
@settings(deadline=None)
def test_nothing_counts_that_no_earlier_prompt_contains(seed: int, num_prompts: int, vocabulary: int) -> None:
    """Over prompts made of few words, which overlap in all ways, also with themselves."""
    rng, finder = random.Random(seed), RepeatFinder(SLOTS)
    words = [text(rng, rng.randrange(1, 60)) for _ in range(vocabulary)]
    earlier: list[array[int]] = []
    for _ in range(num_prompts):
        prompt = joined(*rng.choices(words, k=rng.randrange(1, 20)))
        repeats = finder.examine(prompt, None)
        common = max((_common(prompt, one) for one in earlier), default=0)
        assert repeats.prefix == common // WINDOW * WINDOW
        behind = {position for position in contained(prompt, earlier) if position >= repeats.prefix}
        assert repeats.repeated <= len(behind)
        spans = [(at, at + WINDOW) for at in repeats.found.tolist()]
        assert {position for span in spans for position in range(*span)} <= behind
        assert repeats.new >= 0
        earlier.append(prompt)


def _common(one: "array[int]", other: "array[int]") -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(map(len, (one, other)))
    )


@given(seed=st.integers(0, 2**32), shared=st.integers(0, 400), rest=st.integers(0, 200))
@settings(deadline=None)
def test_a_prefix_is_no_repeated_text(seed: int, shared: int, rest: int) -> None:
    rng, finder = random.Random(seed), RepeatFinder(SLOTS)
    prefix = text(rng, shared)
    finder.examine(joined(prefix, text(rng, 50)), None)
    repeats = finder.examine(joined(prefix, text(rng, rest)), None)
    assert (repeats.prefix, repeats.repeated) == (shared // WINDOW * WINDOW, 0)


def test_text_that_one_prompt_repeats_itself_is_not_of_an_earlier_one() -> None:
    rng, finder = random.Random(0), RepeatFinder(SLOTS)
    one = text(rng, 200)
    assert finder.examine(joined(one, text(rng, 9), one), None).repeated == 0
    assert finder.examine(joined(text(rng, 9), one), None).repeated >= 200 - 2 * EDGE


@given(seed=st.integers(0, 2**32), salts=st.lists(st.none() | st.text(max_size=4), min_size=2, max_size=2, unique=True))
@settings(deadline=None)
def test_texts_of_different_salts_are_never_compared(seed: int, salts: list[str | None]) -> None:
    rng, finder = random.Random(seed), RepeatFinder(SLOTS)
    one = text(rng, 400)
    finder.examine(one, salts[0])
    assert finder.examine(one, salts[1])[1:3] == (0, 0)
    assert finder.examine(joined(text(rng, 5), one), salts[1]).repeated >= 400 - 2 * EDGE
    assert finder.examine(one, salts[0]).prefix == 400


@given(seed=st.integers(0, 2**32), length=st.integers(0, 700), piece=st.integers(1, 12))
@settings(deadline=None)
def test_pieces_change_nothing(seed: int, length: int, piece: int) -> None:
    def results(size: int) -> list[Repeats]:
        rng = random.Random(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(repeats_module, "PIECE", size)
            finder = RepeatFinder(SLOTS)
            one, two = text(rng, length), text(rng, 100)
            prompts = [joined(one, two), joined(one, text(rng, 3), two), joined(text(rng, 7), one)]
            return [finder.examine(prompt, "s") for prompt in prompts]

    # The secret differs, and with it the sample. The prefix, and the loss at the edges, must not differ.
    for whole, cut in zip(results(1 << 14), results(piece * WINDOW), strict=True):
        assert (whole.num_tokens, whole.prefix) == (cut.num_tokens, cut.prefix)
        assert abs(whole.repeated - cut.repeated) <= 4 * EDGE


@given(st.integers(0, 2**32), st.integers(0, 500), st.integers(1, 3))
@settings(deadline=None)
def test_the_sample_is_dense_and_does_not_depend_on_what_is_around(seed: int, length: int, vocabulary: int) -> None:
    rng = random.Random(seed)
    powers = powers_of(rng.getrandbits(64) | 1)
    tokens = np.array([rng.randrange(vocabulary) for _ in range(length + WINDOW)], np.int32)
    keys = mixed(window_hashes(tokens, powers), np.uint64(7))
    at = sampled(keys).tolist()
    if len(keys) < WINDOW:
        assert at == []
        return
    assert at[0] < WINDOW
    assert len(keys) - at[-1] <= WINDOW
    assert all(after - before <= WINDOW for before, after in pairwise(at))
    inner = sampled(keys[EDGE:-EDGE] if len(keys) > 2 * EDGE else keys[:0]).tolist()
    assert {position + EDGE for position in inner} <= set(at)


def test_window_hashes_are_the_polynomial_of_their_tokens() -> None:
    rng = random.Random(3)
    base, tokens = rng.getrandbits(64) | 1, [rng.randrange(1 << 31) for _ in range(40)]
    expected = []
    for start in range(len(tokens) - EDGE):
        value = 0
        for token in tokens[start : start + WINDOW]:
            value = (value * base + token) % 2**64
        expected.append(value)
    assert window_hashes(np.array(tokens, np.int32), powers_of(base)).tolist() == expected


def test_memory_is_bounded_and_the_newest_is_remembered() -> None:
    rng, finder = random.Random(1), RepeatFinder(1 << 12)
    for _ in range(40):
        finder.examine(text(rng, 2000), None)
    taken = finder.seen.num_bytes
    assert taken == 8 << 12
    assert finder.seen.forgotten > 0
    one = text(rng, 2000)
    finder.examine(one, None)
    assert finder.examine(joined(text(rng, 3), one), None).repeated > 1500
    assert finder.seen.num_bytes == taken


@given(st.lists(st.integers(1, 2**64 - 1), unique=True, max_size=60))
def test_seen_keys_finds_what_was_added_as_long_as_there_is_room(keys: list[int]) -> None:
    seen = SeenKeys(1 << 14)
    slots = [int(seen.add(np.array([key], np.uint64))[0]) for key in keys]
    if seen.forgotten == 0:
        assert seen.find(np.array(keys, np.uint64)).tolist() == slots
        assert len(set(slots)) == len(keys)
    assert (
        seen.find(np.array([k ^ 0xFF00 for k in keys if k ^ 0xFF00 not in keys and k != 0xFF00], np.uint64)).max(
            initial=-1
        )
        == -1
    )

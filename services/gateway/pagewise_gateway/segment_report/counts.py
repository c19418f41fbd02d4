"""Counts how often each window was repeated, and joins windows to segments."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagewise_gateway.repeats.finder import Repeats
from pagewise_gateway.repeats.windows import WINDOW

_RATIO = 2


class Segment(NamedTuple):
    """A text that prompts repeat behind different prefixes.

    Fields:
        prompt, offset: index of the prompt in which it was first, and its place there, in tokens.
        num_tokens: its length; up to ``WINDOW`` - 1 tokens at either end are left out.
        times: how many later prompts contain it where no prefix reaches it; the median of its windows.
    """

    prompt: int
    offset: int
    num_tokens: int
    times: int


class SegmentCounts:
    """Where each window that a ``RepeatFinder`` remembers was first, and how many prompts repeat it: 12 bytes each."""

    def __init__(self, num_slots: int) -> None:
        """``num_slots``: of the finder."""
        self._prompt, self._offset, self._times = (np.zeros(num_slots, np.int32) for _ in range(3))

    def count(self, prompt: int, repeats: Repeats) -> None:
        """Add what was found in a prompt, which gets the index ``prompt``."""
        self._prompt[repeats.added_slots] = prompt
        self._offset[repeats.added_slots] = repeats.added
        self._times[repeats.added_slots] = 0
        self._times[np.unique(repeats.found_slots)] += 1  # also if the prompt contains the text several times

    def segments(self, most: int) -> list[Segment]:
        """Return the segments whose repetitions have the most tokens, at most ``most`` of them.

        A segment is made of windows that follow one another without a gap in the prompt in which they were first. It
        ends where the next window was found more than twice, or less than half, as often. A text that repeats some of
        its own sentences is listed in parts: of equal windows only the first one has a place. Segments of fewer than
        two windows are left out: at the ends of a longer one, they come from samples that differ by what is around it.
        """
        slots = np.flatnonzero(self._times)
        if not len(slots):
            return []
        slots = slots[np.lexsort((self._offset[slots], self._prompt[slots]))]
        prompt, offset, times = (one[slots] for one in (self._prompt, self._offset, self._times))
        apart = (np.diff(prompt) != 0) | (np.diff(offset) > WINDOW) | _differ(times[1:], times[:-1])
        starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
        ends = np.append(starts[1:], len(slots))
        lengths = offset[ends - 1] + WINDOW - offset[starts]
        found = [
            Segment(int(prompt[start]), int(offset[start]), int(length), int(np.median(times[start:end])))
            for start, end, length in zip(starts, ends, lengths, strict=True)
            if length >= 2 * WINDOW
        ]
        return sorted(found, key=lambda one: (-one.num_tokens * one.times, one.prompt, one.offset))[:most]


def _differ(one: "NDArray[np.int32]", other: "NDArray[np.int32]") -> "NDArray[np.bool_]":
    return (one > _RATIO * other) | (other > _RATIO * one)

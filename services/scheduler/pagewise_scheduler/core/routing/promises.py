"""Prompts that an executor was given and has not computed yet: what they share will be cached when they are done."""

from bisect import bisect_left, insort
from collections.abc import Hashable

_BYTES_PER_TOKEN = 4


class Promises:
    """Sorted lists of prompts, one for each space: the longest common prefix of one more is with its neighbours."""

    __slots__ = ("_spaces",)

    def __init__(self) -> None:
        self._spaces: dict[Hashable, list[bytes]] = {}

    def add(self, space: Hashable, tokens: bytes) -> None:
        """These tokens (int32 bytes) will be computed."""
        insort(self._spaces.setdefault(space, []), tokens)

    def remove(self, space: Hashable, tokens: bytes) -> None:
        """The counterpart of ``add``."""
        prompts = self._spaces[space]
        del prompts[bisect_left(prompts, tokens)]
        if not prompts:
            del self._spaces[space]

    def shared(self, space: Hashable, tokens: bytes) -> int:
        """The most leading tokens that ``tokens`` shares with any of them."""
        prompts = self._spaces.get(space)
        if prompts is None:
            return 0
        index = bisect_left(prompts, tokens)
        return max(_common(tokens, other) for other in prompts[max(0, index - 1) : index + 1])


def _common(one: bytes, other: bytes) -> int:
    """Leading tokens that are equal: doubles the span until it differs, then halves it. Slices compare fast."""
    start, end, span = 0, min(len(one), len(other)) // _BYTES_PER_TOKEN, 16
    while start < end:
        stop = min(start + span, end)
        piece = slice(start * _BYTES_PER_TOKEN, stop * _BYTES_PER_TOKEN)
        if one[piece] == other[piece]:
            start, span = stop, span * 2
        else:
            end = stop - 1
            span = max(1, (end - start + 1) // 2)
    return start

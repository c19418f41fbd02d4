"""Prompts that an executor was given and has not computed yet: their prefixes will be cached when they are done."""

from bisect import bisect_left, insort

_BYTES_PER_TOKEN = 4


class PendingPrefixes:
    """A sorted list of prompts for each cache salt: the longest common prefix of one more is with its neighbours."""

    __slots__ = ("_prompts",)

    def __init__(self) -> None:
        self._prompts: dict[str | None, list[bytes]] = {}

    def add(self, cache_salt: str | None, tokens: bytes) -> None:
        """These tokens (int32 bytes) will be computed."""
        insort(self._prompts.setdefault(cache_salt, []), tokens)

    def remove(self, cache_salt: str | None, tokens: bytes) -> None:
        """The counterpart of ``add``."""
        prompts = self._prompts[cache_salt]
        del prompts[bisect_left(prompts, tokens)]
        if not prompts:
            del self._prompts[cache_salt]

    def shared(self, cache_salt: str | None, tokens: bytes, known: int, unit: int) -> int:
        """The most leading tokens, ``known`` plus whole ``unit``s of them, that ``tokens`` shares with any of them.

        At least ``known``, whether they are shared or not: who has so many elsewhere asks only for more.
        """
        prompts = self._prompts.get(cache_salt)
        if prompts is None:
            return known
        index = bisect_left(prompts, tokens)
        for other in prompts[max(0, index - 1) : index + 1]:
            if other.startswith(tokens[: (known + unit) * _BYTES_PER_TOKEN]):
                known += _common(tokens, other, known * _BYTES_PER_TOKEN, unit * _BYTES_PER_TOKEN) * unit
        return known


def _common(one: bytes, other: bytes, start: int, unit: int) -> int:
    """Units of bytes that are equal from ``start`` on: doubles the span until it differs, then halves it."""
    found, end, span = 0, (min(len(one), len(other)) - start) // unit, 16
    while found < end:
        stop = min(found + span, end)
        if other.startswith(one[start + found * unit : start + stop * unit], start + found * unit):
            found, span = stop, span * 2
        else:
            end = stop - 1
            span = max(1, (end - found + 1) // 2)
    return found

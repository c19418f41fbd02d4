"""What prompts of one ``prompt_cache_key`` have in common, from which their next places for snapshots are declared."""

from array import array
from collections.abc import Iterable

from pagewise_scheduler.core.requests.request import Request

_MOST_TOKENS = 1 << 22
"""Tokens of all prompts that are remembered: 16 MiB."""
_KEY_TOKENS = 256
"""Tokens that have as many bytes as a key may have."""


class SharedBeginnings:
    """Remembers the last prompt of each ``prompt_cache_key``, of the least recently used keys as long as there is room.

    The prefix tree of an executor shows where prompts part, too, but not if their blocks were evicted, or if earlier
    prompts ran on another executor.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str | None, str], array[int]] = {}
        self._num_tokens = 0

    def declare(self, requests: Iterable[Request]) -> None:
        """Declare a place in the prompt of each request, where it leaves the last prompt of its key."""
        for request in requests:
            params, prompt = request.params, request.prompt_token_ids
            key = params.key, params.cache_salt, params.reuse.cache_key
            if (last := self._last.pop(key, None)) is not None:
                self._num_tokens -= len(last) + _KEY_TOKENS
                request.places = [*request.places, _num_common(last, prompt)]
            self._last[key] = prompt
            self._num_tokens += len(prompt) + _KEY_TOKENS
            while self._num_tokens > _MOST_TOKENS:
                self._num_tokens -= len(self._last.pop(next(iter(self._last)))) + _KEY_TOKENS


def _num_common(first: "array[int]", second: "array[int]") -> int:
    """Return how many first tokens two prompts have in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""A prompt as routing sees it: the keys of its blocks, and the prefix that it shares with prompts that are placed."""

from bisect import bisect_left, insort
from typing import NamedTuple

from pagewise_shared.block_hash import rope_salt
from pagewise_shared.segments import Segment, original_tokens

from pagewise_scheduler.core.memory.prefix_tree import block_keys
from pagewise_scheduler.core.requests.request import Request

_BYTES_PER_TOKEN = 4
_MOST_TOKENS = 1 << 17
"""The most tokens of originals of a prompt's segments that are looked up: each original contains the root."""


class OriginalQuery(NamedTuple):
    """The original of equal ``segments`` of a prompt. ``tokens``: int32 bytes, padded to whole blocks, of which the
    first ``num_tokens`` tokens count. ``keys``: the tokens of each block."""

    segments: list[Segment]
    num_tokens: int
    tokens: bytes
    keys: list[bytes]


class PrefixQuery:
    """All known tokens of a request that is to be placed, cut into block keys once for all executors.

    ``tokens``: int32 bytes. ``cache_salt``: of the cache that it may use, from ``params`` and its length (see
    ``RequestSequence.cache_salt``). ``stored``: blocks that were found in storage, by the storage's identity.
    """

    __slots__ = (
        "_keys", "_originals", "_request", "cache_salt", "num_tokens", "params", "stored", "tokens", "uses_cache",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        # A request that migrates continues from its tokens, so the output of its first sequence counts as well.
        sequence = next((one for one in request.sequences if not one.finished), None)
        self.tokens = sequence.token_bytes() if sequence is not None else request.prompt_token_ids.tobytes()
        self.num_tokens = len(self.tokens) // _BYTES_PER_TOKEN
        self.cache_salt = rope_salt(request.params.cache_salt, self.num_tokens, request.short_rope_len)
        self.params = request.params
        self.uses_cache = request.params.sampling.prompt_logprobs is None  # prompt logprobs need a computed prompt
        self.stored = request.stored if self.uses_cache else {}
        self._keys: dict[int, list[bytes]] = {}
        self._request = request
        self._originals: dict[int, list[OriginalQuery]] = {}

    def keys(self, block_size: int) -> list[bytes]:
        """The tokens of each full block, without the newest token, which is always computed.

        Created once for each block size: ``bytes`` keep their hash, which look-ups in many trees use.
        """
        keys = self._keys.get(block_size)
        if keys is None:
            most = self.num_tokens - 1 if self.uses_cache else 0
            keys = self._keys[block_size] = list(block_keys(self.tokens, block_size, most))
        return keys

    def originals(self, block_size: int) -> list[OriginalQuery]:
        """The originals of the prompt's segments, each content once: the first ones, up to ``_MOST_TOKENS`` tokens."""
        if not self._request.segments:
            return []
        if (found := self._originals.get(block_size)) is None:
            found = self._originals[block_size] = []
            by_content: dict[bytes, OriginalQuery] = {}
            num_tokens = 0
            for segment in self._request.segments:
                num_tokens += segment.num_original_tokens
                if segment.moved == segment.stop:
                    continue
                if num_tokens > _MOST_TOKENS:
                    break
                tokens = original_tokens(self._request.prompt_token_ids, segment, block_size).tobytes()
                if tokens not in by_content:
                    keys = list(block_keys(tokens, block_size))
                    found.append(OriginalQuery([], segment.num_original_tokens, tokens, keys))
                    by_content[tokens] = found[-1]
                by_content[tokens].segments.append(segment)
        return found


class PendingPrefixes:
    """The prompts that will be computed, as a sorted list for each cache salt: the longest common prefix of another
    prompt is with one of its neighbours in the list."""

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
        """The most leading tokens, ``known`` plus whole ``unit``s, that ``tokens`` shares with any of the prompts.

        At least ``known``, whether they are shared or not, because the caller has so many cached.
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
    """The number of units of bytes that are equal from ``start`` on, by exponential and binary search."""
    found, end, span = 0, (min(len(one), len(other)) - start) // unit, 16
    while found < end:
        stop = min(found + span, end)
        if other.startswith(one[start + found * unit : start + stop * unit], start + found * unit):
            found, span = stop, span * 2
        else:
            end = stop - 1
            span = max(1, (end - found + 1) // 2)
    return found

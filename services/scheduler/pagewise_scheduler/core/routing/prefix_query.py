"""What routing asks of every executor about a request: how much of its tokens is cached there."""

from typing import NamedTuple

from pagewise_shared.block_hash import rope_salt
from pagewise_shared.segments import Segment, original_tokens

from pagewise_scheduler.core.memory.prefix_tree import block_keys
from pagewise_scheduler.core.requests.request import Request

_BYTES_PER_TOKEN = 4
_MOST_TOKENS = 1 << 17
"""Tokens of the originals of a prompt's segments that are looked at: each has the root once more."""


class OriginalQuery(NamedTuple):
    """What some ``segments`` of a prompt, which are alike, are moved from: ``tokens`` int32 bytes, whole blocks, of
    which the first ``num_tokens`` tokens count. ``keys``: the tokens of each block."""

    segments: list[Segment]
    num_tokens: int
    tokens: bytes
    keys: list[bytes]


class PrefixQuery:
    """All known tokens of a request that is to be placed, cut into block keys once for all executors.

    ``tokens``: int32 bytes. ``cache_salt``: whose cache it may use. ``num_sequences``: the most
    that run for it at a time. ``stored``: blocks of them that were found in storage, by its identity.
    ``adapter``: with which they are computed.
    """

    __slots__ = (
        "_keys", "_originals", "_request", "adapter", "cache_salt", "num_sequences", "num_tokens", "priority", "stored",
        "tokens", "uses_cache",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        # One that moves goes on from its tokens: the outputs of its sequences count as well, the first one's here.
        sequence = next((one for one in request.sequences if not one.finished), None)
        self.tokens = sequence.token_bytes() if sequence is not None else request.prompt_token_ids.tobytes()
        self.num_tokens = len(self.tokens) // _BYTES_PER_TOKEN
        self.cache_salt = rope_salt(request.cache_salt, self.num_tokens, request.short_rope_len)
        self.priority = request.priority
        self.adapter = request.adapter
        self.num_sequences = request.num_sequences
        self.uses_cache = request.sampling.prompt_logprobs is None  # those come from computing the prompt
        self.stored = request.stored if self.uses_cache else {}
        self._keys: dict[int, list[bytes]] = {}
        self._request = request
        self._originals: dict[int, list[OriginalQuery]] = {}

    def keys(self, block_size: int) -> list[bytes]:
        """The tokens of each full block; the newest token, which is always computed, is in none of them.

        Made once for each block size: look-ups in many trees hash the same objects, whose hash is kept.
        """
        keys = self._keys.get(block_size)
        if keys is None:
            most = self.num_tokens - 1 if self.uses_cache else 0
            keys = self._keys[block_size] = list(block_keys(self.tokens, block_size, most))
        return keys

    def originals(self, block_size: int) -> list[OriginalQuery]:
        """What the segments of the prompt are moved from, each content once.

        Of a prompt whose segments have very many tokens together with their roots, only the first ones.
        """
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

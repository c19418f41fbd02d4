"""What routing asks of every executor about a request: how much of its tokens is cached there."""

from pagewise_scheduler.core.memory.prefix_tree import block_keys
from pagewise_scheduler.core.requests.request import Request

_BYTES_PER_TOKEN = 4


class PrefixQuery:
    """All known tokens of a request that is to be placed, cut into block keys once for all executors.

    ``tokens``: int32 bytes. ``cache_salt``: whose cache it may use. ``num_sequences``: the most
    that run for it at a time. ``stored``: blocks of them that were found in storage, by its identity.
    """

    __slots__ = ("_keys", "cache_salt", "num_sequences", "num_tokens", "priority", "stored", "tokens", "uses_cache")

    def __init__(self, request: Request) -> None:
        # One that moves goes on from its tokens: the outputs of its sequences count as well, the first one's here.
        sequence = next((one for one in request.sequences if not one.finished), None)
        self.tokens = sequence.token_bytes() if sequence is not None else request.prompt_token_ids.tobytes()
        self.num_tokens = len(self.tokens) // _BYTES_PER_TOKEN
        self.cache_salt: str | None = request.cache_salt
        self.priority = request.priority
        self.num_sequences = request.num_sequences
        self.uses_cache = request.sampling.prompt_logprobs is None  # those come from computing the prompt
        self.stored = request.stored if self.uses_cache else {}
        self._keys: dict[int, list[bytes]] = {}

    def keys(self, block_size: int) -> list[bytes]:
        """The tokens of each full block; the newest token, which is always computed, is in none of them.

        Made once for each block size: look-ups in many trees hash the same objects, whose hash is kept.
        """
        keys = self._keys.get(block_size)
        if keys is None:
            most = self.num_tokens - 1 if self.uses_cache else 0
            keys = self._keys[block_size] = list(block_keys(self.tokens, block_size, most))
        return keys

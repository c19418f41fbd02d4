"""What a waiting sequence can begin with: the cache, or another output of its own request."""

from pagewise_scheduler.core.memory.kv_cache_manager import CachedPrefix, KVCacheManager
from pagewise_scheduler.core.scheduling.request import Sequence


def may_start(sequence: Sequence) -> bool:
    """Whether it is worth while to start now: later outputs of a request wait for the first one's prefill."""
    first = sequence.request.sequences[0]
    return sequence is first or first.row < 0 or first.prefilled


def fitting_prefix(kv: KVCacheManager, sequence: Sequence, room: int) -> CachedPrefix | None:
    """The longest prefix to begin with, or None if the sequence's known tokens take more than ``room`` blocks.

    Its newest token is always left to compute, for its logits are needed.
    """
    prefix = _longest_prefix(kv, sequence)
    if kv.num_taken(prefix, sequence.num_tokens) > room:
        prefix = kv.without_copy(prefix)
    return prefix if kv.num_taken(prefix, sequence.num_tokens) <= room else None


def _longest_prefix(kv: KVCacheManager, sequence: Sequence) -> CachedPrefix:
    first = sequence.request.sequences[0]
    if sequence.sampling.prompt_logprobs is not None:
        return CachedPrefix([], -1, 0, 0)  # they come from computing the prompt
    if sequence is not first and first.row >= 0 and first.prefilled and not sequence.output_token_ids:
        return kv.fork(first.table, sequence.num_tokens - 1)
    return kv.look_up(sequence.request.cache_salt, sequence.token_bytes(), sequence.num_tokens - 1)

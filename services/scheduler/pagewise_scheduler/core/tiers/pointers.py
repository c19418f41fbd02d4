"""How far each of a recovery's two pointers goes in one step: computing from the front, loading from the back."""

from pagewise_scheduler.core.tiers.cost_model import SMALL_STEPS, CostModel
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.recovery_plan import Recovery
from pagewise_scheduler.core.tiers.transfers import Transfers

_PIECE_BLOCKS = 256
_FETCHED_BLOCKS = 128
_SMALL_PIECE = 8
_QUEUED_SECONDS = 0.1
"""For so long a link may be asked for blocks ahead while the front computes."""


class Pointers:
    """Predicts where the two pointers meet, anew for every step, from what ``costs`` has learned."""

    def __init__(self, kv: KVCacheManager, costs: CostModel, transfers: Transfers) -> None:
        self._kv, self._costs, self._transfers = kv, costs, transfers

    def front(self, recovery: Recovery) -> int:
        """How many tokens may be computed now."""
        size, start = self._kv.block_size, recovery.sequence.num_scheduled_tokens
        hole = max(0, recovery.first * size - start)
        if recovery.method == "load":
            return hole
        gap = (recovery.first + recovery.back) * size - start
        # Half of what is predicted to be computed until the pointers meet, so that what was predicted wrongly can be
        # made up for; all of it once a step costs more than the tokens in it.
        left = max(hole, self._split(recovery, gap))
        if not left and recovery.back > self._kv.blocks_for(start) - recovery.first:
            # The link brings the rest before a step could compute any of it. It brings whole blocks: a block that a
            # step has begun, because its budget ended there, is only ever completed by computing.
            return 0
        if self._costs.compute_seconds(start, left) > SMALL_STEPS * self._costs.compute_seconds(start, 1):
            left = -(-left // 2)
        return min(gap, -(-max(1, left) // size) * size - start % size)

    def back(self, recovery: Recovery, *, alone: bool) -> int:
        """How many blocks of the last part may be asked for now, none if that is not positive. ``alone``: nothing else
        was asked for in this step."""
        # While the front computes, the next step that asks for more may be tens of milliseconds away. What comes behind
        # others of the same step is confirmed with them, so that only the first asks for so much.
        part, most = recovery.last_part, 2 * _PIECE_BLOCKS
        link = part.source.link
        if recovery.method == "both" and not part.source.is_far and alone:
            most = max(most, link.blocks_in(_QUEUED_SECONDS))
        in_part = recovery.first + recovery.back - part.start
        return min(self._wanted(recovery, is_far=part.source.is_far), in_part, most - link.num_loading)

    def _wanted(self, recovery: Recovery, *, is_far: bool) -> int:
        piece = _FETCHED_BLOCKS if is_far else _PIECE_BLOCKS
        if recovery.method == "load" or not recovery.back:
            return min(recovery.back, piece)
        # The back goes three quarters of the way to where the two are predicted to meet, for the front may go half of
        # it twice before the link is asked again. What is left goes to whichever turns out to be the faster one: all of
        # it to the link if no step is worth while any more.
        start = recovery.sequence.num_scheduled_tokens
        left = recovery.back - (self._kv.blocks_for(start) - recovery.first)
        front = self._split(recovery, left * self._kv.block_size) // self._kv.block_size
        behind, link = left - front, recovery.link
        coming = min(recovery.loading, link.blocks_in(link.busy_until - self._transfers.now))
        if front and behind + coming > _SMALL_PIECE:
            behind = (3 * (behind + coming) + 3) // 4 - coming
        return max(0, min(behind, recovery.back, piece if is_far else behind))

    def _split(self, recovery: Recovery, gap: int) -> int:
        """Of ``gap`` tokens between the two pointers, how many to compute: behind what steps in flight compute and the
        link brings."""
        sequence, link = recovery.sequence, recovery.link
        start, done = sequence.num_scheduled_tokens, sequence.num_computed_tokens
        computing = self._costs.compute_seconds(done, start - done)
        return self._costs.split(start, gap, link, max(0.0, link.busy_until - self._transfers.now) - computing)

"""Sequences that are getting their KV back, and the two pointers that bring it.

A sequence that begins with blocks in a lower tier, or at a peer, recovers them by one mechanism: computing from the
front and loading from the back, until the two meet. Loading alone and computing alone are its ends. Which tiers the
blocks come from makes no difference but for the costs.
"""

from collections.abc import Callable
from itertools import chain, groupby
from math import isnan

from pagewise_shared.protocol import Copied, unpack_int32s

from pagewise_scheduler.core.memory.block_table import CachedPrefix
from pagewise_scheduler.core.requests.request import RequestSequence
from pagewise_scheduler.core.tiers.cost_model import SMALL_STEPS, CostModel
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.recovery_plan import Recovery, RecoveryPlan, RecoveryPolicy
from pagewise_scheduler.core.tiers.recovery_planner import RecoveryPlanner
from pagewise_scheduler.core.tiers.transfers import Loads, Transfers

_PIECE_BLOCKS = 256
_FETCHED_BLOCKS = 128
_SMALL_PIECE = 8
_QUEUED_SECONDS = 0.1
"""While the front computes, as many blocks may be requested as a link copies in this time."""


class Recoveries:
    """All recoveries of one executor.

    ``planner``: makes their plans. ``emit``: is called with each recovery that has ended or had no block to get; its
    subscriber (metrics and the log, or a simulation) sets it. ``transfers``: the copies under way, demotions too.
    ``fetch_seconds``: the time of all copies from peers.
    """

    def __init__(self, kv: KVCacheManager, costs: CostModel, policy: RecoveryPolicy) -> None:
        self.fetch_seconds = 0.0
        self.emit: Callable[[Recovery], None] = _ignore
        self.transfers = Transfers(kv, costs)
        self._kv, self._costs = kv, costs
        self._active: dict[RequestSequence, Recovery] = {}
        self.planner = RecoveryPlanner(kv, costs, policy, self._active)
        # Sequences that compute blocks which a lower tier has, and up to which token. Only their time is measured.
        self._recomputing: dict[RequestSequence, tuple[Recovery, int]] = {}

    def begin(self, sequence: RequestSequence, prefix: CachedPrefix, plan: RecoveryPlan, now: float) -> Recovery:
        """The sequence has taken ``prefix``, and will have room for the blocks that ``plan`` brings."""
        loads = plan.method in ("load", "both")
        locations = [location for part in plan.parts if loads for location in part.hold(part.start, part.stop)]
        recovery = Recovery(
            sequence=sequence,
            plan=plan,
            locations=locations,
            back=len(locations),
            device_tokens=prefix.num_tokens,
            resumed=sequence.num_preemptions > 0,
            first_start=isnan(sequence.request.scheduled_time),
            began=now,
            behind_demotions=any(tier.num_arriving for tier in self._kv.pool.lower),
        )
        if loads and plan.windows is not None:
            lacking = [number for number, one in enumerate(prefix.windows, 1) if not one.blocks]
            held = iter(plan.windows(lacking))
            recovery.windows = [[] if one.blocks else next(held) for one in prefix.windows]
            recovery.loading = sum(map(len, recovery.windows))
            self._kv.pool.counters.snapshots_loaded += sum(map(bool, recovery.windows))
        sequence.note(recovery)
        if locations or recovery.loading:
            recovery.active = True
            self._active[sequence] = recovery
        elif plan.parts:
            self._recomputing[sequence] = recovery, min(plan.end * self._kv.block_size, sequence.num_tokens)
        else:
            recovery.ended = now
            if prefix.num_tokens or recovery.resumed:
                self.emit(recovery)
        return recovery

    def room(self, sequence: RequestSequence) -> int | None:
        """How many of the sequence's next tokens may be computed now; None: as many as there are."""
        recovery = self._active.get(sequence)
        return None if recovery is None else self._front(recovery)

    def request_loads(self, step: int, requested: Loads) -> None:
        """Add to ``requested`` the blocks that ``step`` brings to the device from the back of each recovery."""
        lives = {key.peer: load.epoch for key, load in requested.items()}
        # A link serves one recovery after the other, in order of admission: if all shared it, all would end late.
        for recovery in self._active.values():
            for number, locations in enumerate(recovery.windows):
                # One request is for one epoch of a peer: a reset peer has lost the blocks that were held before.
                if locations and lives.setdefault((of := locations[0].source).peer, of.epoch) == of.epoch:
                    # All at once: a window is small.
                    recovery.windows[number] = []
                    blocks = recovery.sequence.table.windows[number].blocks[: len(locations)]
                    self.transfers.ask(step, requested, recovery, locations, blocks)
            while recovery.back:
                part = recovery.last_part
                count = self._back(recovery, alone=not requested)
                peer, epoch = part.source.peer, part.source.epoch
                if count <= 0 or lives.setdefault(peer, epoch) != epoch:
                    break
                self._request(step, recovery, count, requested)
                if recovery.first + recovery.back > part.start:
                    break  # else the part before it comes over another link

    # The two pointers: where they meet is predicted anew for every step.

    def _front(self, recovery: Recovery) -> int:
        """How many tokens may be computed now."""
        size, start = self._kv.block_size, recovery.sequence.num_scheduled_tokens
        gap = max(0, recovery.first * size - start)
        if recovery.method == "load":
            return gap
        between = (recovery.first + recovery.back) * size - start
        # Half of the tokens that are predicted to be computed until the pointers meet, so that a wrong prediction
        # can be corrected; all of them once a step costs more than the tokens in it.
        left = max(gap, self._split(recovery, between))
        if not left and recovery.back > self._kv.blocks_for(start) - recovery.first:
            # The link brings the rest before a step could compute any of it. It brings whole blocks: a block that a
            # step has begun, because its budget ended there, is only ever completed by computing.
            return 0
        if self._costs.compute_seconds(start, left) > SMALL_STEPS * self._costs.compute_seconds(start, 1):
            left = -(-left // 2)
        return min(between, -(-max(1, left) // size) * size - start % size)

    def _back(self, recovery: Recovery, *, alone: bool) -> int:
        """How many blocks of the last part may be asked for now, none if that is not positive. ``alone``: nothing else
        was asked for in this step."""
        # While the front computes, the next step that asks for more may be tens of milliseconds later. Loads behind
        # others of the same step are confirmed with them, so only the first one asks for so much.
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
        # The back requests three quarters of its way to the predicted meeting point, because the front may compute half
        # of its way twice before the next request. The last blocks go to the faster of the two: all of them to the link
        # if another step does not pay.
        start = recovery.sequence.num_scheduled_tokens
        left = recovery.back - (self._kv.blocks_for(start) - recovery.first)
        front = self._split(recovery, left * self._kv.block_size) // self._kv.block_size
        behind, link = left - front, recovery.link
        coming = min(recovery.loading, link.blocks_in(link.busy_until - self.transfers.now))
        if front and behind + coming > _SMALL_PIECE:
            behind = (3 * (behind + coming) + 3) // 4 - coming
        return max(0, min(behind, recovery.back, piece if is_far else behind))

    def _split(self, recovery: Recovery, between: int) -> int:
        """Of ``between`` tokens between the two pointers, how many to compute: behind the tokens that steps in flight
        compute and the link brings."""
        sequence, link = recovery.sequence, recovery.link
        start, done = sequence.num_scheduled_tokens, sequence.num_computed_tokens
        computing = self._costs.compute_seconds(done, start - done)
        return self._costs.split(start, between, link, max(0.0, link.busy_until - self.transfers.now) - computing)

    def _request(self, step: int, recovery: Recovery, count: int, requested: Loads) -> None:
        """Ask for the last ``count`` of a recovery's blocks, which are of one part."""
        recovery.back -= count
        recovery.loading += count
        index = recovery.first + recovery.back
        held = recovery.locations[recovery.back : recovery.back + count]
        for _, run in groupby(held, key=lambda location: location.tier):
            locations = list(run)
            blocks = recovery.sequence.table.blocks[index : index + len(locations)]
            index += len(locations)
            self.transfers.ask(step, requested, recovery, locations, blocks)

    def copied(self, message: Copied) -> list[RequestSequence]:
        """The executor has made a list of copies, demotions included. Returns the sequences that have to start over
        because some of their device blocks did not get the right content."""
        bad = set(unpack_int32s(message.bad))
        load = self.transfers.confirmed(message, bad)
        if load is None:
            return []
        seconds = message.elapsed_us * 1e-6
        if message.peer:
            self.fetch_seconds += seconds
        if not bad:
            load.link.observe(seconds, 1, load.num_blocks)
        missed = load.is_missed(bad)
        for receiver, locations, blocks in load.parts:
            corrupt = [location for location, block in zip(locations, blocks, strict=True) if block in bad]
            for node in locations[0].source.came(locations, corrupt, receiver.request):
                self._kv.pool.drop(node, "corrupt")
            receiver.came(locations, corrupt, seconds)
        num_blocks = sum(len(blocks) for _, _, blocks in load.parts)
        if missed and load.parts[0][1][0].source.has_failed(len(bad), num_blocks):
            load.link.failed()
        return [sequence for sequence, recovery in self._active.items() if recovery.corrupt]

    def lose(self, peer: str) -> list[RequestSequence]:
        """A peer is gone: returns the sequences that waited for blocks of it, which must start over."""
        self._costs.forget_link(peer)
        self.transfers.cancel_unneeded()
        return [sequence for sequence, recovery in self._active.items() if recovery.plan.peer == peer]

    def settle(self, now: float) -> list[tuple[RequestSequence, int]]:
        """Recoveries whose pointers have met: (sequence, tokens it has now, computed and loaded)."""
        done: list[tuple[RequestSequence, int]] = []
        size = self._kv.block_size
        for sequence, recovery in list(self._active.items()):
            meeting = (recovery.first + recovery.back) * size
            if recovery.loading or sequence.num_scheduled_tokens < meeting:
                continue
            done.append((sequence, recovery.plan.end * size))
            for one in sequence.table.windows:
                one.loading = False
            recovery.ended = now
            if not recovery.behind_demotions:
                self._learn(recovery, now)
            request = sequence.request
            if recovery.first_start:
                request.loaded_tokens = dict(recovery.loaded)
                request.num_cached_tokens += recovery.loaded_tokens
            self._close(recovery)
        for sequence, (recovery, end) in list(self._recomputing.items()):
            if sequence.num_computed_tokens >= end:
                recovery.ended = now
                del self._recomputing[sequence]
                self.emit(recovery)
        return done

    def _learn(self, recovery: Recovery, now: float) -> None:
        """Learn how long both ends take, or how long a load takes beside the time of its link, if it was one link."""
        links = {part.source.link for part in recovery.plan.parts}
        if recovery.method == "both":
            self._costs.both_took(now - recovery.began, recovery.predicted)
        elif recovery.method == "load" and len(links) == 1:
            self._costs.load_waited(links.pop(), now - recovery.began - recovery.link_seconds)

    def abandon(self, sequence: RequestSequence) -> None:
        """The sequence lets go of its blocks. Loads under way for it keep theirs until they are done."""
        recovery = self._active.get(sequence)
        if recovery is not None:
            self._close(recovery)
        elif sequence in self._recomputing:
            self.emit(self._recomputing.pop(sequence)[0])

    def _close(self, recovery: Recovery) -> None:
        del self._active[recovery.sequence]
        recovery.active = False
        held = [*recovery.locations[: recovery.back], *chain.from_iterable(recovery.windows)]
        for source, locations in groupby(reversed(held), key=lambda location: location.source):
            source.unhold(locations)
        self.emit(recovery)
        if recovery.loading and any(part.source.is_far for part in recovery.plan.parts):
            self.transfers.cancel_unneeded()

    def clear(self) -> None:
        """The executor is gone or reset: nothing is under way any more."""
        for sequence in [*self._active, *self._recomputing]:
            self.abandon(sequence)
        self.transfers.clear()


def _ignore(recovery: Recovery) -> None:
    pass

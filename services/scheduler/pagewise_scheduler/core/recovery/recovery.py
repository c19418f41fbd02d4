"""Sequences that are getting their KV back, and the two pointers that bring it.

A sequence that begins with blocks on the host, or at a peer, recovers them by one mechanism: computing from the front
and loading from the back, until the two meet. Loading alone and computing alone are its ends.
"""

from collections import deque
from collections.abc import Iterable
from itertools import groupby

from pagewise_shared.protocol import DEVICE, BlockCopies, Copied, RemoteTier, unpack_int32s

from pagewise_scheduler.core.memory.kv_cache_manager import CachedPrefix, KVCacheManager
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.recovery.cost_model import SMALL_STEPS, CostModel, Link, RecoveryEstimate
from pagewise_scheduler.core.recovery.recovery_plan import (
    Method,
    Recovery,
    RecoveryMode,
    RecoveryPlan,
    Transfer,
)
from pagewise_scheduler.core.recovery.remote_tier import BlockSource, Peer, PrefixDirectory
from pagewise_scheduler.core.requests.request import Sequence

_REPORTS_KEPT = 4096
_PIECE_BLOCKS = 256
_FETCHED_BLOCKS = 128
_WORTH_BOTH = 0.9
_SMALL_PIECE = 8


class Recoveries:
    """All recoveries of one executor, and the loads that are under way for them.

    ``reports``: recoveries that have ended or needed nothing, for whoever logs and counts them. ``directory``: what
    other executors hold, None: there are none; ``endpoint``: the own one there. ``cancelled``: fetches, as (step,
    endpoint), that nobody waits for any more, for whoever tells the executor. ``fetch_seconds``: what all took.
    """

    def __init__(self, kv: KVCacheManager, costs: CostModel, mode: RecoveryMode = "auto") -> None:
        self.costs = costs
        self.mode = mode
        self.directory: PrefixDirectory | None = None
        self.endpoint = ""
        self.cancelled: list[tuple[int, str]] = []
        self.fetch_seconds = 0.0
        self.reports: deque[Recovery] = deque(maxlen=_REPORTS_KEPT)
        self._kv = kv
        kv.pool.host.worth_keeping = self.worth_keeping
        self._active: dict[Sequence, Recovery] = {}
        # Those that compute what the host has, and up to which token: only how long they take is of interest.
        self._recomputing: dict[Sequence, tuple[Recovery, int]] = {}
        self._transfers: dict[tuple[int, int, str], Transfer] = {}
        self._num_loading = 0
        self._stores: dict[int, int] = {}

    @property
    def num_loading(self) -> int:
        """Blocks whose load has been asked for and not confirmed."""
        return self._num_loading

    def _queued(self, source: BlockSource) -> int:
        """Blocks that a link has before it: asked for, or likely to be by those that are under way."""
        active = [one for one in self._active.values() if one.source.link is source.link]
        wanted = sum(one.back if one.method == "load" else one.back // 2 for one in active)
        return source.link.num_loading + wanted

    def join(self, directory: PrefixDirectory, own: Peer) -> None:
        """Fetch from the peers in ``directory``, and let them fetch from here: ``own`` is this executor among them."""
        self.directory, self.endpoint = directory, own.endpoint
        directory.peers[own.endpoint] = own

    # ---- choosing ------------------------------------------------------------------------------------

    def choose(self, prefix: CachedPrefix, share: float, sequence: Sequence | None = None) -> RecoveryPlan:
        """How a sequence that begins with ``prefix`` gets what lies on the host, or further at a peer.

        ``share``: the part of a step's token budget that its computing would get.
        """
        plans = self._plans(prefix, sequence)
        if not plans:
            return RecoveryPlan("device")
        size = self._kv.block_size
        end = max(plan.end for plan in plans)
        best, least = RecoveryPlan("device"), float("inf")
        for plan in plans:
            assert plan.source is not None
            queued = self._queued(plan.source)
            estimate = self.costs.estimate(
                plan.start * size, len(plan.nodes), queued, share, plan.source.link, plan.first - plan.start
            )
            rest = self.costs.compute_seconds(plan.end * size, (end - plan.end) * size, share)
            plan.method, plan.estimate = self._method(estimate, plan.source.link), estimate
            if plan.seconds + rest < least:
                best, least = plan, plan.seconds + rest
        return best

    def _plans(self, prefix: CachedPrefix, sequence: Sequence | None) -> list[RecoveryPlan]:
        """Every source that has what comes after the device's part of the prefix."""
        start = len(prefix.blocks)
        plans: list[RecoveryPlan] = []
        if prefix.on_host:
            host = BlockSource("", self.costs.load, self._kv.pool)
            plans.append(RecoveryPlan("load", host, prefix.on_host, start, start + prefix.hole))
        if self.directory is not None and sequence is not None and sequence.sampling.prompt_logprobs is None:
            size = self._kv.block_size
            most = (sequence.num_tokens - 1) // size
            found = None
            if most > start and len(self.directory.peers) > 1:
                tokens = sequence.token_bytes()[: 4 * most * size]
                salt = sequence.request.cache_salt
                found = self.directory.longest(self.endpoint, salt, tokens, start, self._usable)
            if found is not None:
                peer, nodes = found
                link, lending = self.costs.link(peer.endpoint), peer.scheduler
                source = BlockSource(peer.endpoint, link, lending.kv.pool, lending.epoch, peer.wake)
                plans.append(RecoveryPlan("load", source, nodes[start:], start, start))
        return plans

    def _usable(self, peer: str) -> bool:
        """Whether a peer may be asked: one that failed is left alone for a while."""
        link = self.costs.link(peer)
        link.rests = max(0, link.rests - 1)
        return link.rests == 0

    def can_fetch_from(self, peer: str) -> bool:
        """Whether that peer's blocks would be of use here, and nothing speaks against asking for them."""
        if self.directory is None or self.mode == "recompute":
            return False
        own, other = self.directory.peers.get(self.endpoint), self.directory.peers.get(peer)
        if own is None or other is None or own is other:
            return False
        return own.block_format == other.block_format and self.costs.link(peer).rests == 0

    def _method(self, estimate: RecoveryEstimate, link: Link) -> Method:
        if self.mode == "swap":
            return "load"
        if self.mode != "auto":
            return self.mode
        better: Method = "load" if estimate.load <= estimate.recompute else "recompute"
        # Both at once keeps the executor and the link busy: it has to win by more than the noise of the estimate.
        if estimate.both < _WORTH_BOTH * min(estimate.load, estimate.recompute):
            return "both"
        self.costs.both_passed_over()
        if better == "recompute":
            link.passed_over()
        return better

    def worth_keeping(self, node: CachedBlock) -> bool:
        """Whether copies of the prefix that ends with ``node`` are worth what they cost, block by block on average.

        They save, if the prefix is used again, what recovering from both ends saves over computing alone. They cost
        their time on the link, by how busy the link is: an idle one costs nothing.
        """
        if self.mode != "auto":
            return self.mode != "recompute"
        extends = node.parent is not None and node.parent.host >= 0
        recompute, load = self.costs.block_seconds(node.depth if extends else (node.depth + 1) // 2)
        saved = recompute * recompute / (recompute + load) if recompute > 0 else 0.0
        pool = self._kv.pool
        busy = pool.host.num_storing / max(1, pool.host.max_storing)
        return pool.policy.probability(node) * saved >= busy * self.costs.store.predict(0, 1)

    # ---- running -------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, prefix: CachedPrefix, plan: RecoveryPlan, now: float) -> Recovery:
        """The sequence has taken ``prefix``, and will have room for what comes by ``plan``."""
        loads = plan.source is not None and plan.method in ("load", "both")
        places = plan.source.pin(plan.nodes) if plan.source is not None and loads else []
        recovery = Recovery(
            sequence=sequence,
            plan=plan,
            places=places,
            back=len(places),
            device_tokens=prefix.num_tokens,
            resumed=sequence.num_preemptions > 0,
            began=now,
            behind_stores=self._kv.pool.host.num_storing > 0,
        )
        sequence.history.append(recovery)
        if places:
            self._active[sequence] = recovery
        elif plan.nodes:
            self._recomputing[sequence] = recovery, min(plan.end * self._kv.block_size, sequence.num_tokens)
        else:
            recovery.ended = now
            if prefix.num_tokens or recovery.resumed:
                self.reports.append(recovery)
        return recovery

    def room(self, sequence: Sequence) -> int | None:
        """How many of the sequence's next tokens may be computed now; None: as many as there are."""
        recovery = self._active.get(sequence)
        if recovery is None:
            return None
        size, start = self._kv.block_size, sequence.num_scheduled_tokens
        hole = max(0, recovery.first * size - start)
        if recovery.method == "load":
            return hole
        gap = (recovery.first + recovery.back) * size - start
        # Half of what is predicted to be computed until the pointers meet, so that what was predicted wrongly can be
        # made up for; all of it once a step costs more than the tokens in it.
        link = recovery.source.link
        left = max(hole, self.costs.split(start, gap, link.num_loading, link=link))
        if self.costs.compute_seconds(start, left) > SMALL_STEPS * self.costs.compute_seconds(start, 1):
            left = -(-left // 2)
        return min(gap, -(-max(1, left) // size) * size - start % size)

    def ask(self, step: int) -> tuple[BlockCopies, ...]:
        """What ``step`` brings to the device, from the back of each recovery."""
        if not self._active:
            return ()
        asked: dict[tuple[int, str], Transfer] = {}
        lives: dict[str, int] = {}
        # A link serves one after the other, in order of admission: shared among all, all of them would end last.
        for recovery in self._active.values():
            source = recovery.source
            count = min(2 * _PIECE_BLOCKS - source.link.num_loading, self._next_piece(recovery))
            # One request is for one life of a peer: blocks that were pinned before it was reset are not there any more.
            if count <= 0 or lives.get(source.peer, source.epoch) != source.epoch:
                continue
            lives[source.peer] = source.epoch
            recovery.back -= count
            places = recovery.places[recovery.back : recovery.back + count]
            start = recovery.first + recovery.back
            blocks = recovery.sequence.table.blocks[start : start + count]
            # What is being written into is nobody else's until it has arrived, whatever becomes of the sequence.
            self._kv.pool.share(blocks)
            begin = 0
            for tier, part in groupby(places, key=lambda place: place.tier):
                own = list(part)
                transfer = asked.setdefault((tier, source.peer), Transfer(source.link, source.epoch))
                transfer.parts.append((recovery, own, blocks[begin : begin + len(own)]))
                transfer.num_blocks += len(own)
                begin += len(own)
            recovery.loading += count
            source.link.num_loading += count
            self._num_loading += count
        self._transfers |= {(step, *key): transfer for key, transfer in asked.items()}
        return tuple(
            BlockCopies(tier, DEVICE, transfer.pairs(), self._remote(tier, peer, transfer.epoch) if peer else None)
            for (tier, peer), transfer in asked.items()
        )

    def _remote(self, tier: int, endpoint: str, epoch: int) -> RemoteTier:
        assert self.directory is not None
        peer = self.directory.peers[endpoint]
        # What is on its device came with steps that are back; only what it sends to other tiers may be under way.
        step = 0 if tier == DEVICE else peer.scheduler.last_step
        return RemoteTier(endpoint, epoch, step, peer.key)

    def _next_piece(self, recovery: Recovery) -> int:
        piece = _FETCHED_BLOCKS if recovery.source.peer else _PIECE_BLOCKS
        if recovery.method == "load" or not recovery.back:
            return min(recovery.back, piece)
        # The back goes three quarters of the way to where the two are predicted to meet, for the front may go half of
        # it twice before the link is asked again. The prediction is made anew in every step, and what is left goes to
        # whichever turns out to be the faster one.
        start = recovery.sequence.num_scheduled_tokens
        left = recovery.back - (self._kv.blocks_for(start) - recovery.first)
        link = recovery.source.link
        split = self.costs.split(start, left * self._kv.block_size, link.num_loading, link=link)
        behind = left - split // self._kv.block_size
        if behind + recovery.loading > _SMALL_PIECE:
            behind = (3 * (behind + recovery.loading) + 3) // 4 - recovery.loading
        return max(0, min(behind, recovery.back, piece))

    def stores(self, step: int) -> list[int]:
        """The store list of ``step``: pairs (device block, host block) that evictions have asked for."""
        host = self._kv.pool.host
        pairs, host.stores = host.stores, []
        if pairs:
            self._stores[step] = len(pairs) // 2
        return pairs

    def copied(self, message: Copied) -> list[Sequence]:
        """Copies of a step have been made; returns sequences that must start over because blocks came bad."""
        seconds = message.elapsed_us * 1e-6
        if message.target == DEVICE:
            return self._arrived((message.step, message.source, message.peer), seconds, unpack_int32s(message.bad))
        if count := self._stores.pop(message.step, 0):
            self._kv.pool.host.stored(count)
            self.costs.store.observe(seconds, 1, count)
        return []

    def copy_seconds(self, copies: BlockCopies) -> float:
        """Predicted seconds of copies between tiers that were just asked for, with those before them."""
        if copies.target != DEVICE:
            return self.costs.store.predict(1, self._kv.pool.host.num_storing)
        link = self.costs.link(copies.peer.endpoint if copies.peer is not None else "")
        return link.seconds(link.num_loading)

    def _arrived(self, key: tuple[int, int, str], seconds: float, bad: Iterable[int]) -> list[Sequence]:
        """The loads of a step from one tier are done; returns sequences that must start over because device blocks do
        not hold what they should: it was not what was stored there, or a peer did not send it."""
        transfer = self._transfers.pop(key, None)
        if transfer is None:
            return []
        wrong, failed = set(bad), []
        self._end(transfer)
        counters, from_peer = self._kv.pool.counters, bool(key[2])
        if from_peer:
            self.fetch_seconds += seconds
        if not wrong:
            transfer.link.observe(seconds, 1, transfer.num_blocks)
        for recovery, places, blocks in transfer.parts:
            spoiled = [place for place, block in zip(places, blocks, strict=True) if block in wrong]
            recovery.loading -= len(places)
            if from_peer:
                counters.fetched += len(places) - len(spoiled)
                counters.fetch_failed += len(spoiled)
            else:
                counters.loaded += len(places)
                counters.spoiled += len(spoiled)
                for place in spoiled:
                    if place.node.host >= 0:  # else it went with one above it
                        self._kv.pool.host.drop(place.node)
            if self._active.get(recovery.sequence) is not recovery:
                continue
            if spoiled:
                failed.append(recovery.sequence)
            else:
                recovery.loaded_tokens += len(places) * self._kv.block_size
                recovery.link_seconds += seconds
        if from_peer and failed:
            transfer.link.failed()
        return failed

    def _end(self, transfer: Transfer) -> None:
        """A transfer is over: what it held is let go of."""
        self._num_loading -= transfer.num_blocks
        transfer.link.num_loading -= transfer.num_blocks
        for recovery, places, blocks in transfer.parts:
            recovery.source.unpin(reversed(places))
            self._kv.drop(blocks, None)

    def lose(self, peer: str) -> list[Sequence]:
        """A peer is gone: returns the sequences that waited for blocks of it, which must start over."""
        self.costs.forget_link(peer)
        return [sequence for sequence, recovery in self._active.items() if recovery.source.peer == peer]

    def settle(self, now: float) -> list[tuple[Sequence, int]]:
        """Recoveries whose pointers have met: (sequence, tokens it has now, computed and loaded)."""
        done: list[tuple[Sequence, int]] = []
        size = self._kv.block_size
        for sequence, recovery in list(self._active.items()):
            meeting = (recovery.first + recovery.back) * size
            if recovery.loading or sequence.num_scheduled_tokens < meeting:
                continue
            done.append((sequence, recovery.plan.end * size))
            recovery.ended = now
            if recovery.method == "load" and not recovery.behind_stores:
                self.costs.load_waited(recovery.source.link, now - recovery.began - recovery.link_seconds)
            if recovery.method == "both" and not recovery.behind_stores:
                self.costs.both_took(now - recovery.began, recovery.predicted)
            request = sequence.request
            if not recovery.resumed and not request.num_host_tokens + request.num_peer_tokens:
                if recovery.source.peer:
                    request.num_peer_tokens = recovery.loaded_tokens
                else:
                    request.num_host_tokens = recovery.loaded_tokens
                request.num_cached_tokens = recovery.device_tokens + recovery.loaded_tokens
            self._close(recovery)
        for sequence, (recovery, end) in list(self._recomputing.items()):
            if sequence.num_computed_tokens >= end:
                recovery.ended = now
                del self._recomputing[sequence]
                self.reports.append(recovery)
        return done

    def abandon(self, sequence: Sequence) -> None:
        """The sequence lets go of its blocks. Loads under way for it keep theirs until they are done."""
        recovery = self._active.get(sequence)
        if recovery is not None:
            self._close(recovery)
        elif sequence in self._recomputing:
            self.reports.append(self._recomputing.pop(sequence)[0])

    def _close(self, recovery: Recovery) -> None:
        del self._active[recovery.sequence]
        recovery.source.unpin(reversed(recovery.places[: recovery.back]))
        self.reports.append(recovery)
        if recovery.source.peer and recovery.loading:
            wanted = {(key[0], key[2]) for key, transfer in self._transfers.items() if self._is_wanted(transfer)}
            for step, _, peer in self._transfers:
                if peer and (step, peer) not in wanted and (step, peer) not in self.cancelled:
                    self.cancelled.append((step, peer))

    def _is_wanted(self, transfer: Transfer) -> bool:
        return any(self._active.get(part[0].sequence) is part[0] for part in transfer.parts)

    def clear(self) -> None:
        """The executor is gone or reset: nothing is under way any more."""
        for sequence in [*self._active, *self._recomputing]:
            self.abandon(sequence)
        for transfer in self._transfers.values():
            self._end(transfer)
        for under_way in (self._transfers, self._stores, self.cancelled):
            under_way.clear()

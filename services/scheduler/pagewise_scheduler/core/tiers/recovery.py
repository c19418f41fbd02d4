"""Sequences that are getting their KV back, and the two pointers that bring it.

A sequence that begins with blocks in a lower tier, or at a peer, recovers them by one mechanism: computing from the
front and loading from the back, until the two meet. Loading alone and computing alone are its ends. Which tiers the
blocks come from makes no difference but for the costs.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from math import inf, isnan
from operator import attrgetter
from typing import NamedTuple

from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import DEVICE, Copied, unpack_int32s

from pagewise_scheduler.core.memory.block_table import CachedPrefix
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.request import RequestSequence
from pagewise_scheduler.core.requests.virtual_tokens import Account
from pagewise_scheduler.core.tiers.cost_model import SMALL_STEPS, CostModel, Link, together
from pagewise_scheduler.core.tiers.hashed import HashedTier
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.peer import Peer, PeerTiers, PrefixDirectory
from pagewise_scheduler.core.tiers.recovery_plan import (
    HoldWindows,
    Offer,
    Recovery,
    RecoveryPlan,
    RecoveryPolicy,
    compose,
)
from pagewise_scheduler.core.tiers.tier import Location
from pagewise_scheduler.core.tiers.transfers import Loads, Transfers
from pagewise_scheduler.core.tiers.window_recovery import ResumePoint, WindowPlanner

_VICTIMS = 16
"""The number of sequences to compare when one of them must be preempted."""
_PIECE_BLOCKS = 256
_FETCHED_BLOCKS = 128
_SMALL_PIECE = 8
_QUEUED_SECONDS = 0.1
"""While the front computes, as many blocks may be requested as a link copies in this time."""


class Known(NamedTuple):
    """A prompt of ``num_tokens``, of which ``start`` blocks are on the device. ``gap``, ``offloaded``: see
    ``CachedPrefix``; ``stored``: see ``Request``."""

    num_tokens: int
    start: int
    gap: int
    offloaded: Sequence[CachedBlock]
    stored: Mapping[str, int]


class Recoveries:
    """All recoveries of one executor.

    ``policy``: chooses the method. ``emit``: is called with each recovery that has ended or had no block to get; its
    subscriber (metrics and the log, or a simulation) sets it. ``directory``: the prefix trees of other executors, None:
    there are none; ``endpoint``: of this executor there. ``transfers``: the copies under way, demotions too.
    ``fetch_seconds``: the time of all copies from peers.
    """

    def __init__(self, kv: KVCacheManager, costs: CostModel, policy: RecoveryPolicy) -> None:
        self.costs = costs
        self.policy = policy
        self.directory: PrefixDirectory | None = None
        self.endpoint = ""
        self.fetch_seconds = 0.0
        self.emit: Callable[[Recovery], None] = _ignore
        self.transfers = Transfers(kv, costs)
        self._kv = kv
        self._active: dict[RequestSequence, Recovery] = {}
        # Sequences that compute blocks which a lower tier has, and up to which token. Only their time is measured.
        self._recomputing: dict[RequestSequence, tuple[Recovery, int]] = {}

    def join(self, directory: PrefixDirectory, own: Peer) -> None:
        """Fetch from the peers in ``directory``, and let them fetch from here: ``own`` is this executor among them."""
        self.directory, self.endpoint = directory, own.endpoint
        directory.peers[own.endpoint] = own

    def _queued(self, link: Link) -> int:
        """Blocks that a link has before it: asked for, or likely to be by recoveries that are under way."""
        queued = link.num_loading
        for one in self._active.values():
            wanted = one.plan.blocks_of(one.first + one.back).get(link, 0)
            queued += wanted if one.method == "load" else wanted // 2
        return queued

    # ---- choosing ------------------------------------------------------------------------------------

    def choose(self, prefix: CachedPrefix, share: float, sequence: RequestSequence | None = None) -> RecoveryPlan:
        """How a sequence that begins with ``prefix`` gets the blocks that lie in lower tiers or at a peer.

        ``share``: the part of a step's token budget that the sequence would get for computing.
        """
        start = len(prefix.blocks)
        if sequence is not None and sequence.sampling.prompt_logprobs is not None:
            sequence = None  # all of its prompt is computed
        if self._kv.windows:
            plans = self._window_plans(prefix, share, sequence)
        else:
            offers = self._offers_below(start, prefix.gap, prefix.offloaded)
            offers += self._offers_elsewhere(start, sequence) if sequence is not None else ()
            plans = self._plans(start, offers, share)
        self.policy.note(plans)
        return self._fastest(plans, start, share)

    def predict(self, query: Known, share: float, lender: tuple[str, int] = ("", 0)) -> RecoveryPlan:
        """The plan that ``choose`` would return for a prompt now. Changes nothing, and holds no block.

        ``lender``: the endpoint of an executor, and how many blocks of the prompt it has.
        """
        start, (peer, num_remote_pins) = query.start, lender
        elsewhere = [
            Offer(tier, start, end, _hold_none)
            for tier, end in self._looked_up(query.stored, query.num_tokens)
            if end > start
        ]
        if num_remote_pins > start and self.can_fetch_from(peer):
            assert self.directory is not None
            source = PeerTiers(self.directory.peers[peer], self.costs.link(peer), self._kv.pool.counters)
            elsewhere.insert(0, Offer(source, start, num_remote_pins, _hold_none))
        if self._kv.windows:
            ends = [self._below(start, query.offloaded, _no_windows)] if query.offloaded else []
            ends += [ResumePoint(one.source, one.stop, _no_windows, one) for one in elsewhere]
            plans = self._plans_to(ends, start, query.offloaded, share)
        else:
            plans = self._plans(start, self._offers_below(start, query.gap, query.offloaded) + elsewhere, share)
        return self._fastest(plans, start, share)

    def _fastest(self, plans: list[RecoveryPlan], start: int, share: float) -> RecoveryPlan:
        """The plan with which the last block of any plan is there first, computed if the plan does not bring it."""
        size, end = self._kv.block_size, max((plan.end for plan in plans), default=start)

        def seconds(plan: RecoveryPlan) -> float:
            return plan.seconds_with_step + self.costs.compute_seconds(plan.end * size, (end - plan.end) * size, share)

        return min(plans, key=seconds, default=RecoveryPlan("device", start=start))

    def _window_plans(self, prefix: CachedPrefix, share: float, sequence: RequestSequence | None) -> list[RecoveryPlan]:
        """Plans of a model with windowed layers: one for each place behind ``prefix`` where a tier has the windows."""
        start, ends = len(prefix.blocks), list[ResumePoint]()
        if prefix.offloaded:
            ends = [self._below(start, prefix.offloaded, partial(self._kv.hold_windows, prefix.offloaded[-1]))]
        for offer in self._offers_elsewhere(start, sequence) if sequence is not None else ():
            ends.append(ResumePoint(offer.source, offer.stop, offer.windows, offer))
        return self._plans_to(ends, start, prefix.path[start:], share)

    def _below(self, start: int, offloaded: Sequence[CachedBlock], hold: HoldWindows) -> ResumePoint:
        """The end of ``offloaded``, which own tiers have with the windows there."""
        return ResumePoint(next(iter(self._kv.pool.lower)), start + len(offloaded), hold)

    def _plans_to(
        self, ends: list[ResumePoint], start: int, path: Sequence[CachedBlock], share: float
    ) -> list[RecoveryPlan]:
        planner = WindowPlanner(self._kv, self.costs, self.policy, self._run_below, self._queued)
        plans = (planner.plan(start, path, one, share) for one in ends)
        return [plan for plan in plans if plan is not None]

    def _run_below(self, at: int, nodes: Sequence[CachedBlock]) -> list[Offer]:
        return self._offers_below(at, 0, nodes)

    def _plans(self, start: int, offers: list[Offer], share: float) -> list[RecoveryPlan]:
        """A plan for each tier alone, and for the cheapest ones together, each block from the cheapest that has it."""
        by_tier = {offer.source: offer.source.link.predict(0, 1) for offer in offers}
        tiers = sorted(by_tier, key=by_tier.__getitem__)
        offers.sort(key=lambda offer: by_tier[offer.source])
        plans = []
        for some in [{tier} for tier in tiers] + [set(tiers[:count]) for count in range(2, len(tiers) + 1)]:
            plan = RecoveryPlan("load", compose([offer for offer in offers if offer.source in some]), start)
            link, queued = together(plan.blocks_of(plan.end), self._queued)
            plan.estimate = self.costs.estimate(
                start * self._kv.block_size, plan.num_blocks, link, queued, share, plan.first - start
            )
            plan.method = self.policy.method(plan.estimate)
            plans.append(plan)
        return plans

    def _offers_below(self, at: int, gap: int, offloaded: Sequence[CachedBlock]) -> list[Offer]:
        """The blocks ``offloaded``, which lie in lower tiers of this executor, ``gap`` blocks behind ``at``."""
        offers, at = list[Offer](), at + gap
        for number, run in groupby(offloaded, key=attrgetter("nearest_tier")):
            tier, nodes = self._kv.cache_tier(number), list(run)
            assert tier is not None
            offers.append(Offer(tier, at, at + len(nodes), _holder(tier.hold, nodes, at)))
            at += len(nodes)
        return offers

    def _offers_elsewhere(self, start: int, sequence: RequestSequence) -> Iterator[Offer]:
        """The blocks of a sequence from ``start`` on that a peer has, and the ones in tiers without ids."""
        size = self._kv.block_size
        most = (sequence.num_tokens - 1) // size
        if most > start and self.directory is not None and len(self.directory.peers) > 1:
            tokens = sequence.token_bytes()[: 4 * most * size]
            if (found := self.find_at_peers(sequence.cache_salt, tokens, start)) is not None:
                peer, nodes = found
                theirs = PeerTiers(peer, self.costs.link(peer.endpoint), self._kv.pool.counters)
                windows = partial(theirs.hold_windows, nodes[-1])
                yield Offer(theirs, start, len(nodes), _holder(theirs.hold, nodes, 0), windows)
        stored = {} if sequence.outgrown else sequence.request.stored
        for tier, end in self._looked_up(stored, sequence.num_tokens) if stored else ():
            if end > start:
                root, tokens = (
                    self._kv.pool.tree.root_hash(sequence.cache_salt),
                    sequence.token_bytes()[: 4 * end * size],
                )
                windows = partial(self._stored_windows, tier, root, tokens)
                yield Offer(tier, start, end, partial(tier.locations, root, tokens, size), windows)

    def _stored_windows(
        self, tier: HashedTier, root: BlockHash, tokens: bytes, groups: Sequence[int]
    ) -> list[list[Location]]:
        """The locations of the windows at the end of ``tokens`` in a tier without ids."""
        size = self._kv.block_size
        end, held = len(tokens) // (4 * size), list[list[Location]]()
        for group in groups:
            found = tier.locations(root, tokens, size, self._kv.windows[group - 1].first_needed(end * size), end)
            held.append([one._replace(group=group) for one in found])
        return held

    def _looked_up(self, stored: Mapping[str, int], num_tokens: int) -> Iterator[tuple[HashedTier, int]]:
        """The tiers without ids that may be loaded from now, and how many blocks of a prompt of ``num_tokens`` each
        has, by its identity in ``stored``."""
        most = (num_tokens - 1) // self._kv.block_size  # the newest token is always computed
        for tier in self._kv.hashed.values() if self.policy.mode != "recompute" else ():
            if not tier.link.rests and (num_blocks := min(most, stored.get(tier.identity, 0))) > 0:
                yield tier, num_blocks

    def find_at_peers(self, salt: str | None, tokens: bytes, more_than: int) -> tuple[Peer, list[CachedBlock]] | None:
        """The peer that holds the longest prefix of ``tokens`` (int32 bytes), if it is of ``more_than`` blocks."""
        if self.directory is None:
            return None
        return self.directory.longest(self.endpoint, salt, tokens, more_than, self._usable)

    def _usable(self, peer: str) -> bool:
        """Whether a peer may be asked: one that failed is left alone for a while."""
        link = self.costs.link(peer)
        link.rests = max(0, link.rests - 1)
        return link.rests == 0

    def can_fetch_from(self, peer: str) -> bool:
        """Whether that peer's blocks would be of use here, and nothing speaks against asking for them."""
        if self.directory is None or self.policy.mode == "recompute":
            return False
        own, other = self.directory.peers.get(self.endpoint), self.directory.peers.get(peer)
        if own is None or other is None or own is other:
            return False
        return own.block_format == other.block_format and self.costs.link(peer).rests == 0

    def choose_victim(self, running: list[RequestSequence], account: Account | None = None) -> RequestSequence:
        """The sequence to preempt: of the lowest priority, the cheapest to recover per block that really becomes free.

        Only the latest arrivals are weighed, and never the first in line: one sequence always gets on. A block that
        others share does not become free. ``account``: the key whose sequences are preferred, if it has candidates.
        """
        lowest = max(sequence.request.params.priority for sequence in running)
        first = min(running, key=_arrival_order)
        others = [one for one in running if one.request.params.priority == lowest and one is not first]
        if account is not None:
            others = [one for one in others if one.request.account is account] or others
        latest = heapq.nlargest(_VICTIMS, others, key=_arrival_order)
        return min(latest, key=self._seconds_per_block, default=first)

    def _seconds_per_block(self, sequence: RequestSequence) -> float:
        costs, blocks = self.costs, sequence.table.blocks
        freed = self._kv.pool.num_freed(blocks)
        if not freed:
            return inf
        start, link = (len(blocks) - freed) * costs.block_size, costs.link_below(DEVICE)
        if link is None:
            return costs.compute_seconds(start, freed * costs.block_size) / self._kv.num_freed(sequence.table)
        return min(costs.estimate(start, freed, link).by_method.values()) / self._kv.num_freed(sequence.table)

    # ---- running -------------------------------------------------------------------------------------

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
        if self.costs.compute_seconds(start, left) > SMALL_STEPS * self.costs.compute_seconds(start, 1):
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
        computing = self.costs.compute_seconds(done, start - done)
        return self.costs.split(start, between, link, max(0.0, link.busy_until - self.transfers.now) - computing)

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
        self.costs.forget_link(peer)
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
            self.costs.both_took(now - recovery.began, recovery.predicted)
        elif recovery.method == "load" and len(links) == 1:
            self.costs.load_waited(links.pop(), now - recovery.began - recovery.link_seconds)

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


def _arrival_order(sequence: RequestSequence) -> tuple[int, float, int]:
    return (*sequence.request.order, sequence.index)


def _ignore(recovery: Recovery) -> None:
    pass


def _no_windows(groups: Sequence[int]) -> list[list[Location]]:
    """Stand for ``ResumePoint.hold`` in a prediction."""
    raise AssertionError("a prediction holds no blocks")


def _hold_none(start: int, stop: int) -> list[Location]:
    """Stand for ``Offer.hold`` in a prediction."""
    raise AssertionError("a prediction holds no blocks")


def _holder(
    hold: Callable[[list[CachedBlock]], list[Location]], nodes: list[CachedBlock], at: int
) -> Callable[[int, int], list[Location]]:
    """Hold blocks of a prompt from one index to another; ``nodes`` are its blocks from ``at`` on."""
    return lambda start, stop: hold(nodes[start - at : stop - at])

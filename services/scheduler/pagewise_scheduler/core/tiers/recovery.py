"""Sequences that are getting their KV back, and the two pointers that bring it.

A sequence that begins with blocks in a lower tier, or at a peer, recovers them by one mechanism: computing from the
front and loading from the back, until the two meet. Loading alone and computing alone are its ends. Which tiers the
blocks come from makes no difference but for what it costs.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from math import isnan

from pagewise_shared.protocol import BlockCopies, Copied, unpack_int32s

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.request import Sequence
from pagewise_scheduler.core.tiers.cost_model import CostModel, Link, together
from pagewise_scheduler.core.tiers.hashed import HashTier
from pagewise_scheduler.core.tiers.kv_cache_manager import CachedPrefix, KVCacheManager
from pagewise_scheduler.core.tiers.peer import Peer, PeerTiers, PrefixDirectory
from pagewise_scheduler.core.tiers.pointers import Pointers
from pagewise_scheduler.core.tiers.prefetch import FetchedPiece, Prefetches
from pagewise_scheduler.core.tiers.recovery_plan import Offer, Recovery, RecoveryPlan, compose
from pagewise_scheduler.core.tiers.recovery_policy import RecoveryPolicy
from pagewise_scheduler.core.tiers.tier import Copies, Place
from pagewise_scheduler.core.tiers.transfers import Load, Receiver, TransferKey, Transfers

_REPORTS_KEPT = 4096


class Recoveries:
    """All recoveries of one executor.

    ``policy``: chooses the method. ``reports``: recoveries that have ended or had no block to get, for the log and the
    metrics. ``directory``: the prefix trees of other executors, None: there are none; ``endpoint``: of this executor
    there. ``transfers``: the copies under way, demotions too. ``fetch_seconds``: the time of all copies from peers.
    """

    def __init__(self, kv: KVCacheManager, costs: CostModel, policy: RecoveryPolicy) -> None:
        self.costs = costs
        self.policy = policy
        self.directory: PrefixDirectory | None = None
        self.endpoint = ""
        self.fetch_seconds = 0.0
        self.reports: deque[Recovery] = deque(maxlen=_REPORTS_KEPT)
        self.transfers = Transfers(kv, costs)
        self.prefetches = Prefetches(kv, costs, self.transfers)
        self._pointers = Pointers(kv, costs, self.transfers)
        self._kv = kv
        self._active: dict[Sequence, Recovery] = {}
        # Sequences that compute blocks which a lower tier has, and up to which token. Only their time is measured.
        self._recomputing: dict[Sequence, tuple[Recovery, int]] = {}

    @property
    def num_loading(self) -> int:
        """Blocks whose load has been asked for and not confirmed."""
        return self.transfers.num_loading

    def join(self, directory: PrefixDirectory, own: Peer) -> None:
        """Fetch from the peers in ``directory``, and let them fetch from here: ``own`` is this executor among them."""
        self.directory, self.endpoint = directory, own.endpoint
        directory.peers[own.endpoint] = own

    def _queued(self, link: Link) -> int:
        """Blocks that a link has before it: asked for, or likely to be by those that are under way."""
        queued = link.num_loading
        for one in self._active.values():
            wanted = one.plan.blocks_of(one.first + one.back).get(link, 0)
            queued += wanted if one.method == "load" else wanted // 2
        return queued

    # ---- choosing ------------------------------------------------------------------------------------

    def choose(self, prefix: CachedPrefix, share: float, sequence: Sequence | None = None) -> RecoveryPlan:
        """How a sequence that begins with ``prefix`` gets the blocks that lie in lower tiers or at a peer.

        ``share``: the part of a step's token budget that the sequence would get for computing.
        """
        start = len(prefix.blocks)
        best, least = RecoveryPlan("device", start=start), float("inf")
        offers = self._offers(prefix, sequence)
        if not offers:
            return best
        size, end = self._kv.block_size, max(offer.stop for offer in offers)
        for plan in self._plans(start, offers, share):
            rest = self.costs.compute_seconds(plan.end * size, (end - plan.end) * size, share)
            if plan.seconds_with_step + rest < least:
                best, least = plan, plan.seconds_with_step + rest
        return best

    def _plans(self, start: int, offers: list[Offer], share: float) -> Iterator[RecoveryPlan]:
        """A plan for each tier alone, and for the cheapest ones together, each block from the cheapest that has it."""
        by_tier = {offer.source: offer.source.link.predict(0, 1) for offer in offers}
        tiers = sorted(by_tier, key=by_tier.__getitem__)
        offers.sort(key=lambda offer: by_tier[offer.source])
        taken = [{tier} for tier in tiers] + [set(tiers[:count]) for count in range(2, len(tiers) + 1)]
        for some in taken:
            plan = RecoveryPlan("load", compose([offer for offer in offers if offer.source in some]), start)
            blocks = plan.blocks_of(plan.end)
            link, queued = together(blocks, self._queued)
            plan.estimate = self.costs.estimate(
                start * self._kv.block_size, plan.num_blocks, link, queued, share, plan.first - start
            )
            plan.method = self.policy.method(plan.estimate, blocks)
            yield plan

    def _offers(self, prefix: CachedPrefix, sequence: Sequence | None) -> list[Offer]:
        """The blocks that each tier has of the prompt, behind those on the device."""
        start = len(prefix.blocks)
        at, offers = start + prefix.hole, list[Offer]()
        for number, run in groupby(prefix.away, key=lambda node: node.nearest_tier):
            tier, nodes = self._kv.cache_tier(number), list(run)
            assert tier is not None
            offers.append(Offer(tier, at, at + len(nodes), _holder(tier.hold, nodes, at)))
            at += len(nodes)
        if sequence is None or sequence.sampling.prompt_logprobs is not None:
            return offers
        most = (sequence.num_tokens - 1) // self._kv.block_size
        if most > start and self.directory is not None and len(self.directory.peers) > 1:
            tokens = sequence.token_bytes()[: 4 * most * self._kv.block_size]
            if (found := self._at_peers(sequence.cache_salt, tokens, start)) is not None:
                peer, nodes = found
                theirs = PeerTiers(peer, self.costs.link(peer.endpoint), self._kv.pool.counters)
                offers.append(Offer(theirs, start, len(nodes), _holder(theirs.hold, nodes, 0)))
        if sequence.request.stored and not sequence.outgrown:
            root = self._kv.pool.tree.root_hash(sequence.cache_salt)
            for hashed, end in self.looked_up(sequence.request.stored, sequence.num_tokens):
                if end > start:
                    tokens = sequence.token_bytes()[: 4 * end * self._kv.block_size]
                    hold = partial(hashed.places, root, tokens, self._kv.block_size)
                    offers.append(Offer(hashed, start, end, hold))
        return offers

    def looked_up(self, stored: Mapping[str, int], num_tokens: int) -> Iterator[tuple[HashTier, int]]:
        """The tiers without ids that may be loaded from now, and how many blocks of a prompt of ``num_tokens`` each
        holds, which are ``stored`` by the tier's identity."""
        most = (num_tokens - 1) // self._kv.block_size  # the newest token is always computed
        for tier in self._kv.hashed.values() if self.policy.mode != "recompute" else ():
            if not tier.link.rests and (num_blocks := min(most, stored.get(tier.identity, 0))) > 0:
                yield tier, num_blocks

    def _at_peers(self, salt: str | None, tokens: bytes, more_than: int) -> tuple[Peer, list[CachedBlock]] | None:
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

    # ---- running -------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, prefix: CachedPrefix, plan: RecoveryPlan, now: float) -> Recovery:
        """The sequence has taken ``prefix``, and will have room for the blocks that ``plan`` brings."""
        loads = plan.method in ("load", "both")
        places = [place for part in plan.parts if loads for place in part.hold(part.start, part.stop)]
        recovery = Recovery(
            sequence=sequence,
            plan=plan,
            places=places,
            back=len(places),
            device_tokens=prefix.num_tokens,
            resumed=sequence.num_preemptions > 0,
            first_start=isnan(sequence.request.scheduled_time),
            began=now,
            behind_demotions=any(tier.num_arriving for tier in self._kv.pool.lower),
        )
        sequence.note(recovery)
        if self.prefetches.active:
            self.prefetches.stop(sequence.request)
        if places:
            self._active[sequence] = recovery
        elif plan.parts:
            self._recomputing[sequence] = recovery, min(plan.end * self._kv.block_size, sequence.num_tokens)
        else:
            recovery.ended = now
            if prefix.num_tokens or recovery.resumed:
                self.reports.append(recovery)
        return recovery

    def room(self, sequence: Sequence) -> int | None:
        """How many of the sequence's next tokens may be computed now; None: as many as there are."""
        recovery = self._active.get(sequence)
        return None if recovery is None else self._pointers.front(recovery)

    def request_loads(self, step: int, requested: dict[TransferKey, Load]) -> None:
        """Add to ``requested`` what ``step`` brings to the device from the back of each recovery."""
        lives = {key.peer: load.epoch for key, load in requested.items()}
        # A link serves one after the other, in order of admission: shared among all, all of them would end last.
        for recovery in self._active.values():
            while True:
                part = recovery.last_part
                count = self._pointers.back(recovery, alone=not requested)
                peer, epoch = part.source.peer, part.source.epoch
                # One request is for one life of a peer: blocks that were held before it was reset are not there any
                # more.
                if count <= 0 or lives.setdefault(peer, epoch) != epoch:
                    break
                self._request(step, recovery, count, requested)
                if recovery.first + recovery.back > part.start:
                    break  # else the part before it comes over another link

    def _request(self, step: int, recovery: Recovery, count: int, requested: dict[TransferKey, Load]) -> None:
        """Ask for the last ``count`` of a recovery's blocks, which are of one part."""
        recovery.back -= count
        recovery.loading += count
        index = recovery.first + recovery.back
        held = recovery.places[recovery.back : recovery.back + count]
        for _, run in groupby(held, key=lambda place: place.tier):
            places = list(run)
            blocks = recovery.sequence.table.blocks[index : index + len(places)]
            index += len(places)
            self.transfers.ask(step, requested, recovery, places, blocks)

    def request_ahead(self, step: int, requested: dict[TransferKey, Load], room: int) -> Copies:
        """Add to ``requested`` what ``step`` brings for prefetches, which may take ``room`` blocks. Returns the copies
        that make room for it."""
        return self.prefetches.request(step, requested, room, self._at_peers)

    def copies(self, loads: dict[TransferKey, Load]) -> list[BlockCopies]:
        """How a plan asks for these loads."""
        return [load.copies(key) for key, load in loads.items()]

    def copied(self, message: Copied) -> list[Sequence]:
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
        failed: dict[Sequence, None] = {}  # several parts of one recovery may be spoiled
        missed = False  # a block for which its receiver waits, so that the copy was not cancelled
        for receiver, places, blocks in load.parts:
            assert isinstance(receiver, Recovery | FetchedPiece)
            spoiled = [place for place, block in zip(places, blocks, strict=True) if block in bad]
            missed = missed or (bool(spoiled) and self._is_waited_for(receiver))
            source, request = places[0].source, receiver.request
            for node in source.came(places, spoiled, request):
                self._kv.pool.drop(node, "spoiled")
            if isinstance(receiver, FetchedPiece):
                self.prefetches.came(receiver, good=not spoiled)
                continue
            receiver.loading -= len(places)
            if self._active.get(receiver.sequence) is not receiver:
                continue
            if spoiled:
                failed[receiver.sequence] = None
            else:
                tokens = len(places) * self._kv.block_size
                receiver.loaded[source.name] = receiver.loaded.get(source.name, 0) + tokens
                receiver.link_seconds += seconds
        if missed and load.parts[0][1][0].source.has_failed(len(bad), load.num_blocks):
            load.link.failed()
        return list(failed)

    def lose(self, peer: str) -> list[Sequence]:
        """A peer is gone: returns the sequences that waited for blocks of it, which must start over."""
        self.costs.forget_link(peer)
        self.prefetches.lose(peer)
        self.transfers.cancel_unless(self._is_waited_for)
        return [sequence for sequence, recovery in self._active.items() if recovery.plan.peer == peer]

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
            if recovery.method == "load" and not recovery.behind_demotions:
                self._waited(recovery, now)
            if recovery.method == "both" and not recovery.behind_demotions:
                self.costs.both_took(now - recovery.began, recovery.predicted)
            request = sequence.request
            if recovery.first_start:
                request.loaded_tokens = dict(recovery.loaded)
                request.num_cached_tokens += recovery.loaded_tokens
            self._close(recovery)
        for sequence, (recovery, end) in list(self._recomputing.items()):
            if sequence.num_computed_tokens >= end:
                recovery.ended = now
                del self._recomputing[sequence]
                self.reports.append(recovery)
        return done

    def _waited(self, recovery: Recovery, now: float) -> None:
        """Learn how long a load takes beside what its link does, if it was one link."""
        links = {part.source.link for part in recovery.plan.parts}
        if len(links) == 1:
            self.costs.load_waited(links.pop(), now - recovery.began - recovery.link_seconds)

    def abandon(self, sequence: Sequence) -> None:
        """The sequence lets go of its blocks. Loads under way for it keep theirs until they are done."""
        recovery = self._active.get(sequence)
        if recovery is not None:
            self._close(recovery)
        elif sequence in self._recomputing:
            self.reports.append(self._recomputing.pop(sequence)[0])

    def _close(self, recovery: Recovery) -> None:
        del self._active[recovery.sequence]
        for source, places in groupby(reversed(recovery.places[: recovery.back]), key=lambda place: place.source):
            source.let_go(places)
        self.reports.append(recovery)
        if recovery.loading and any(part.source.is_far for part in recovery.plan.parts):
            self.transfers.cancel_unless(self._is_waited_for)

    def _is_waited_for(self, receiver: Receiver) -> bool:
        if isinstance(receiver, FetchedPiece):
            return not receiver.prefetch.stopped
        return isinstance(receiver, Recovery) and self._active.get(receiver.sequence) is receiver

    def clear(self) -> None:
        """The executor is gone or reset: nothing is under way any more."""
        for sequence in [*self._active, *self._recomputing]:
            self.abandon(sequence)
        self.prefetches.clear()
        self.transfers.clear()


def _holder(
    hold: Callable[[list[CachedBlock]], list[Place]], nodes: list[CachedBlock], at: int
) -> Callable[[int, int], list[Place]]:
    """Hold blocks of a prompt from one index to another, of which ``nodes`` are those from ``at`` on."""
    return lambda start, stop: hold(nodes[start - at : stop - at])

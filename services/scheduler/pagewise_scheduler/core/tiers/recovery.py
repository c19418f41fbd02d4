"""Sequences that are getting their KV back, and the two pointers that bring it.

A sequence that begins with blocks in a lower tier, or at a peer, recovers them by one mechanism: computing from the
front and loading from the back, until the two meet. Loading alone and computing alone are its ends. Which tiers the
blocks come from makes no difference but for what it costs.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from math import isnan

from pagewise_shared.block_hash import pack_names
from pagewise_shared.protocol import DEVICE, HASH_TIERS, BlockCopies, Copied, RemoteTier, unpack_int32s

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.request import Sequence
from pagewise_scheduler.core.tiers.copy_costs import Link
from pagewise_scheduler.core.tiers.cost_model import CostModel
from pagewise_scheduler.core.tiers.hashed import Storage, StoredPrefix, WriteBehind
from pagewise_scheduler.core.tiers.kv_cache_manager import CachedPrefix, KVCacheManager
from pagewise_scheduler.core.tiers.peer import OwnTiers, Peer, PeerTiers, PrefixDirectory
from pagewise_scheduler.core.tiers.pointers import Pointers
from pagewise_scheduler.core.tiers.prefetch import FetchedPiece, Prefetches
from pagewise_scheduler.core.tiers.recovery_plan import Recovery, RecoveryPlan
from pagewise_scheduler.core.tiers.recovery_policy import RecoveryPolicy
from pagewise_scheduler.core.tiers.tier import Copies
from pagewise_scheduler.core.tiers.transfers import Load, Receiver, TransferKey, Transfers

_REPORTS_KEPT = 4096
_IN_STORAGE = CachedBlock(None, b"", ())
"""Stands for any block in storage: what is there is in no tree."""


class Recoveries:
    """All recoveries of one executor.

    ``policy``: which method is taken. ``reports``: recoveries that have ended or needed nothing, for whoever logs and
    counts them. ``storages``: that the executor has, by number; ``writers``: what goes there. ``directory``: what
    other executors hold, None: there are none; ``endpoint``: the own one there. ``transfers``: the copies under way.
    ``fetch_seconds``: what all copies from peers took.
    """

    def __init__(
        self, kv: KVCacheManager, costs: CostModel, policy: RecoveryPolicy, storages: Iterable[Storage] = ()
    ) -> None:
        self.costs = costs
        self.policy = policy
        self.directory: PrefixDirectory | None = None
        self.endpoint = ""
        self.fetch_seconds = 0.0
        self.reports: deque[Recovery] = deque(maxlen=_REPORTS_KEPT)
        self.storages = {storage.number: storage for storage in storages}
        self.writers = WriteBehind(self.storages.values(), kv.pool.counters, self._is_worth_writing)
        self.transfers = Transfers(kv, costs, self.storages)
        self.prefetches = Prefetches(kv, costs, self.transfers)
        self._pointers = Pointers(kv, costs, self.transfers)
        self._kv = kv
        self._active: dict[Sequence, Recovery] = {}
        # Those that compute what a lower tier has, and up to which token: only how long they take is of interest.
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
        active = [one for one in self._active.values() if one.source.link is link]
        wanted = sum(one.back if one.method == "load" else one.back // 2 for one in active)
        return link.num_loading + wanted

    # ---- choosing ------------------------------------------------------------------------------------

    def choose(self, prefix: CachedPrefix, share: float, sequence: Sequence | None = None) -> RecoveryPlan:
        """How a sequence that begins with ``prefix`` gets what lies in lower tiers, or further at a peer.

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
            link = plan.source.link
            estimate = self.costs.estimate(
                plan.start * size, len(plan.nodes), link, self._queued(link), share, plan.first - plan.start
            )
            rest = self.costs.compute_seconds(plan.end * size, (end - plan.end) * size, share)
            plan.method, plan.estimate = self.policy.method(estimate, link), estimate
            if plan.seconds_with_step + rest < least:
                best, least = plan, plan.seconds_with_step + rest
        return best

    def _plans(self, prefix: CachedPrefix, sequence: Sequence | None) -> list[RecoveryPlan]:
        """One for every source that has what comes after the device's part of the prefix."""
        start = len(prefix.blocks)
        plans: list[RecoveryPlan] = []
        if prefix.away:
            source = OwnTiers(self._kv.pool.lower, prefix.away)
            plans.append(RecoveryPlan("load", source, prefix.away, start, start + prefix.hole))
        if self.directory is not None and sequence is not None and sequence.sampling.prompt_logprobs is None:
            size = self._kv.block_size
            most = (sequence.num_tokens - 1) // size
            found = None
            if most > start and len(self.directory.peers) > 1:
                tokens = sequence.token_bytes()[: 4 * most * size]
                found = self._at_peers(sequence.cache_salt, tokens, start)
            if found is not None:
                peer, nodes = found
                theirs = PeerTiers(peer, self.costs.link(peer.endpoint))
                plans.append(RecoveryPlan("load", theirs, nodes[start:], start, start))
        use = sequence is not None and sequence.sampling.prompt_logprobs is None and not sequence.outgrown
        if sequence is not None and use and sequence.request.stored:
            plans += self._stored(sequence, start)
        return plans

    def _stored(self, sequence: Sequence, start: int) -> Iterator[RecoveryPlan]:
        """One for every storage that has what comes after the first ``start`` blocks, as it was when this was asked."""
        size, request = self._kv.block_size, sequence.request
        for storage, end in self.in_storage(request.stored, sequence.num_tokens):
            if end > start:
                root = self._kv.pool.tree.root_hash(sequence.cache_salt)
                source = StoredPrefix(storage, root, sequence.token_bytes()[: 4 * end * size], size, start)
                yield RecoveryPlan("load", source, [_IN_STORAGE] * (end - start), start, start)

    def in_storage(self, stored: Mapping[str, int], num_tokens: int) -> Iterator[tuple[Storage, int]]:
        """The storages that may be loaded from now, and how many blocks of a prompt of ``num_tokens`` each holds, which
        are ``stored`` by the storage's identity."""
        most = (num_tokens - 1) // self._kv.block_size  # the newest token is always computed
        for storage in self.storages.values() if self.policy.mode != "recompute" else ():
            if not storage.costs.load.rests and (num_blocks := min(most, stored.get(storage.identity, 0))) > 0:
                yield storage, num_blocks

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
            first_start=isnan(sequence.request.scheduled_time),
            began=now,
            behind_demotions=any(tier.num_arriving for tier in self._kv.pool.lower),
        )
        sequence.note(recovery)
        self.prefetches.stop(sequence.request)
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
        return None if recovery is None else self._pointers.front(recovery)

    def request_loads(self, step: int, requested: dict[TransferKey, Load]) -> None:
        """Add to ``requested`` what ``step`` brings to the device from the back of each recovery."""
        lives = {key.peer: load.epoch for key, load in requested.items()}
        # A link serves one after the other, in order of admission: shared among all, all of them would end last.
        for recovery in self._active.values():
            source = recovery.source
            count = self._pointers.back(recovery, alone=not requested)
            # One request is for one life of a peer: blocks that were pinned before it was reset are not there any more.
            if count <= 0 or lives.setdefault(source.peer, source.epoch) != source.epoch:
                continue
            recovery.back -= count
            recovery.loading += count
            index = recovery.first + recovery.back
            pinned = recovery.places[recovery.back : recovery.back + count]
            for tier, part in groupby(pinned, key=lambda place: place.tier):
                places = list(part)
                blocks = recovery.sequence.table.blocks[index : index + len(places)]
                index += len(places)
                # What is being written into is nobody else's until it has arrived, whatever becomes of the sequence.
                self._kv.pool.pin(blocks)
                key = TransferKey(step, tier, DEVICE, source.peer)
                load = requested.setdefault(key, Load(source.link_from(tier), source.epoch))
                load.parts.append((recovery, places, blocks))
                self.transfers.begin(load, len(places))

    def request_ahead(self, step: int, requested: dict[TransferKey, Load], room: int) -> Copies:
        """Add to ``requested`` what ``step`` brings for prefetches, which may take ``room`` blocks. Returns the copies
        that make room for it."""
        return self.prefetches.request(step, requested, room, self._at_peers)

    def copies(self, loads: dict[TransferKey, Load]) -> list[BlockCopies]:
        """How a plan asks for these loads."""
        return [
            BlockCopies(key.source, DEVICE, load.pairs(), self._remote(key, load), self._names(key, load))
            for key, load in loads.items()
        ]

    def _names(self, key: TransferKey, load: Load) -> bytes:
        if key.peer or key.source not in HASH_TIERS:
            return b""
        return b"".join(
            pack_names(recovery.source.names(places))
            for recovery, places, _ in load.parts
            if isinstance(recovery.source, StoredPrefix)
        )

    def _is_worth_writing(self, node: CachedBlock, storage: Storage, busy: float) -> bool:
        return self.policy.is_worth_writing(self._kv.pool.policy.probability(node), node, storage.costs, busy)

    def _remote(self, key: TransferKey, load: Load) -> RemoteTier | None:
        if not key.peer:
            return None
        assert self.directory is not None
        peer = self.directory.peers[key.peer]
        # What is on its device came with steps that are back; only what goes to its other tiers may be under way.
        step = 0 if key.source == DEVICE else peer.scheduler.last_step
        return RemoteTier(key.peer, load.epoch, step, peer.key)

    def copied(self, message: Copied) -> list[Sequence]:
        """Copies of a step have been made; returns sequences that must start over because device blocks do not hold
        what they should: something else was stored, or a peer did not send it."""
        bad = set(unpack_int32s(message.bad))
        if message.target in HASH_TIERS:
            self.writers.confirmed(message.target, message.step, bad)
        load = self.transfers.confirmed(message)
        if load is None:
            return []
        seconds = message.elapsed_us * 1e-6
        stored = not message.peer and message.source in HASH_TIERS
        if message.peer:
            self.fetch_seconds += seconds
        if not bad:
            load.link.observe(seconds, 1, load.num_blocks)
        failed: dict[Sequence, None] = {}  # several parts of one recovery may be spoiled
        missed = False  # something that was waited for, and not cancelled
        for receiver, places, blocks in load.parts:
            spoiled = [place for place, block in zip(places, blocks, strict=True) if block in bad]
            if stored:
                self._kv.pool.counters.recalled += len(places) - len(spoiled)
                self._kv.pool.counters.recall_failed += len(spoiled)
                if spoiled and isinstance(receiver, Recovery) and isinstance(receiver.source, StoredPrefix):
                    receiver.sequence.request.stored.pop(receiver.source.identity, None)
            elif message.peer:
                self._kv.pool.counters.fetched += len(places) - len(spoiled)
                self._kv.pool.counters.fetch_failed += len(spoiled)
            missed = missed or (bool(spoiled) and self._is_waited_for(receiver))
            if isinstance(receiver, FetchedPiece):
                self.prefetches.came(receiver, good=not spoiled)
                continue
            assert isinstance(receiver, Recovery)
            recovery = receiver
            recovery.loading -= len(places)
            if not message.peer and not stored:
                self._kv.pool.counters.loaded += len(places)
                self._kv.pool.counters.spoiled += len(spoiled)
                for place in spoiled:
                    if place.node.block_id(place.tier) == place.block:  # else it went with one above it
                        self._kv.pool.drop(place.node, "spoiled")
            if self._active.get(recovery.sequence) is not recovery:
                continue
            if spoiled:
                failed[recovery.sequence] = None
            else:
                recovery.loaded_tokens += len(places) * self._kv.block_size
                recovery.link_seconds += seconds
        # Storage forgets a block now and then; if nothing came, it does not work.
        if missed and (message.peer or (stored and len(bad) == load.num_blocks)):
            load.link.failed()
        return list(failed)

    def lose(self, peer: str) -> list[Sequence]:
        """A peer is gone: returns the sequences that waited for blocks of it, which must start over."""
        self.costs.forget_link(peer)
        self.prefetches.lose(peer)
        self.transfers.cancel_unless(self._is_waited_for)
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
            if recovery.method == "load" and not recovery.behind_demotions:
                self.costs.load_waited(recovery.source.link, now - recovery.began - recovery.link_seconds)
            if recovery.method == "both" and not recovery.behind_demotions:
                self.costs.both_took(now - recovery.began, recovery.predicted)
            request = sequence.request
            if recovery.first_start:
                request.loaded_tokens = {recovery.origin: recovery.loaded_tokens} if recovery.loaded_tokens else {}
                request.num_cached_tokens += recovery.loaded_tokens
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
        recovery.source.release(reversed(recovery.places[: recovery.back]))
        self.reports.append(recovery)
        if recovery.loading and (recovery.source.peer or isinstance(recovery.source, StoredPrefix)):
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
        self.writers.clear()

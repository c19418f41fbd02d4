"""How sequences get the KV of a prefix back: the places that have its blocks, and the fastest plan to bring them.

A tier below the device, a tier without ids, or a peer *offers* blocks. Each plan composes offers, and the costs of its
links and of computing predict its time.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, takewhile
from math import inf
from operator import attrgetter
from typing import NamedTuple

from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.block_table import CachedPrefix
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.request import RequestSequence
from pagewise_scheduler.core.requests.virtual_tokens import Account
from pagewise_scheduler.core.tiers.cost_model import CostModel, Link, together
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
from pagewise_scheduler.core.tiers.snapshots import MARGIN
from pagewise_scheduler.core.tiers.tier import Location
from pagewise_scheduler.core.tiers.window_recovery import ResumePoint, WindowPlanner

_PLACES = 4
"""The number of places with snapshots in lower tiers that are weighed: the last ones on the path, ``MARGIN`` tokens or
more apart, because the places of one snapshot of windows are within ``MARGIN`` tokens."""

_VICTIMS = 16
"""The number of sequences to compare when one of them must be preempted."""


class Known(NamedTuple):
    """A prompt of ``num_tokens``, of which ``start`` blocks are on the device. ``gap``, ``offloaded``: see
    ``CachedPrefix``; ``stored``: see ``Request``."""

    num_tokens: int
    start: int
    gap: int
    offloaded: Sequence[CachedBlock]
    stored: Mapping[str, int]


class RecoveryPlanner:
    """Plans the recoveries of one executor.

    ``policy``: chooses the method. ``active``: the recoveries under way, whose loads precede new ones on their links.
    ``directory``: the prefix trees of other executors, None: there are none; ``endpoint``: of this executor there.
    """

    def __init__(
        self, kv: KVCacheManager, costs: CostModel, policy: RecoveryPolicy, active: Mapping[RequestSequence, Recovery]
    ) -> None:
        self.costs = costs
        self.policy = policy
        self.directory: PrefixDirectory | None = None
        self.endpoint = ""
        self._kv, self._active = kv, active

    def join(self, directory: PrefixDirectory, own: Peer) -> None:
        """Fetch from the peers in ``directory``, and let them fetch from here: ``own`` is this executor among them."""
        self.directory, self.endpoint = directory, own.endpoint
        directory.peers[own.endpoint] = own

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
            ends = self._below(start, query.offloaded, lambda node: _no_windows)
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
        start = len(prefix.blocks)
        ends = self._below(start, prefix.offloaded, lambda node: partial(self._kv.hold_windows, node))
        for offer in self._offers_elsewhere(start, sequence) if sequence is not None else ():
            ends.append(ResumePoint(offer.source, offer.stop, offer.windows, offer))
        return self._plans_to(ends, start, prefix.path[start:], share)

    def _below(
        self, start: int, offloaded: Sequence[CachedBlock], holder: Callable[[CachedBlock], HoldWindows]
    ) -> list[ResumePoint]:
        """The last places in ``offloaded`` behind which a sequence can begin with windows of own tiers, the last place
        first. ``holder``: returns the function that holds the windows behind a node."""
        most = 1 if self.policy.mode == "swap" else _PLACES  # "swap" loads all that there is
        apart, found = -(-MARGIN // self._kv.block_size), list[ResumePoint]()
        end = len(offloaded)
        while end > 0 and len(found) < most:
            node = offloaded[end - 1]
            if self._kv.can_begin(node):
                found.append(ResumePoint(next(iter(self._kv.pool.lower)), start + end, holder(node)))
                end -= apart
            else:
                end -= 1
        return found

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

    def offers_ahead(self, path: Sequence[CachedBlock], start: int, salt: str | None, tokens: bytes) -> list[Offer]:
        """Where the blocks of a prefix from ``start`` on come from if no sequence waits for them: the longest run, each
        block from the cheapest tier.

        ``path``: all blocks of the prefix, which are nodes of the prefix tree as far as it has them; the flags of the
        others tell which tiers without ids have them. ``tokens``: of the prefix (int32 bytes).
        """
        behind = path[start:]
        offers = self._offers_below(start, 0, [*takewhile(attrgetter("num_tiers"), behind)])
        stored = {
            tier.identity: start + sum(1 for _ in takewhile(tier.has, behind)) for tier in self._kv.hashed.values()
        }
        offers += self._offers_of(start, salt, tokens, stored)
        offers.sort(key=lambda offer: offer.source.link.predict(0, 1))
        return compose(offers) if any(offer.start == start for offer in offers) else []

    def _offers_elsewhere(self, start: int, sequence: RequestSequence) -> Iterator[Offer]:
        """The blocks of a sequence from ``start`` on that a peer has, and the ones in tiers without ids."""
        most = (sequence.num_tokens - 1) // self._kv.block_size  # the newest token is always computed
        stored = {} if sequence.outgrown else sequence.request.stored
        if most > start and (stored or self._has_peers):
            tokens = sequence.token_bytes()[: 4 * most * self._kv.block_size]
            yield from self._offers_of(start, sequence.cache_salt, tokens, stored)

    def _offers_of(self, start: int, salt: str | None, tokens: bytes, stored: Mapping[str, int]) -> Iterator[Offer]:
        """The blocks of ``tokens`` from ``start`` on that a peer has, and the ones in tiers without ids."""
        size = self._kv.block_size
        if self._has_peers and (found := self.find_at_peers(salt, tokens, start)) is not None:
            peer, nodes = found
            theirs = PeerTiers(peer, self.costs.link(peer.endpoint), self._kv.pool.counters)
            windows = partial(theirs.hold_windows, nodes[-1])
            yield Offer(theirs, start, len(nodes), _holder(theirs.hold, nodes, 0), windows)
        for tier, end in self._looked_up(stored, len(tokens) // 4 + 1):
            if end > start:
                root, own = self._kv.pool.tree.root_hash(salt), tokens[: 4 * end * size]
                windows = partial(self._stored_windows, tier, root, own)
                yield Offer(tier, start, end, partial(tier.locations, root, own, size), windows)

    @property
    def _has_peers(self) -> bool:
        return self.directory is not None and len(self.directory.peers) > 1

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
        """Whether a peer may be asked: after a failure it is left alone for a while."""
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

    def _queued(self, link: Link) -> int:
        """Blocks that a link has before it: asked for, or likely to be by recoveries that are under way."""
        queued = link.num_loading
        for one in self._active.values():
            wanted = one.plan.blocks_of(one.first + one.back).get(link, 0)
            queued += wanted if one.method == "load" else wanted // 2
        return queued


def _arrival_order(sequence: RequestSequence) -> tuple[int, float, int]:
    return (*sequence.request.order, sequence.index)


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

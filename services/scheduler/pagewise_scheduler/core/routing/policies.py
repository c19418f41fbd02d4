"""Routing policies: which executor a request is placed on.

The default is the least predicted time to first token. It has no rules for sessions or hot prefixes. A session returns
to the executor with its prefix, because that is the fastest. A prefix gets a second copy when the queue of its holder
takes longer than computing it elsewhere, including the cost of the blocks that are evicted there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from math import inf
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol, get_args

from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.routing.executor_view import CostEstimate, ExecutorView, Match, Placement, PrefixQuery
from pagewise_scheduler.core.routing.migrations import Continuation, Roles
from pagewise_scheduler.core.tiers.recovery import Known

RoutingName = Literal["ttft", "prefix", "least-loaded", "round-robin"]
ROUTING_NAMES: tuple[RoutingName, ...] = get_args(RoutingName)

Reason = Literal["only", "turn", "load", "cached", "elsewhere", "decode"]
"""Why a request was placed on its executor: it is the only one; it was its turn; it has the least load, and no executor
holds any of the prompt, or the policy ignores that; it holds the most of the prompt; another one holds more, but would
take longer; the request has migrated there after its prompt."""
REASONS: tuple[Reason, ...] = get_args(Reason)


_MOST_PREDICTED = 8
_reused = attrgetter("match.reused")
"""The number of tokens that a candidate need not compute."""


@dataclass(slots=True, eq=False)
class Candidate:
    """An executor that could take the prompt of ``query``, and how much of it is cached there."""

    executor: ExecutorView
    query: PrefixQuery
    match: Match


def look_up(executor: ExecutorView, query: PrefixQuery) -> Candidate:
    """Look a prompt up in an executor's prefix tree."""
    return Candidate(executor, query, executor.find(query))


class PredictedRecovery(NamedTuple):
    """The predicted ``seconds`` until a candidate has the KV of its prompt if it began now, and the number of leading
    tokens, ``start``, that are not computed for it."""

    seconds: float
    start: int


RecoveryPredictor = Callable[[Candidate, Candidate], PredictedRecovery]
"""Predicts the recovery of a candidate (the first argument). The second one holds the most of its prompt: blocks that
can be fetched from another executor come from there."""


class Choice(NamedTuple):
    """The chosen candidate, the reason, and its predicted costs, if the policy predicts any."""

    candidate: Candidate
    reason: Reason
    estimate: CostEstimate | None = None


Continues = Callable[[ExecutorView, CostEstimate], Continuation]
"""How a request continues after its prompt, if that executor computes it at those costs."""


class RoutingPolicy(Protocol):
    """Chooses among executors, at least two of them, for the prompt of ``query``.

    ``continues``: given if executors have roles; a policy that predicts costs adds the cost after the prompt.
    """

    def choose(
        self, executors: Sequence[ExecutorView], query: PrefixQuery, now: float, continues: Continues | None = None
    ) -> Choice:
        """The chosen executor. ``now``: seconds."""
        ...


class RoundRobin:
    """The executors in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(
        self, executors: Sequence[ExecutorView], query: PrefixQuery, now: float, continues: Continues | None = None
    ) -> Choice:
        """The next executor."""
        self._turn += 1
        return Choice(look_up(executors[self._turn % len(executors)], query), "turn")


class LeastLoaded:
    """The fewest sequences that have not finished."""

    def choose(
        self, executors: Sequence[ExecutorView], query: PrefixQuery, now: float, continues: Continues | None = None
    ) -> Choice:
        """The first executor with the least load."""
        return Choice(look_up(min(executors, key=attrgetter("load")), query), "load")


class LongestPrefix:
    """The most cached tokens; load breaks ties."""

    def choose(
        self, executors: Sequence[ExecutorView], query: PrefixQuery, now: float, continues: Continues | None = None
    ) -> Choice:
        """The executor that has the most of the prompt cached, or will when the prompts before it are computed."""
        candidates = [look_up(executor, query) for executor in executors]
        best = max(candidates, key=lambda candidate: (candidate.match.reused, -candidate.executor.load))
        return Choice(best, "cached" if best.match.reused else "load")


def cheapest_recovery(candidate: Candidate, holder: Candidate) -> PredictedRecovery:
    """The recovery that the candidate would choose now, and computing the rest; or waiting until the prompts that were
    placed before have computed the common part, if that is faster."""
    executor, match, num_tokens = candidate.executor, candidate.match, candidate.query.num_tokens
    recoveries, costs, share = executor.scheduler.recoveries, executor.costs, executor.share
    size = costs.block_size
    rest = costs.compute_seconds(match.reused, num_tokens - match.reused, share)
    computed = PredictedRecovery(rest, match.reused)
    num_fetchable = (holder.match.device + holder.match.lower) // size
    if not match.offloaded and not candidate.query.stored and num_fetchable <= match.device // size:
        return computed  # most prompts: neither a lower tier nor a peer has more of it
    known = Known(num_tokens, match.device // size, match.gap, match.offloaded, candidate.query.stored)
    peer = holder.executor.scheduler.recoveries.endpoint, num_fetchable
    plan = recoveries.predict(known, share, peer)
    if not plan.parts:
        return computed
    there = max(plan.end * size, match.reused)
    seconds = plan.seconds + costs.compute_seconds(there, num_tokens - there, share)
    assert plan.estimate is not None
    front = {"recompute": plan.end * size - match.device, "both": plan.estimate.split}.get(plan.method, 0)
    recovered = PredictedRecovery(seconds, max(there - front, match.device))
    if match.lower and match.expected == match.device + match.lower:
        return recovered
    return min(computed, recovered)


def estimate_costs(
    candidate: Candidate, holder: Candidate, now: float, predict: RecoveryPredictor = cheapest_recovery
) -> CostEstimate:
    """The predicted costs of a candidate at the time ``now``, in seconds."""
    executor, query = candidate.executor, candidate.query
    kv, match = executor.scheduler.kv, candidate.match
    num_blocks = kv.blocks_for(query.num_tokens) - match.expected // kv.block_size
    seconds, start = predict(candidate, holder)
    return CostEstimate(
        executor.queue_seconds(query.params.priority, now)
        + executor.room_seconds(query, num_blocks, now)
        + executor.adapter_seconds(query),
        seconds,
        executor.eviction_seconds(num_blocks),
        executor.busy(seconds, now),
        start,
    )


def _most_promising(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """If there are many candidates, only the ones with the most of the prompt and the ones with the least load, because
    predicting takes time."""
    if len(candidates) <= 2 * _MOST_PREDICTED:
        return candidates
    held = nlargest(_MOST_PREDICTED, candidates, key=_reused)
    others = [candidate for candidate in candidates if candidate not in held]
    return held + nsmallest(_MOST_PREDICTED, others, key=attrgetter("executor.load"))


class LeastTimeToFirstToken:
    """The least sum of the seconds for the queue, the recovery, and recovering evicted blocks; load breaks ties.

    Computing, now or again later, also delays the following requests. On a device that is busy a share r of its time,
    work of w seconds delays others by w r / (1 - r) altogether (exact where they share the device equally), so work
    counts 1 / (1 - r) times. That keeps executors under load from all computing the same prefixes.
    """

    def __init__(self, predict: RecoveryPredictor = cheapest_recovery) -> None:
        self._predict = predict

    def choose(
        self, executors: Sequence[ExecutorView], query: PrefixQuery, now: float, continues: Continues | None = None
    ) -> Choice:
        """The executor with the least predicted cost."""
        candidates = [look_up(executor, query) for executor in executors]
        holder = max(candidates, key=_reused)
        best, least = Choice(holder, "load"), (inf, 0)
        for candidate in _most_promising(candidates):
            estimate = estimate_costs(candidate, holder, now, self._predict)
            seconds = self.cost(estimate)
            if continues is not None:
                seconds += continues(candidate.executor, estimate).seconds
            cost = seconds, candidate.executor.load
            if cost < least:
                best, least = Choice(candidate, "load", estimate), cost
        if not holder.match.reused:
            return best
        held = best.candidate.match.reused == holder.match.reused
        return best._replace(reason="cached" if held else "elsewhere")

    def cost(self, estimate: CostEstimate) -> float:
        """Seconds that a placement costs this request and others."""
        return estimate.queue + (estimate.recovery + estimate.evicted) / (1.0 - estimate.busy)


def make_routing(name: RoutingName) -> RoutingPolicy:
    """Create the policy of that name."""
    policies: dict[RoutingName, Callable[[], RoutingPolicy]] = {
        "ttft": LeastTimeToFirstToken,
        "prefix": LongestPrefix,
        "least-loaded": LeastLoaded,
        "round-robin": RoundRobin,
    }
    return policies[name]()


def place(
    policy: RoutingPolicy,
    request: Request,
    executors: Sequence[ExecutorView],
    now: float,
    roles: Roles | None = None,
) -> Placement:
    """Place a request on one of ``executors``, at least one, all of which could hold it. ``now``: seconds.

    ``roles``: statistics for executors with roles; None: roles are ignored.
    """
    query = PrefixQuery(request)
    continues: Continues | None = None
    if roles is not None and any(executor.role != "both" for executor in executors):
        continues = roles.after(request, query, executors, now).best
        # Predictions keep all but short or cached prompts away from decoders. Other policies do not use decoders.
        allowed = [one for one in executors if one.role != "decode"] or executors
        executors = executors if isinstance(policy, LeastTimeToFirstToken) else allowed
    if len(executors) > 1:
        choice = policy.choose(executors, query, now, continues)
    else:
        choice = Choice(look_up(executors[0], query), "only")
    best = choice.candidate
    estimate = choice.estimate or estimate_costs(best, best, now)
    placement = best.executor.place(request, query, best.match, estimate, choice.reason, now)
    if continues is not None:
        placement.set_decoder(continues(best.executor, estimate).decoder)
    return placement


def place_decoding(request: Request, source: ExecutorView, executor: ExecutorView, now: float) -> Placement:
    """Place a request on ``executor`` that migrates from ``source``. ``now``: seconds."""
    query = PrefixQuery(request)
    candidate = look_up(executor, query)
    estimate = estimate_costs(candidate, look_up(source, query), now)
    return executor.place(request, query, candidate.match, estimate, "decode", now)

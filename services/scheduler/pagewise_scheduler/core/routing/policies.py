"""Routing policies: which executor a request is placed on.

The default is the least predicted time to first token. It has no rules for sessions or hot prefixes. A session returns
to the executor with its prefix, because that is the fastest. A prefix gets a second copy when the queue of its holder
takes longer than computing it elsewhere, including the cost of the blocks that are evicted there.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from itertools import count
from math import inf
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.routing.executor_view import CostEstimate, ExecutorView, Match, Placement
from pagewise_scheduler.core.routing.prompts import PrefixQuery
from pagewise_scheduler.core.tiers.recovery_planner import Known

RoutingName = Literal["ttft", "prefix", "least-loaded", "round-robin"]
ROUTING_NAMES: tuple[RoutingName, ...] = get_args(RoutingName)

Reason = Literal["only", "turn", "load", "cached", "elsewhere", "decode"]
"""Why a request was placed on its executor: it is the only one; it was its turn; it has the least load, and no executor
holds any of the prompt, or the policy ignores that; it holds the most of the prompt; another one holds more, but would
take longer; the request has migrated there after its prompt."""
REASONS: tuple[Reason, ...] = get_args(Reason)

_MOST_PREDICTED = 8
_LATELY = 0.02
_FIRST_GUESS = 128.0
_WEIGHT_OF_PAUSES = 5.0
"""The weight of a second by which a prompt delays a decoding sequence at a decoder, in seconds to a first token.

Chosen by replays (``benchmarks/roles/run.py``): with 1 much of the gain in the time between tokens was lost, with 20
first tokens waited while decoders had time for them.
"""
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


class Continuation(NamedTuple):
    """The executor at which a request decodes (None: where its prompt was computed), and the seconds that it costs."""

    decoder: ExecutorView | None
    seconds: float


Continues = Callable[[ExecutorView, CostEstimate], Continuation]
"""How a request continues after its prompt, if that executor computes it at these costs."""

RoutingPolicy = Callable[[Sequence[ExecutorView], PrefixQuery, float, Continues | None], Choice]
"""Chooses among executors, at least two of them, for the prompt of a query, at a time in seconds.

``Continues`` is given if executors have roles; a policy that predicts costs adds the cost after the prompt.
"""


def round_robin() -> RoutingPolicy:
    """A policy that takes the executors in turn."""
    turns = count()

    def choose(executors: Sequence[ExecutorView], query: PrefixQuery, now: float, after: Continues | None) -> Choice:
        return Choice(look_up(executors[next(turns) % len(executors)], query), "turn")

    return choose


def least_loaded(executors: Sequence[ExecutorView], query: PrefixQuery, now: float, after: Continues | None) -> Choice:
    """The first executor with the fewest sequences that have not finished."""
    return Choice(look_up(min(executors, key=attrgetter("load")), query), "load")


def longest_prefix(
    executors: Sequence[ExecutorView], query: PrefixQuery, now: float, after: Continues | None
) -> Choice:
    """The executor that has the most of the prompt cached, or will when the prompts before it are computed; load breaks
    ties."""
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
    peer = holder.executor.scheduler.recoveries.planner.endpoint, num_fetchable
    plan = recoveries.planner.predict(known, share, peer)
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
    num_blocks = kv.room_for(query.num_tokens, match.expected // kv.block_size)
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

    def __call__(
        self, executors: Sequence[ExecutorView], query: PrefixQuery, now: float, after: Continues | None
    ) -> Choice:
        """The executor with the least predicted cost."""
        candidates = [look_up(executor, query) for executor in executors]
        holder = max(candidates, key=_reused)
        best, least = Choice(holder, "load"), (inf, 0)
        for candidate in _most_promising(candidates):
            estimate = estimate_costs(candidate, holder, now, self._predict)
            seconds = self.cost(estimate)
            if after is not None:
                seconds += after(candidate.executor, estimate).seconds
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
    match name:
        case "ttft":
            return LeastTimeToFirstToken()
        case "prefix":
            return longest_prefix
        case "least-loaded":
            return least_loaded
        case "round-robin":
            return round_robin()


class Roles:
    """Statistics of executors with roles. ``output_tokens``: of a sequence, a moving average. ``num_ended``: sequences
    that have ended."""

    def __init__(self) -> None:
        self.output_tokens = _FIRST_GUESS
        self.num_ended = 0

    def ended(self, num_output_tokens: int) -> None:
        """A sequence has ended after ``num_output_tokens`` tokens."""
        self.num_ended += 1
        self.output_tokens += _LATELY * (num_output_tokens - self.output_tokens)


class AfterPrompt:
    """The possible continuations of a request after the prompt of ``query``, at each of ``executors`` that could hold
    and serve it. ``now``: seconds."""

    def __init__(
        self, request: Request, query: PrefixQuery, executors: Iterable[ExecutorView], roles: Roles, now: float
    ) -> None:
        self._query, self._output_tokens, self._now = query, roles.output_tokens, now
        size = len(request.prompt_token_ids), request.max_tokens
        decoders = [one for one in executors if one.role != "prefill"] if may_move(request) else []
        able = [one for one in decoders if one.scheduler.fits(*size) and one.serves(request)]
        self._decoders = {decoder: decoder.find(query) for decoder in able}

    def best(self, executor: ExecutorView, estimate: CostEstimate) -> Continuation:
        """The cheapest continuation of a prompt that is computed at ``executor``. The cost includes the delay of the
        sequences that decode there meanwhile, which weighs more at decoders."""
        if executor.role == "prefill":
            moving = self.best_elsewhere(executor, estimate.recovery)
            if moving.decoder is not None:
                return moving._replace(seconds=moving.seconds + estimate.recovery * executor.num_decoding)
        waiting = max(executor.num_decoding, executor.costs.decoding)  # on average, if few decode at this moment
        if executor.role == "decode":
            waiting *= _WEIGHT_OF_PAUSES
        return Continuation(None, estimate.recovery * waiting + self._decode_seconds(executor))

    def best_elsewhere(self, executor: ExecutorView, computing: float) -> Continuation:
        """The cheapest migration from ``executor``, where the prompt takes ``computing`` seconds."""
        best = Continuation(None, inf)
        for decoder in self._decoders:
            if decoder is not executor:
                seconds = self._move_seconds(executor, decoder, computing) + self._decode_seconds(decoder)
                if seconds < best.seconds:
                    best = Continuation(decoder, seconds)
        return best

    def has_room(self, decoder: ExecutorView | None) -> bool:
        """Whether a decoder has a row and enough blocks now."""
        if decoder not in self._decoders or decoder is None:
            return False
        return not decoder.room_seconds(self._query, self._num_blocks(decoder), self._now)

    def _num_blocks(self, decoder: ExecutorView) -> int:
        """The number of blocks that the prompt takes beside its cached blocks on the device."""
        kv = decoder.scheduler.kv
        return kv.room_for(self._query.num_tokens, self._decoders[decoder].device // kv.block_size)

    def _move_seconds(self, executor: ExecutorView, decoder: ExecutorView, computing: float) -> float:
        """Seconds from the end of the prompt until its KV and its adapter are at ``decoder``; infinite if it cannot
        fetch from ``executor``."""
        peer = executor.scheduler.recoveries.planner.endpoint
        if not decoder.scheduler.recoveries.planner.can_fetch_from(peer):
            return inf
        kv, link, num_blocks = decoder.scheduler.kv, decoder.costs.link(peer), self._num_blocks(decoder)
        # All blocks but the ones of the last chunk are fetched while later chunks are computed.
        last = min(num_blocks, kv.blocks_for(executor.scheduler.limits.max_num_batched_tokens))
        fetching = max(link.seconds(last, link.num_loading), link.seconds(num_blocks, link.num_loading) - computing)
        room = decoder.room_seconds(self._query, num_blocks, self._now)
        return fetching + room + decoder.eviction_seconds(num_blocks) + decoder.adapter_seconds(self._query)

    def _decode_seconds(self, executor: ExecutorView) -> float:
        return self._output_tokens * executor.costs.token_seconds(executor.load + executor.num_expected + 1)


def may_move(request: Request) -> bool:
    """Whether a request may migrate after its prompt, and has tokens left to decode.

    The hypotheses of a beam search stay together, and so do outputs that share blocks, once a second one has begun.
    Log-probabilities of a prompt need a prompt that is computed, not fetched.
    """
    begun = any(one.row >= 0 or one.output_token_ids for one in request.sequences[1:])
    params = request.params
    return request.max_tokens > 1 and params.beam is None and params.sampling.prompt_logprobs is None and not begun


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
        continues = AfterPrompt(request, query, executors, roles, now).best
        # By the predictions, decoders get only short or cached prompts. Other policies do not use decoders.
        allowed = [one for one in executors if one.role != "decode"] or executors
        executors = executors if isinstance(policy, LeastTimeToFirstToken) else allowed
    if len(executors) > 1:
        choice = policy(executors, query, now, continues)
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

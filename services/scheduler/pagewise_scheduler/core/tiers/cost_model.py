"""The cost of recovering KV: by computing it again, by loading it from another tier, or by both at once.

All times are in seconds. Copies are linear in the number of their blocks. The constants start from the measurements
of the executor's start, and follow the times of every step and every transfer.

Source: the costs of a transfer and of a prefill as LMCache (arXiv 2510.09665) and the vLLM paper (arXiv 2309.06180,
section 7.3) compare them, put into closed form; the split for both at once follows from setting the two equal.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, log2, sqrt
from operator import mul

from pagewise_shared.config.options import EvictionName

from pagewise_scheduler.core.memory.eviction import CostAware, EvictionPolicy, LeastRecentlyUsed
from pagewise_scheduler.core.memory.use_history import UseHistory

_LEAST_SECONDS = 1e-9
_FADE, _FADE_AT_FIRST = 0.02, 0.1
_FORGETTING, _MOST_SURPRISE = 0.99, 4.0
_RESTS = 64
_WAIT_GAIN = 0.2
_LATELY = 0.05
_SMALL_STEP_GAIN, _LEAST_SMALL_STEP = 0.3, 1e-3
SMALL_STEPS = 6
"""Work that costs no more than so many empty steps is done in one step."""


class OnlineLine:
    """A linear cost, ``constants`` · features, fitted by recursive least squares with forgetting.

    Constants never fall below zero: a cost that shrinks with its size is noise. ``scales`` bring the features to about
    1, so that the prior weighs the same in all of them.
    """

    def __init__(self, constants: tuple[float, ...], scales: tuple[float, ...]) -> None:
        self.constants = list(constants)
        self.error = 0.0
        self._scales = scales
        size = len(constants)
        self._covariance = [[1.0 if i == j else 0.0 for j in range(size)] for i in range(size)]

    def predict(self, *features: float) -> float:
        """Seconds for these features."""
        seconds: float = sum(map(mul, self.constants, features))
        return seconds

    def observe(self, seconds: float, *features: float) -> None:
        """It took so long. ``error`` follows the relative error of the predictions, 0 if they are exact."""
        predicted = self.predict(*features)
        # One hiccup of the machine must not look like the new normal: a lasting change is learned in a few
        # observations.
        seconds = min(seconds, _MOST_SURPRISE * max(predicted, 1e-3))
        self.error += 0.1 * (abs(predicted - seconds) / max(seconds, _LEAST_SECONDS) - self.error)
        scaled = [feature / scale for feature, scale in zip(features, self._scales, strict=True)]
        gains = [sum(map(mul, row, scaled)) for row in self._covariance]
        weight = _FORGETTING + sum(map(mul, gains, scaled))
        residual, before = seconds - predicted, self.constants
        # Kept from falling below zero here, not when predicting: else the others would make up for it.
        self.constants = [
            max(0.0, constant + gain / weight * residual / scale)
            for constant, gain, scale in zip(before, gains, self._scales, strict=True)
        ]
        if abs(seconds - self.predict(*features)) > abs(residual):
            # A constant that was kept from falling below zero would have made up for others that rose: scale all of
            # them instead, by the weight of this observation beside the earlier ones.
            share = 1 - _FORGETTING / weight
            ratio = 1 + share * (seconds / predicted - 1) if predicted > 0 else 1.0
            self.constants = [constant * ratio for constant in before]
        self._forget(gains, weight)

    def _forget(self, gains: list[float], weight: float) -> None:
        """Let the covariance follow an observation, and older ones weigh less from now on."""
        covariance = self._covariance
        for row, gain in zip(covariance, gains, strict=True):
            row[:] = [(value - gain * other / weight) / _FORGETTING for value, other in zip(row, gains, strict=True)]
        trace = sum(row[i] for i, row in enumerate(covariance))
        if trace > 1e3:  # directions that nothing excites would grow for ever
            for row in covariance:
                row[:] = [value * (1e3 / trace) for value in row]


class Link(OnlineLine):
    """The cost of copies from one source: a tier below the device, or a peer. Features: lists of copies, blocks.

    ``num_loading``: blocks asked for that have not arrived. ``busy_until``: when they are predicted to be there.
    ``wait``: seconds that a load takes beside the link's own, lately: behind a step in progress, and until the next one
    begins. ``rests``: choices for which it is left alone because it has failed. ``dtype``: of copies in fewer bits.
    """

    def __init__(self, setup: float, block: float) -> None:
        super().__init__((setup, block), (1.0, 32.0))
        self._first = setup, block
        self.wait = self.busy_until = 0.0
        self.num_loading = self._num_waits = 0
        self.rests, self.dtype = 0, ""

    def seconds(self, num_blocks: int, queued_blocks: int = 0) -> float:
        """Copying blocks behind ``queued_blocks`` others."""
        return self.wait + self.predict(1, num_blocks + queued_blocks) if num_blocks > 0 else 0.0

    def blocks_in(self, seconds: float) -> int:
        """How many blocks it copies in that time."""
        return int(max(0.0, seconds) / max(_LEAST_SECONDS, self.predict(0, 1)))

    def asked(self, num_blocks: int, now: float) -> float:
        """Blocks are requested from the link. Returns the seconds for which they are predicted to occupy it."""
        seconds = self.predict(1, num_blocks)
        self.num_loading += num_blocks
        self.busy_until = max(self.busy_until, now) + seconds
        return seconds

    def done(self, num_blocks: int, predicted: float, seconds: float) -> None:
        """A list of blocks has arrived. ``predicted``: the sum of the times that ``asked`` returned for it.
        ``seconds``: how long it has occupied the link; 0 if that is unknown."""
        self.num_loading -= num_blocks
        if not self.num_loading:
            self.busy_until = 0.0
        elif seconds:
            self.busy_until += seconds - predicted

    def waited(self, seconds: float, least: float) -> None:
        """Learn the wait of a load beside the time of its link, in seconds; ``least``: an expected wait."""
        most = _MOST_SURPRISE * max(self.wait, least)
        self._num_waits += 1
        self.wait += max(_WAIT_GAIN, 1 / self._num_waits) * (min(max(0.0, seconds), most) - self.wait)

    def passed_over(self) -> None:
        """It is not used, so nothing is learned of it: bad experience with it fades."""
        self.wait -= _FADE * self.wait
        for index, first in enumerate(self._first):
            self.constants[index] += _FADE * min(0.0, first - self.constants[index])

    def failed(self) -> None:
        """A list that was asked for did not come."""
        self.rests = _RESTS


def together(blocks: Mapping[Link, int], queued: Callable[[Link], int] = lambda link: 0) -> tuple[Link, int]:
    """A link equivalent to several links that transfer ``blocks`` at the same time, and how many blocks are queued
    there.

    ``queued``: returns the number of blocks queued at each.
    """
    if len(blocks) == 1:
        (link,) = blocks
        return link, queued(link)
    block = max(link.predict(0, count) for link, count in blocks.items()) / sum(blocks.values())
    one = Link(max(link.predict(1, 0) for link in blocks), block)
    one.wait = max(link.wait for link in blocks)
    one.busy_until = max(link.busy_until for link in blocks)
    one.num_loading = sum(link.num_loading for link in blocks)
    return one, round(max(link.predict(0, queued(link)) for link in blocks) / max(block, _LEAST_SECONDS))


@dataclass(slots=True, frozen=True)
class CopyCosts:
    """Constants of copies between the device and a tier below it, in seconds.

    Fields:
        load_setup, load_block: of a list of copies from there, and of each block in it. store_setup, store_block: of
            a list of copies to there, and of each block in it.
    """

    load_setup: float = 1e-4
    load_block: float = 1e-4
    store_setup: float = 1e-4
    store_block: float = 1e-4


@dataclass(slots=True, frozen=True)
class TierCosts:
    """The costs of copies between the device and a tier below it: ``load`` from there, ``store`` to there."""

    load: Link
    store: OnlineLine


def _begin_with(of: CopyCosts) -> TierCosts:
    """Lines with these constants, until blocks have been copied."""
    return TierCosts(Link(of.load_setup, of.load_block), OnlineLine((of.store_setup, of.store_block), (1.0, 32.0)))


Eviction = EvictionName | EvictionPolicy | UseHistory
"""An eviction policy: its name, an object, or a history that executors share, for the policy by cost."""


@dataclass(slots=True, frozen=True)
class Costs:
    """Constants of one executor, in seconds.

    Fields:
        step: of any step. token: of computing one more. attention: of one token attending to one. context: of each
            token before the end of a chunk, which the chunk reads once.
        tiers: of copies between the device and the tiers below it, by their numbers; ``CopyCosts()`` for tiers that are
            not in it. fetch_setup, fetch_block: of a list of copies from another executor, and of each block in it.
    """

    step: float = 2e-3
    token: float = 1e-4
    attention: float = 1e-9
    context: float = 0.0
    tiers: Mapping[int, CopyCosts] = field(default_factory=dict)
    fetch_setup: float = 2e-3
    fetch_block: float = 1e-3

    def of_tier(self, number: int) -> CopyCosts:
        """Of copies between the device and a tier below it."""
        return self.tiers.get(number, CopyCosts())


@dataclass(slots=True, frozen=True)
class RecoveryEstimate:
    """Predicted seconds of each method to recover a span.

    ``after``: of the step that follows a load and computes the tokens behind it, which recomputing takes along.
    ``split``: tokens that are computed from the front in ``both``.
    """

    load: float
    recompute: float
    both: float
    after: float = 0.0
    split: int = 0

    @property
    def by_method(self) -> dict[str, float]:
        """The seconds of each method by its name."""
        return {"load": self.load, "recompute": self.recompute, "both": self.both}


class CostModel:
    """Predicts, and learns from the measured times.

    ``chunk``: tokens of one prefill chunk, the step's budget. ``block_size``: tokens per block. ``tiers``: the costs
    of copies between the device and each tier below it cost, by its number, the nearest first; ``peers``: the links
    to peers by endpoint, made when ``link`` is asked. ``both_bias``: how much longer recovering from both ends takes
    than the two by themselves would. ``small_step``: the seconds of a step that computes no more than a block, lately.
    ``decoding``: the sequences that have decoded in a step, and ``token``: the seconds between two of their tokens,
    both lately. ``first``: the costs with which it begins.
    """

    def __init__(self, costs: Costs, block_size: int, chunk: int, tiers: Iterable[int] = ()) -> None:
        self.block_size, self.first = block_size, costs
        self._chunk = chunk
        constants = (costs.step, costs.token, costs.attention, costs.context)
        self.prefill = OnlineLine(constants, (1.0, 256.0, 256.0 * 512.0, 1024.0))
        self._first_fetch = costs.fetch_setup, costs.fetch_block
        self.tiers = {number: _begin_with(costs.of_tier(number)) for number in sorted(tiers)}
        self.peers: dict[str, Link] = {}
        self.both_bias, self._num_both = 1.0, 0
        self.decoding, self.token = 1.0, costs.step
        self.small_step = costs.step

    def computed(self, seconds: float, num_tokens: int, attention: float, context: float) -> None:
        """A step with chunks took so long. ``num_tokens``, ``attention``, ``context``: as ``features`` has them."""
        self.prefill.observe(seconds, 1, num_tokens, attention, context)
        if num_tokens <= self.block_size:
            # Bounded, because after one step that waited for another process all recoveries would recompute from then
            # on, and few steps that could correct it follow them.
            seconds = min(seconds, 4 * max(self.small_step, _LEAST_SMALL_STEP))
            self.small_step += _SMALL_STEP_GAIN * (seconds - self.small_step)

    def decoded(self, num_sequences: int, seconds: float) -> None:
        """A step in which so many sequences decoded took so long."""
        self.decoding += _LATELY * (num_sequences - self.decoding)
        self.token += _LATELY * (seconds - self.token)

    def token_seconds(self, num_sequences: int) -> float:
        """Between two tokens of each of ``num_sequences`` that decode: a step of none, and for each the time that it
        adds lately."""
        step = min(self.prefill.constants[0], self.token)
        return step + (self.token - step) * num_sequences / max(1.0, self.decoding)

    def compute_seconds(self, start: int, count: int, share: float = 1.0) -> float:
        """Computing tokens ``start`` to ``start + count`` when they get ``share`` of each step's budget."""
        if count <= 0:
            return 0.0
        steps, tokens, pairs, context = self.features(start, count, share)
        of_step, of_token, of_pair, of_context = self.prefill.constants
        return of_step * steps + of_token * tokens + of_pair * pairs + of_context * context

    def features(self, start: int, count: int, share: float = 1.0) -> tuple[float, float, float, float]:
        """The features of ``prefill`` for that work: steps, tokens, pairs that attend, and context of the chunks."""
        chunk = max(1, int(self._chunk * share))
        steps = -(-count // chunk)
        pairs = start * count + count * count / 2
        return steps, count, pairs, steps * (start + (count + min(chunk, count)) / 2)

    def link(self, peer: str) -> Link:
        """The link to a peer, by its endpoint."""
        found = self.peers.get(peer)
        if found is None:
            found = self.peers[peer] = Link(*self._first_fetch)
        return found

    def forget_link(self, peer: str) -> None:
        """The peer is gone for good."""
        self.peers.pop(peer, None)

    def link_below(self, tier: int) -> Link | None:
        """The link from the next tier further down, which takes over the blocks that ``tier`` gives up; None: there is
        none."""
        return next((costs.load for number, costs in self.tiers.items() if number > tier), None)

    def load_waited(self, link: Link, seconds: float) -> None:
        """Learn the wait of a load beside the time of its link, in seconds."""
        link.waited(seconds, self.prefill.predict(1, self._chunk, 0, 0))

    def estimate(
        self,
        start: int,
        num_blocks: int,
        link: Link,
        queued_blocks: int = 0,
        share: float = 1.0,
        gap: int = 0,
    ) -> RecoveryEstimate:
        """The ways to get blocks back that follow ``start`` tokens on the device: first ``gap`` that lie nowhere and
        have to be computed, then ``num_blocks`` that ``link`` can bring."""
        tokens = (gap + num_blocks) * self.block_size
        missing = self.compute_seconds(start, gap * self.block_size, share)
        load = max(missing, link.seconds(num_blocks, queued_blocks))
        recompute = self.compute_seconds(start, tokens, share)
        ahead = link.predict(0, queued_blocks)
        split = max(gap * self.block_size, self.split(start, tokens, link, ahead, share))
        compute = self.compute_seconds(start, split, share)
        empty_step = self.compute_seconds(start, 1)
        # The front advances by half of the rest in each step until the rest is small: that many steps more.
        halvings = max(0.0, log2(compute / (SMALL_STEPS * empty_step))) if empty_step > 0 < compute else 0.0
        both = self.both_bias * max(
            compute + halvings * empty_step,
            link.seconds(gap + num_blocks - split // self.block_size, queued_blocks),
        )
        # The line follows large chunks. The host takes as long to launch the kernels of a small one.
        after = max(self.small_step, self.compute_seconds(start + tokens, 1))
        return RecoveryEstimate(load, recompute, both, after, split)

    def both_took(self, seconds: float, predicted: float) -> None:
        """Recovering from both ends took so long: compute and copies may slow each other down."""
        self._num_both += 1
        ratio = self.both_bias * seconds / max(predicted, _LEAST_SECONDS)
        self.both_bias += 0.3 * (min(4.0, max(0.5, ratio)) - self.both_bias)

    def both_passed_over(self) -> None:
        """Another way was chosen: bad experience with both ends fades, so that they get another try; the sooner,
        the fewer tries there were."""
        fade = max(_FADE, _FADE_AT_FIRST / max(1, self._num_both))
        self.both_bias += fade * (1.0 - self.both_bias)

    def split(self, start: int, tokens: int, link: Link, ahead: float = 0.0, share: float = 1.0) -> int:
        """Of ``tokens`` after ``start``, how many to compute from the front so that loading the others from the back
        takes as long; whole blocks. ``ahead``: seconds by which the link is busy for longer than the steps in
        flight."""
        step, token, attention, context = self.prefill.constants
        setup, block = link.constants
        per_token = block / self.block_size
        per_chunk = (step + context * (start + tokens / 2)) / max(1.0, share * self._chunk)
        linear = token + attention * start + per_chunk + per_token
        ahead += per_token * tokens + setup - step
        if linear <= 0.0 or ahead <= 0.0:
            return 0
        # attention / 2 · m² + linear · m = ahead; the stable form of the root also holds where attention is nearly 0.
        split = 2 * ahead / (linear + sqrt(linear * linear + 2 * attention * ahead))
        return min(tokens, max(0, round(split / self.block_size) * self.block_size))

    def block_seconds(self, depth: int, link: Link | None) -> tuple[float, float]:
        """Seconds that recomputing and that loading one block take whose last token is at ``depth`` blocks.

        Fixed costs of a step and of a copy list are shared by many blocks and left out.
        """
        return self._block_recompute_seconds(depth), link.predict(0, 1) if link is not None else inf

    def _block_recompute_seconds(self, depth: int) -> float:
        # Asked for every block that is evicted, so the sum over the features is written out.
        step, token, attention, context = self.prefill.constants
        size = self.block_size
        end = depth * size
        return (step + context * end) * size / self._chunk + size * (token + attention * (end - size / 2))

    def seconds_lost(self, depth: int, tier: int) -> float:
        """The cost of losing the block at ``depth`` from ``tier``, which the next one further down keeps if there is
        one."""
        recompute = self._block_recompute_seconds(depth)
        link = self.link_below(tier) if self.tiers else None
        return recompute if link is None else min(recompute, link.predict(0, 1))


def make_policy(eviction: Eviction, costs: CostModel, num_blocks: int) -> EvictionPolicy:
    """The policy for a pool of ``num_blocks``: by name, by cost with a shared history, or the given object."""
    if eviction == "lru":
        return LeastRecentlyUsed()
    if eviction == "cost" or isinstance(eviction, UseHistory):
        history = eviction if isinstance(eviction, UseHistory) else UseHistory()
        history.serve(num_blocks)
        return CostAware(costs.seconds_lost, history)
    return eviction

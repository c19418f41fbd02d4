"""What copies of blocks between tiers cost: linear in their number, and learned from every copy. Times are in
seconds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import mul

_FORGETTING = 0.99
_LEAST_SECONDS = 1e-9
_MOST_SURPRISE = 4.0
_FADE = 0.02
_RESTS = 64
_WAIT_GAIN = 0.2


class OnlineLine:
    """A linear cost, ``constants`` · features, fitted by recursive least squares with forgetting.

    Constants never fall below zero: a cost that shrinks with its size is noise. ``scales`` bring the features to about
    1, so that the prior weighs the same in all of them.
    """

    __slots__ = ("_covariance", "_scales", "constants", "error")

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
        # One hiccup of the machine must not look like the new normal: what lasts is learned in a few observations.
        seconds = min(seconds, _MOST_SURPRISE * max(predicted, 1e-3))
        self.error += 0.1 * (abs(predicted - seconds) / max(seconds, _LEAST_SECONDS) - self.error)
        scaled = [feature / scale for feature, scale in zip(features, self._scales, strict=True)]
        covariance = self._covariance
        gains = [sum(map(mul, row, scaled)) for row in covariance]
        weight = _FORGETTING + sum(map(mul, gains, scaled))
        residual, before = seconds - predicted, self.constants
        # Kept from falling below zero here, not when predicting: else the others would make up for it.
        self.constants = [
            max(0.0, constant + gain / weight * residual / scale)
            for constant, gain, scale in zip(before, gains, self._scales, strict=True)
        ]
        if abs(seconds - self.predict(*features)) > abs(residual):
            # What was kept from falling below zero would have made up for others that rose: scale all of them instead,
            # by as much as this observation tells beside those before it.
            told = 1 - _FORGETTING / weight
            ratio = 1 + told * (seconds / predicted - 1) if predicted > 0 else 1.0
            self.constants = [constant * ratio for constant in before]
        for row, gain in zip(covariance, gains, strict=True):
            row[:] = [(value - gain * other / weight) / _FORGETTING for value, other in zip(row, gains, strict=True)]
        trace = sum(row[i] for i, row in enumerate(covariance))
        if trace > 1e3:  # directions that nothing excites would grow for ever
            for row in covariance:
                row[:] = [value * (1e3 / trace) for value in row]


class Link(OnlineLine):
    """What copies from one place cost: from a tier below the device, or from a peer. Features: lists of copies, blocks.

    ``num_loading``: blocks asked for that have not arrived. ``busy_until``: when they are predicted to be there.
    ``wait``: seconds that a load takes beside the link's own, lately: behind a step in progress, and until the next one
    begins. ``rests``: choices for which it is left alone because it has failed.
    """

    __slots__ = ("_first", "_num_waits", "busy_until", "num_loading", "rests", "wait")

    def __init__(self, setup: float, block: float) -> None:
        super().__init__((setup, block), (1.0, 32.0))
        self._first = setup, block
        self.wait = self.busy_until = 0.0
        self.num_loading = self._num_waits = 0
        self.rests = 0

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
        """A list of blocks has arrived. ``predicted``: the sum of what ``asked`` returned for it. ``seconds``: how long
        it has occupied the link; 0 if that is unknown."""
        self.num_loading -= num_blocks
        if not self.num_loading:
            self.busy_until = 0.0
        elif seconds:
            self.busy_until += seconds - predicted

    def waited(self, seconds: float, least: float) -> None:
        """A load has taken so much longer than the link itself; ``least``: what is no surprise."""
        most = _MOST_SURPRISE * max(self.wait, least)
        self._num_waits += 1
        self.wait += max(_WAIT_GAIN, 1 / self._num_waits) * (min(max(0.0, seconds), most) - self.wait)

    def passed_over(self) -> None:
        """It is not used, so nothing is learned of it: what is believed against it fades."""
        self.wait -= _FADE * self.wait
        for index, first in enumerate(self._first):
            self.constants[index] += _FADE * min(0.0, first - self.constants[index])

    def failed(self) -> None:
        """What was asked for did not come."""
        self.rests = _RESTS


def together(blocks: Mapping[Link, int], queued: Callable[[Link], int] = lambda link: 0) -> tuple[Link, int]:
    """A link that stands for several which bring ``blocks`` at the same time, and how many blocks are queued there.

    ``queued``: says how many are queued at each.
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
    """What copies between the device and a tier below it cost: ``load`` from there, ``store`` to there."""

    load: Link
    store: OnlineLine

    @classmethod
    def beginning_with(cls, costs: CopyCosts) -> "TierCosts":
        """Lines with these constants, until something has been copied."""
        return cls(
            Link(costs.load_setup, costs.load_block), OnlineLine((costs.store_setup, costs.store_block), (1.0, 32.0))
        )

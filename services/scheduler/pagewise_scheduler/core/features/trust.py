"""The weight of the hints of an API key, by the share of its earlier hints that were kept.

A life table of each key's own hints (see ``predicted_uses``) corrects hints that are early or late as a rule. It cannot
distinguish single lies from single truths, so a key could get memory for one session by telling the truth about others.
Broken hints therefore lower the values of all hints of the key, which are multiplied by its ``share``. A hint counts by
the number of blocks that it is about, because it claims the memory of these blocks.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from pagewise_scheduler.core.memory.eviction_history import key_of
from pagewise_scheduler.core.memory.predicted_uses import AwaitedUse, PredictedUses
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock

LATE, LEAST_SECONDS = 4.0, 0.5
"""A hint is kept if the session returns within so many times its seconds, which are so many at least."""
_FREE, _MOST_COUNTED = 4, 64
_MOST_CLAIMS = 256
"""Claims of one API key that wait to be judged. The oldest of more is judged early."""


@dataclass(slots=True)
class Trust:
    """The hints of one API key that were judged: their number, their blocks, and the blocks of the kept ones.
    Old ones weigh less."""

    number: float = 0.0
    blocks: float = 0.0
    kept: float = 0.0

    @property
    def share(self) -> float:
        """The factor on the values of predictions from its hints, more than 0 and at most 1.

        It is 1 as long as, weighted by blocks, at most half of the hints were broken, four of which do not count.
        """
        if not self.blocks:
            return 1.0
        return min(1.0, 2 * (self.number * self.kept / self.blocks + _FREE) / (self.number + _FREE))

    def count(self, num_blocks: int, *, kept: bool) -> None:
        """Count a hint about so many blocks."""
        if self.number >= _MOST_COUNTED:
            self.number, self.blocks, self.kept = self.number / 2, self.blocks / 2, self.kept / 2
        self.number += 1
        self.blocks += num_blocks
        self.kept += num_blocks * kept


class Claim(NamedTuple):
    """Advice that blocks, of ``session`` (0: of none), are used by ``until`` (seconds). They got ``prediction``."""

    session: int
    prediction: int
    until: float


class Hints:
    """The hints of all API keys. ``num_kept``, ``num_broken``: how many were judged so far."""

    def __init__(self, predicted: PredictedUses) -> None:
        self._predicted = predicted
        self._trust: defaultdict[str, Trust] = defaultdict(Trust)
        self._ends: defaultdict[str, Trust] = defaultdict(Trust)
        self._claims: defaultdict[str, dict[AwaitedUse, Claim]] = defaultdict(dict)
        self.num_kept = self.num_broken = 0

    def time(self, key: str, seconds: float) -> tuple[int, float]:
        """The prediction from a hint that a session returns after so many seconds, and after how many it is broken."""
        seconds = max(seconds, LEAST_SECONDS)
        return self._predicted.time(self._source(key), seconds), LATE * seconds

    def believes_ends(self, key: str) -> bool:
        """Whether most ends that a key has announced were kept."""
        return self._ends[key].share == 1

    def count(self, key: str, num_blocks: int, *, ends: bool, kept: bool) -> None:
        """A hint about so many blocks was kept or broken.

        ``ends``: that a session has ended. Ends count on their own: times may be wrong while ends are right.
        """
        (self._ends if ends else self._trust)[key].count(num_blocks, kept=kept)
        self._source(key)
        self.num_kept += kept
        self.num_broken += not kept

    def claim(self, key: str, last: CachedBlock, claim: Claim) -> None:
        """Judge advice of a key on the blocks up to ``last`` when its time is over. Advice on the same blocks does not
        put that off."""
        claims, use = self._claims[key], AwaitedUse(key, last.depth, key_of(last))
        if (before := claims.pop(use, None)) is not None:
            if use in self._predicted.awaited:
                claim = claim._replace(until=min(claim.until, before.until))
            else:
                self.count(key, use.depth, ends=False, kept=True)
        elif len(claims) >= _MOST_CLAIMS:
            self._judge(next(iter(claims)))
        claims[use] = claim
        self._predicted.awaited.add(use)

    def begun_elsewhere(self, key: str, session: int) -> None:
        """Another executor uses the blocks of a session for which advice of a key waits here."""
        self._predicted.awaited -= {use for use, claim in self._claims[key].items() if claim.session == session}

    def over(self, now: float) -> list[Claim]:
        """Judge, and return, the claims whose time is over."""
        late = [use for claims in self._claims.values() for use, claim in claims.items() if claim.until < now]
        return [self._judge(use) for use in late]

    def _judge(self, use: AwaitedUse) -> Claim:
        self.count(use.key, use.depth, ends=False, kept=use not in self._predicted.awaited)
        self._predicted.awaited.discard(use)
        return self._claims[use.key].pop(use)

    def clear(self) -> None:
        """Forget the claims that wait to be judged."""
        self._claims.clear()
        self._predicted.awaited.clear()

    def _source(self, key: str) -> int:
        """The source of predictions from hints of a key."""
        source = self._predicted.hints_of(key)
        self._predicted.charge(source, self._trust[key].share)
        return source

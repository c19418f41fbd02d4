"""What a scheduler has done so far, as sums: anybody's part of it is the difference between two moments."""

from collections import Counter, deque

from pagewise_scheduler.core.memory.losses import RequestRef
from pagewise_scheduler.core.requests.timeline import SHARED_CAUSES, PrefillShare, Sums, WaitCause
from pagewise_scheduler.core.scheduling.step import Chunks

_STEPS_IN_FLIGHT = 2
_NAMED = 3


class Activity:
    """Told once for each step that is planned, whatever its size; see ``Sums``."""

    __slots__ = ("_cause", "_chunks", "_since", "_waited", "prefill_tokens", "steps")

    def __init__(self) -> None:
        self.steps = self.prefill_tokens = 0
        self._waited = dict.fromkeys(SHARED_CAUSES, 0.0)
        self._cause: WaitCause | None = None
        self._since = 0.0
        # Of steps that may be in flight: the number of each, who, and how many tokens.
        self._chunks: deque[tuple[int, list[PrefillShare]]] = deque(maxlen=_STEPS_IN_FLIGHT)

    def planned(self, num_decoding: int, chunks: Chunks, cause: WaitCause | None, now: float) -> None:
        """A step computes ``chunks``, and a token of ``num_decoding`` sequences; there is none if it has neither.
        ``cause``: what those who still wait do so for; None: nobody does."""
        if chunks:
            self.steps += 1
            for one, size in chunks:
                self.prefill_tokens += size
                one.request.owner.timeline.computes(size, now)
            self._chunks.append((self.steps, [PrefillShare(one.request.owner.ref, size) for one, size in chunks]))
        elif num_decoding:
            self.steps += 1
        if self._cause is not None and now > self._since:
            self._waited[self._cause] += now - self._since
        self._cause, self._since = cause, now

    def sums(self, now: float) -> Sums:
        """What was done up to ``now``."""
        if self._cause is not None and now > self._since:
            self._waited[self._cause] += now - self._since
            self._since = now
        return Sums(self.steps, self.prefill_tokens, tuple(self._waited.values()))

    def ahead(self) -> tuple[PrefillShare, ...]:
        """Whose prompts the last steps compute, the largest first, a few of them."""
        tokens = Counter[RequestRef]()
        for step, shares in self._chunks:
            for share in shares if step > self.steps - _STEPS_IN_FLIGHT else ():
                tokens[share.request] += share.tokens
        return tuple(PrefillShare(*one) for one in tokens.most_common(_NAMED))

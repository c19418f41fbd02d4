"""Drafts by prompt lookup: copies of the tokens that followed the last tokens of a sequence earlier on.

The scheduler has the tokens, and allocates the blocks. But it plans a step before the step in flight is back, and a
draft has to continue tokens that are known. So where a draft is in sight (the last known tokens occurred before), the
next plan waits for the step in flight, which costs a round trip between executor and scheduler per step. That pays
where few sequences run and drafts are right: with more sequences than ``disable_by_batch_size`` nothing is drafted, and
a sequence whose drafts are wrong pauses. The alternative is looking up in the executor, which knows the tokens first.
Two steps would stay in flight, but the scheduler could plan neither a row's blocks nor its end.
"""

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagewise_shared.config.speculative import SpeculativeConfig
from pagewise_shared.segments import TOKEN_ID

from pagewise_scheduler.core.requests.request import RequestSequence

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.decode_set import DecodeSet
    from pagewise_scheduler.core.scheduling.step import Drafts, StepInFlight

_WINDOW = 16_384
"""The number of a sequence's last tokens in which drafts are looked up, which takes some tens of microseconds."""
_LONGEST_PAUSE = 64
_TOKEN_BYTES = 4
_MOST_UNALIGNED = 64
"""The most matches at unaligned bytes before a look-up is given up: a prompt could be made of such matches."""
_TOKEN_IDS = int.from_bytes(TOKEN_ID.to_bytes(_TOKEN_BYTES, "little") * _WINDOW, "little")


class PromptLookup:
    """Looks drafts up for the members of ``decoding``; a ``Drafter``.

    ``most``: returns the most tokens of a draft for a sequence.
    """

    ahead = 0

    def __init__(
        self, config: SpeculativeConfig, decoding: "DecodeSet", most: Callable[[RequestSequence], int]
    ) -> None:
        self._config, self._decoding, self._most = config, decoding, most
        self.most_tokens, self.most_running = config.num_speculative_tokens, float(config.disable_by_batch_size)
        self._awaited: RequestSequence | None = None

    def waits(self) -> bool:
        """Whether a draft is in sight."""
        in_sight = (sequence for sequence in self._decoding.order() if self.draft(sequence, self._most(sequence)))
        self._awaited = next(in_sight, None)
        return self._awaited is not None

    def begin_plan(self, now: float) -> None:
        """Nothing is to be done."""

    def draft(self, sequence: RequestSequence, most: int) -> "array[int]":
        """At most ``most`` tokens that followed the last tokens of a sequence earlier on, up to a stop token."""
        config, stop = self._config, sequence.num_tokens
        if most <= 0:
            return array("i")
        tokens = sequence.tokens_between(max(0, stop - _WINDOW), stop)
        if sequence.request.segments:  # remove their marks; as one number this takes a tenth of a millisecond
            tokens = (int.from_bytes(tokens, "little") & _TOKEN_IDS).to_bytes(len(tokens), "little")
        found = look_up(tokens, config.prompt_lookup_min, config.prompt_lookup_max, most)
        if not sequence.stop_ids.isdisjoint(found):
            del found[next(index for index, token in enumerate(found) if token in sequence.stop_ids) :]
        if not found:
            sequence.draft_after = stop + 1  # do not look up the same tokens again
        return found

    def drafted(self, drafts: "Drafts") -> None:
        """Let the sequence pause for whose draft planning waited, if it has none."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None and awaited not in drafts:
            _pause(awaited)

    def planned(self, most_verified: int) -> None:
        """Nothing is to be done."""

    def returned(self, step: "StepInFlight") -> None:
        """Nothing is to be done."""

    def verified(self, sequence: RequestSequence, drafted: int, accepted: int) -> None:
        """Let a sequence pause whose draft was wrong altogether."""
        if accepted:
            sequence.draft_pause = 0
        else:
            _pause(sequence)

    def release(self, sequence: RequestSequence) -> None:
        """Nothing is to be done."""

    def clear(self) -> None:
        """Nothing is to be done."""


def _pause(sequence: RequestSequence) -> None:
    """Let a sequence take tokens without drafts: twice as many as after its last wrong draft. One is in flight."""
    sequence.draft_pause = min(_LONGEST_PAUSE, 2 * sequence.draft_pause + 1)
    sequence.draft_after = sequence.num_tokens + 1 + sequence.draft_pause


def look_up(tokens: bytes, shortest: int, longest: int, count: int) -> "array[int]":
    """The ``count`` tokens that followed the last earlier occurrence of the end of ``tokens`` (int32 bytes); none if
    there is none.

    The end is as long as possible: at most ``longest`` tokens, and at least ``shortest``. If the earlier occurrence
    overlaps the end, the tokens between the two repeat.
    """
    end = len(tokens)
    after, stop = 0, end - 1
    for size in range(_TOKEN_BYTES * shortest, min(_TOKEN_BYTES * longest, end - 1) + 1, _TOKEN_BYTES):
        if (place := _last_place(tokens, size, stop)) < 0:
            break
        after = stop = place + size  # a longer end cannot occur later than a shorter one
    if not after:
        return array("i")
    followed = array("i", tokens[after : after + _TOKEN_BYTES * count])
    period = (end - after) // _TOKEN_BYTES
    while len(followed) < count:
        followed.append(followed[len(followed) - period])
    return followed


def _last_place(tokens: bytes, size: int, stop: int) -> int:
    """The byte where the last ``size`` bytes of ``tokens`` occurred last before byte ``stop``; -1: nowhere."""
    tail = tokens[len(tokens) - size :]
    for _ in range(_MOST_UNALIGNED):
        place = tokens.rfind(tail, 0, stop)
        if place < 0 or not place % _TOKEN_BYTES:
            return place
        stop = place + size - 1  # the match is not aligned to tokens
    return -1

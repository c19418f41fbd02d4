"""Drafts by a draft model of the executor, which proposes them behind a step, in the step's result.

The draft model takes the prompt of a sequence, chunk by chunk, if drafts are expected to pay when the sequence begins.
Behind decodes it takes the tokens of sequences that are drafted for. A sequence for which drafts do not pay is taken
for a few steps more, and is then left alone, because a pass of the draft model costs time even if it drafts nothing.
Its KV there has gaps, by which later drafts become worse, and no output wrong.

While a step proposes drafts, the next plan waits for its result. While none does, two steps are in flight.
"""

from array import array
from typing import TYPE_CHECKING

from pagewise_scheduler.core.drafting.draft_lengths import Acceptance, DraftLengths, StepSize
from pagewise_scheduler.core.drafting.drafter import Most
from pagewise_scheduler.core.requests.request import RequestSequence

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler
    from pagewise_scheduler.core.scheduling.step import Drafts, StepInFlight

_GRACE = 8
"""Steps without a draft in which the draft model still takes the tokens of a sequence."""


class ModelDrafts:
    """Asks for proposals of up to ``most_tokens`` tokens, and makes drafts of them; a ``Drafter``."""

    def __init__(self, scheduler: "Scheduler", most_tokens: int, most_running: int, most_of: Most) -> None:
        self._scheduler, self._most_of = scheduler, most_of
        self.most_tokens, self.most_running = most_tokens, most_running or float("inf")
        self.ahead = most_tokens - 1
        self._lengths = DraftLengths(most_tokens, scheduler.costs.first)
        self._expected: dict[RequestSequence, Acceptance | None] = {}  # None: it is not drafted for
        self._proposed: dict[RequestSequence, array[int]] = {}

    def waits(self) -> bool:
        """Whether the step in flight proposes drafts."""
        return any(count for _, count in self._scheduler.steps_in_flight[-1].proposals)

    def begin_plan(self, now: float) -> None:
        """Learn the time since the last plan."""
        self._lengths.times.planned(now, self._scheduler.num_in_flight)

    def draft(self, sequence: RequestSequence, most: int) -> "array[int]":
        """At most ``most`` tokens that the last step has proposed for a sequence, up to a stop token."""
        found = self._proposed.get(sequence, _NOTHING)[: max(0, most)]
        for index, token in enumerate(found):
            if token < 0 or token in sequence.stop_ids:
                return found[:index]
        return found

    def drafted(self, drafts: "Drafts") -> None:
        """Forget the proposals: other tokens are the last ones after this step."""
        self._proposed.clear()

    def planned(self, most_verified: int) -> None:
        """Ask for proposals: as long as pays for sequences that decode in the next step, and none for others."""
        plan, rows = self._scheduler.plan, dict(self._scheduler.plan.chunks)
        decoding, prefilling = self._scheduler.decoding.order(), list(self._scheduler.prefilling)
        if rows:
            self._begin([one for one in (*prefilling, *decoding) if one.row in rows])
        plan.proposals += [(one, 0) for one in prefilling if one.row in rows and self._expected.get(one)]
        candidates: dict[RequestSequence, tuple[Acceptance, int]] = {}
        for sequence in decoding:
            most = self._most_of(sequence, coming=1)  # or more, if the step has a draft of which tokens are right
            if most > 0 and (expected := self._expected.get(sequence)) is not None:
                candidates[sequence] = expected, most
        lengths: dict[RequestSequence, int] = {}
        if candidates and len(decoding) <= self.most_running:
            lengths = self._lengths.choose(candidates, len(decoding), most_verified)
        for sequence, (expected, _) in candidates.items():
            if sequence in lengths:
                expected.idle = 0
            else:
                expected.rest()
        plan.proposals += [
            (sequence, lengths.get(sequence, 0))
            for sequence in decoding
            if (expected := self._expected.get(sequence)) is not None
            and (sequence.row in rows or (sequence in candidates and expected.idle <= _GRACE))
        ]

    def _begin(self, computed: list[RequestSequence]) -> None:
        """Let the draft model take the prompts of sequences that begin, if drafts are expected to pay now."""
        running = self._scheduler.num_running
        for sequence in computed:
            if sequence not in self._expected:
                prompt = sequence.num_tokens - sequence.num_computed_tokens
                output = sequence.max_num_tokens - sequence.num_tokens
                pays = running <= self.most_running and self._lengths.pays(running, prompt, output)
                self._expected[sequence] = self._lengths.new() if pays else None

    def returned(self, step: "StepInFlight") -> None:
        """Keep the drafts that a step proposes, and learn its size."""
        self._proposed.clear()
        start = 0
        for sequence, count in step.proposals:
            if count:
                self._proposed[sequence] = array("i", step.proposed[start : start + count])
            start += count
        counts = [count for _, count in step.proposals]
        size = StepSize(step.num_tokens, max(max(counts, default=0), bool(counts)), sum(max(one, 1) for one in counts))
        self._lengths.times.returned(None if step.chunk_rows else size)

    def verified(self, sequence: RequestSequence, drafted: int, accepted: int) -> None:
        """Learn how many tokens of a draft were right."""
        if (expected := self._expected.get(sequence)) is not None:
            self._lengths.measure(expected, drafted, accepted)

    def release(self, sequence: RequestSequence) -> None:
        """Forget a sequence."""
        self._expected.pop(sequence, None)
        self._proposed.pop(sequence, None)

    def clear(self) -> None:
        """Forget all sequences."""
        self._expected.clear()
        self._proposed.clear()
        self._lengths.times.clear()


_NOTHING = array("i")

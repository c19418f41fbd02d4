"""Drafts by a draft model of the executor, which proposes them behind a step, in the step's result.

The draft model takes the prompt of a sequence, chunk by chunk, if drafts are expected to pay when the sequence begins.
Behind decodes it takes the tokens of sequences that are drafted for. A sequence for which drafts do not pay is taken
for a few steps more, and is then left alone, because a pass of the draft model costs time even if it drafts nothing.
Its KV there has gaps, by which later drafts become worse, and no output wrong. If the drafts of all sequences together
do not pay, the draft model rests, and plans are as without one.

While a step proposes drafts, the next plan waits for its result. While none does, two steps are in flight.
"""

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagewise_scheduler.core.drafting.draft_lengths import Acceptance, DraftLengths
from pagewise_scheduler.core.drafting.draft_trials import DraftTrials
from pagewise_scheduler.core.drafting.step_times import ChunkSize, StepSize
from pagewise_scheduler.core.requests.request import RequestSequence

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler
    from pagewise_scheduler.core.scheduling.step import Drafts, StepInFlight

_LOOKS = 16
"""One of so many steps looks for sequences that were left alone and may have a new trial."""
_LATELY = 0.05
"""The weight of an output in the expected tokens of the next ones."""


class ModelDrafts:
    """Asks for proposals of up to ``most_tokens`` tokens, and makes drafts of them; a ``Drafter``.

    ``most``: returns the most tokens that a draft for a sequence may have, given how many tokens come before it.
    ``is_draftable``: returns whether tokens of a sequence may be drafted at all.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        most_tokens: int,
        most_running: int,
        most: Callable[[RequestSequence, int], int],
        is_draftable: Callable[[RequestSequence], bool],
    ) -> None:
        self._scheduler, self._most, self._is_draftable = scheduler, most, is_draftable
        self.most_tokens, self.most_running = most_tokens, most_running or float("inf")
        self.ahead = most_tokens - 1
        self._lengths, self._trials = DraftLengths(most_tokens, scheduler.costs.first), DraftTrials()
        self._expected: dict[RequestSequence, Acceptance | None] = {}  # None: it is not drafted for
        self._taken: dict[RequestSequence, Acceptance] = {}  # sequences whose tokens the draft model takes
        self._proposed: dict[RequestSequence, array[int]] = {}
        self._accepted = self._step = 0
        self._output = float("inf")

    def waits(self) -> bool:
        """Whether the step in flight proposes drafts."""
        return any(count for _, count in self._scheduler.steps_in_flight[-1].proposals)

    def begin_plan(self, now: float) -> None:
        """Learn the time since the last plan."""
        measured = self._lengths.times.planned(now, self._scheduler.num_in_flight)
        if measured is not None and not measured.size.is_plain:
            rows = measured.size.rows
            plain = self._lengths.times.plain_seconds(rows)
            self._trials.saved((rows + self._accepted) / rows - measured.seconds / plain)
        if self._trials.resting:
            for expected in self._taken.values():
                expected.pause(self._step)
            self._taken.clear()

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
        plan = self._scheduler.plan
        self._step += 1
        if plan.chunks:
            self._begin()
        if self._taken or (not self._step % _LOOKS and not self._trials.resting):
            self._propose(most_verified)
        if plan.proposals or plan.drafts:
            self._trials.used()
        elif self._trials.rested():
            self._lengths.hope()

    def _propose(self, most_verified: int) -> None:
        scheduler, step = self._scheduler, self._step
        decoding, rows = scheduler.decoding.order(), dict(scheduler.plan.chunks)
        plain = bool(decoding) and self._lengths.times.wants_plain(len(decoding))
        candidates: dict[RequestSequence, tuple[Acceptance, int]] = {}
        if len(decoding) <= self.most_running and not plain:
            for sequence in decoding:
                expected = self._expected.get(sequence)
                # More than one token may come, if this step verifies a draft that is right.
                if expected is not None and expected.is_due(step) and (most := self._most(sequence, 1)) > 0:
                    candidates[sequence] = expected, most
        lengths = self._lengths.choose(candidates, len(decoding), most_verified) if candidates else {}
        for sequence, (expected, _) in candidates.items():
            if sequence in lengths:
                expected.chosen()
                self._taken[sequence] = expected
            else:
                expected.passed_over(step)
                if expected.paused_until is not None:
                    self._leave(sequence)
        taken = self._taken
        scheduler.plan.proposals += [(one, 0) for one in scheduler.prefilling if one.row in rows and one in taken]
        scheduler.plan.proposals += [
            (one, lengths.get(one, 0)) for one in decoding if one in taken and (one.row in rows or one in candidates)
        ]

    def _begin(self) -> None:
        """Let the draft model take the prompts of sequences that begin, if drafts are expected to pay now."""
        scheduler, times = self._scheduler, self._lengths.times
        running, rows = scheduler.num_running, {row for row, _ in scheduler.plan.chunks}
        for sequence in (*scheduler.prefilling, *scheduler.decoding.order()):
            if sequence.row not in rows or sequence in self._expected:
                continue
            prompt = sequence.num_tokens - sequence.num_computed_tokens
            output = min(sequence.max_num_tokens - sequence.num_tokens, self._output)
            may = running <= self.most_running and not self._trials.resting
            self._expected[sequence] = None
            if may and self._is_draftable(sequence) and self._lengths.pays(running, prompt, output):
                self._expected[sequence] = self._taken[sequence] = self._lengths.new()
                self._trials.took_prompt(prompt * times.prompt_token / times.plain_seconds(running))

    def returned(self, step: "StepInFlight") -> None:
        """Keep the drafts that a step proposes, and learn its size."""
        self._proposed.clear()
        self._accepted = start = 0
        for sequence, count in step.proposals:
            if count:
                self._proposed[sequence] = array("i", step.proposed[start : start + count])
            start += count
        size: StepSize | ChunkSize | None = None
        if step.chunk_rows:
            taken = sum(one.row in step.chunk_rows for one, _ in step.proposals)
            size = ChunkSize(step.num_tokens, step.num_tokens * taken // len(step.chunk_rows))
        elif step.num_seqs:
            counts = [count for _, count in step.proposals]
            passes = max([*counts, 1]) if counts else 0
            size = StepSize(step.num_seqs, step.num_draft_tokens, passes, sum(max(one, 1) for one in counts))
        self._lengths.times.returned(size)

    def verified(self, sequence: RequestSequence, drafted: int, accepted: int) -> None:
        """Learn how many tokens of a draft were right."""
        self._accepted += accepted
        if (expected := self._expected.get(sequence)) is not None:
            self._lengths.measure(expected, drafted, accepted)

    def release(self, sequence: RequestSequence) -> None:
        """Forget a sequence."""
        if sequence in self._expected:
            length = len(sequence.output_token_ids)
            self._output = length if self._output == float("inf") else self._output + _LATELY * (length - self._output)
            del self._expected[sequence]
        self._leave(sequence)
        self._proposed.pop(sequence, None)

    def _leave(self, sequence: RequestSequence) -> None:
        if sequence in self._taken:
            self._trials.ended(len(self._taken))
            del self._taken[sequence]

    def clear(self) -> None:
        """Forget all sequences."""
        self._expected.clear()
        self._taken.clear()
        self._proposed.clear()
        self._lengths.times.clear()


_NOTHING = array("i")

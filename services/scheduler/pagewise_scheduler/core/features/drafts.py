"""Speculative decoding: a plan carries drafts, which continue the known tokens of sequences that decode.

The step computes a draft like a chunk of known tokens and samples a token behind each of them. Sampling is a function
of seed and position. So a sampled token that equals the draft's is the very token that would have been sampled without
a draft, also where the temperature is above 0. The tokens up to the first different one are kept, and this one.

A ``Drafter`` makes the drafts: by prompt lookup, or by a draft model of the executor. A draft has to continue known
tokens, and only the result of a step with drafts has the number of accepted tokens of each row. So the next plan waits
while a step with drafts is in flight, and where its drafter asks for it. One step is in flight then instead of two.

Executors follow grammars through drafts. Nothing is drafted where sampling depends on more than the model and a
grammar, see ``is_draftable``, nor where a thinking budget may force a token. The KV of tokens that were not kept is
behind the last known token, where the next step overwrites it, and blocks are cached up to that token only. The
executor writes states of recurrent layers behind the tokens that are kept.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagewise_shared.config.speculative import MAX_SPECULATIVE_TOKENS
from pagewise_shared.sampling import num_accepted
from pagewise_shared.thinking import UNLIMITED

from pagewise_scheduler.core.drafting.drafter import Drafter
from pagewise_scheduler.core.drafting.model_drafts import ModelDrafts
from pagewise_scheduler.core.drafting.prompt_lookup import PromptLookup
from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.requests.request import RequestSequence, SequenceStatus
from pagewise_scheduler.core.requests.virtual_tokens import OUTPUT_WEIGHT
from pagewise_scheduler.core.tiers.transfers import Loads

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler
    from pagewise_scheduler.core.scheduling.step import StepInFlight


class Drafting(Feature):
    """Drafts for the sequences that decode on one executor: by its draft model if it has one, or else looked up.

    ``num_drafts``, ``num_draft_tokens``, ``num_accepted_tokens``: in all steps that have come back.
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        options = scheduler.features.options
        self._kv = scheduler.kv
        self._decoding = scheduler.decoding
        self._plan = scheduler.plan
        self._with_grammars = options.drafts_with_grammars
        self._drafter: Drafter
        if options.max_proposed:
            proposed, proposing = options.max_proposed, options.max_proposing
            self._drafter = ModelDrafts(scheduler, proposed, proposing, self.most, self.is_draftable)
        else:
            assert options.speculative is not None
            self._drafter = PromptLookup(options.speculative, self._decoding, self.most)
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0

    def may_plan(self) -> bool:
        in_flight = self.scheduler.steps_in_flight
        if not in_flight:
            return True
        if in_flight[-1].drafts:
            return False
        return self.scheduler.num_running > self._drafter.most_running or not self._drafter.waits()

    def add_to_plan(self, step: int, budget: int, loads: Loads) -> int:
        self._drafter.begin_plan(self._kv.eviction_history.now)
        if self.scheduler.steps_in_flight:
            return 0
        drafts, before = self._plan.drafts, budget
        if self.scheduler.num_running <= self._drafter.most_running:
            # Half of the budget is left for prefills.
            reserved = max((budget + 1) // 2, budget - self._most_verified())
            for sequence in self._decoding.order():
                found = self._drafter.draft(sequence, min(self.most(sequence), budget - reserved))
                if found and (draft := self._fitting(sequence, found)):
                    drafts[sequence] = draft
                    budget -= len(draft)
        self._drafter.drafted(drafts)
        return before - budget

    def planned(self, step: int) -> None:
        self._drafter.planned(self._most_verified())

    def verify(self, step: "StepInFlight", tokens: Sequence[int]) -> Sequence[int]:
        self._drafter.returned(step)
        if not step.drafts:
            return tokens
        offset = len(step.sampled) - len(step.completed) - step.num_draft_tokens - len(step.drafts)
        sampled, kept = step.sampled[:offset], list(tokens[:offset])
        for sequence, draft in step.drafts.items():
            drawn = tokens[offset : offset + len(draft) + 1]
            accepted = num_accepted(draft, drawn)
            offset += len(drawn)
            sampled += [sequence] * (accepted + 1)
            kept += drawn[: accepted + 1]
            if sequence.finished:
                continue
            self._count(sequence, len(draft), accepted)
            produced = len(sequence.output_token_ids) + accepted + 1
            if sequence.num_prompt_tokens + produced == sequence.run_until:
                step.ending.append(sequence)
            if sequence.status is SequenceStatus.DECODE:
                position = sequence.num_prompt_tokens + produced - 1
                self._decoding.go_on(sequence, step.step + 1, position)
        step.sampled = sampled + step.completed
        return [*kept, *tokens[offset:]]

    def _count(self, sequence: RequestSequence, drafted: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        sequence.request.account.served += OUTPUT_WEIGHT * accepted  # the decode set charges one token per step
        self._drafter.verified(sequence, drafted, accepted)

    def _most_verified(self) -> int:
        """The most draft tokens of a step: executors reserve memory for the logits of max_num_seqs tokens. Where that
        is less than the longest draft, the memory of one draft more does not matter."""
        return max(MAX_SPECULATIVE_TOKENS, self.scheduler.limits.max_num_seqs) - self.scheduler.num_running

    def most(self, sequence: RequestSequence, coming: int = 0) -> int:
        """The most tokens of a draft for a sequence when ``coming`` more tokens are known, regardless of its blocks."""
        if sequence.num_tokens < sequence.draft_after or not self.is_draftable(sequence):
            return 0
        if len(sequence.output_token_ids) < sequence.sampling.min_tokens:  # stop tokens are still forbidden
            return 0
        # Each step samples one token more than its draft has.
        left = min(sequence.run_until - sequence.num_tokens, _num_free(sequence)) - coming
        return min(self._drafter.most_tokens, left - 1)

    def is_draftable(self, sequence: RequestSequence) -> bool:
        """Whether tokens of a sequence may be drafted at all.

        Not where sampling depends on earlier tokens other than through the model: with penalties, bad words of several
        tokens, or a grammar that the executor does not follow through a draft. Not where a step returns
        log-probabilities, and not after a step with a draft of the sequence has failed.
        """
        sampling = sequence.sampling
        return not (
            sequence.draft_after >= sequence.max_num_tokens
            or sampling.logprobs is not None
            or (sampling.grammar and not self._with_grammars)
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.repetition_penalty != 1.0
            or (sampling.constraints is not None and sampling.constraints.bad_words)
        )

    def _fitting(self, sequence: RequestSequence, draft: "array[int]") -> "array[int]":
        """The part of a draft for which there are slots. Allocates further blocks only if that leaves a block for each
        decode, and the blocks that prefills have yet to take."""
        kv, table, num_tokens = self._kv, sequence.table, sequence.num_tokens
        slots = num_tokens + len(draft)
        if not kv.windows:  # states have places at ends of blocks that this step reaches alone
            slots = min(slots + self._drafter.ahead, sequence.run_until)
        if not table.blocks_missing(slots):
            return draft
        # Full blocks are cached when a sequence gets its next block. If drafts always bring the block, it is here.
        self.scheduler.cache_full_blocks(sequence, num_tokens - 1)
        held, each = len(table.blocks), kv.num_for_next
        others = each * len(self._decoding) + self.scheduler.prefilling.blocks_owed()
        missing = kv.num_to_grow(table, table.blocks_missing(slots))
        if missing and each * missing + others <= kv.num_available:
            added, copies = kv.grow(table, (held + missing) * kv.block_size)
            self._plan.copy(copies)
            self._plan.set_blocks(sequence.row, held, added)
            if kv.windows:
                ends = range(held, len(table.blocks))
                self.scheduler.prefilling.grow_windows(sequence, num_tokens - 1, table.num_slots, ends)
        return draft[: table.num_slots - num_tokens]

    def release(self, sequence: RequestSequence, in_flight_step: int | None = None) -> None:
        self._drafter.release(sequence)

    def clear(self) -> None:
        self._drafter.clear()

    def counts(self) -> dict[str, int]:
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
        }


def _num_free(sequence: RequestSequence) -> int:
    """How many of the next tokens no thinking budget can force."""
    thinking = sequence.thinking
    if thinking is None:
        return UNLIMITED
    thinking.extend(sequence.output_token_ids[thinking.num_tokens :])
    if thinking.over:
        sequence.thinking = None
    return thinking.num_free

"""Speculative decoding by prompt lookup: a draft is a copy of the tokens that followed the last tokens earlier on.

A plan carries drafts. The step computes a draft like a chunk of known tokens and samples a token behind each of them.
Sampling is a function of seed and position. So a sampled token that equals the draft's is the very token that would
have been sampled without a draft, also where the temperature is above 0. The tokens up to the first different one are
kept, and this one.

The scheduler drafts, because it has the tokens and allocates the blocks. But it plans a step before the step in flight
is back, and a draft has to continue tokens that are known. So where a draft is in sight (the last known tokens occurred
before), the next plan waits for the step in flight. It also waits while a step with drafts is in flight, because only
the result has the number of accepted tokens of each row. One step is in flight then instead of two, which costs a round
trip between executor and scheduler per step. That pays where few sequences run and drafts are right: above
``disable_by_batch_size`` running sequences nothing is drafted, and a sequence whose drafts are wrong pauses. The
alternative is drafting in the executor, which knows the tokens first. Two steps would stay in flight, but the scheduler
could plan neither a row's blocks nor its end.

Nothing is drafted where sampling depends on more than the model, see ``is_draftable``, nor where a thinking budget may
force a token. The KV of tokens that were not kept is behind the last known token, where the next step overwrites it,
and blocks are cached up to that token only. The executor writes states of recurrent layers behind the tokens that are
kept.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagewise_shared.config.speculative import MAX_SPECULATIVE_TOKENS
from pagewise_shared.sampling import num_accepted
from pagewise_shared.segments import TOKEN_ID
from pagewise_shared.thinking import UNLIMITED

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.requests.request import RequestSequence, SequenceStatus
from pagewise_scheduler.core.requests.virtual_tokens import OUTPUT_WEIGHT
from pagewise_scheduler.core.tiers.transfers import Loads

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler
    from pagewise_scheduler.core.scheduling.step import StepInFlight

_WINDOW = 16_384
"""The number of a sequence's last tokens in which drafts are looked up, which takes some tens of microseconds."""
_LONGEST_PAUSE = 64
_TOKEN_BYTES = 4
_MOST_UNALIGNED = 64
"""The most matches at unaligned bytes before a look-up is given up: a prompt could be made of such matches."""
_TOKEN_IDS = int.from_bytes(TOKEN_ID.to_bytes(_TOKEN_BYTES, "little") * _WINDOW, "little")


class Drafting(Feature):
    """Drafts for the sequences that decode on one executor.

    ``num_drafts``, ``num_draft_tokens``, ``num_accepted_tokens``: in all steps that have come back.
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        assert scheduler.features.options.speculative is not None
        self._config = scheduler.features.options.speculative
        self._kv = scheduler.kv
        self._decoding = scheduler.decoding
        self._plan = scheduler.plan
        self._awaited: RequestSequence | None = None
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0

    def may_plan(self) -> bool:
        in_flight = self.scheduler.steps_in_flight
        if not in_flight:
            return True
        if in_flight[-1].drafts:
            return False
        if self.scheduler.num_running > self._config.disable_by_batch_size:
            return True
        in_sight = (sequence for sequence in self._decoding.order() if self._found(sequence, self._most(sequence)))
        self._awaited = next(in_sight, None)
        return self._awaited is None

    def add_to_plan(self, step: int, budget: int, loads: Loads) -> int:
        if self.scheduler.steps_in_flight:
            return 0
        awaited, self._awaited = self._awaited, None
        if (running := self.scheduler.num_running) > self._config.disable_by_batch_size:
            return 0
        drafts, before = self._plan.drafts, budget
        # Half of the budget is left for prefills. And executors reserve memory for the logits of max_num_seqs tokens;
        # where that is less than the longest draft, the memory of one draft more does not matter.
        most = max(MAX_SPECULATIVE_TOKENS, self.scheduler.limits.max_num_seqs) - running
        reserved = max((budget + 1) // 2, budget - most)
        for sequence in self._decoding.order():
            found = self._found(sequence, min(self._most(sequence), budget - reserved))
            if found and (draft := self._fitting(sequence, found)):
                drafts[sequence] = draft
                budget -= len(draft)
        if awaited is not None and awaited not in drafts:
            _pause(awaited)  # planning waited for a draft that was not made
        return before - budget

    def verify(self, step: "StepInFlight", tokens: Sequence[int]) -> Sequence[int]:
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
        if accepted:
            sequence.draft_pause = 0
        else:
            _pause(sequence)

    def _most(self, sequence: RequestSequence) -> int:
        """The most tokens of a draft for a sequence, regardless of its blocks."""
        if sequence.num_tokens < sequence.draft_after or not is_draftable(sequence):
            return 0
        # Each step samples one token more than its draft has.
        left = min(sequence.run_until - sequence.num_tokens, _num_free(sequence))
        return min(self._config.num_speculative_tokens, left - 1)

    def _found(self, sequence: RequestSequence, most: int) -> "array[int]":
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

    def _fitting(self, sequence: RequestSequence, draft: "array[int]") -> "array[int]":
        """The part of a draft for which there are slots. Allocates further blocks only if that leaves a block for each
        decode, and the blocks that prefills have yet to take."""
        kv, table, num_tokens = self._kv, sequence.table, sequence.num_tokens
        if not table.blocks_missing(num_tokens + len(draft)):
            return draft
        # Full blocks are cached when a sequence gets its next block. If drafts always bring the block, it is here.
        self.scheduler.cache_full_blocks(sequence, num_tokens - 1)
        held, each = len(table.blocks), kv.num_for_next
        others = each * len(self._decoding) + self.scheduler.prefilling.blocks_owed()
        missing = kv.num_to_grow(table, table.blocks_missing(num_tokens + len(draft)))
        if missing and each * missing + others <= kv.num_available:
            added, copies = kv.grow(table, (held + missing) * kv.block_size)
            self._plan.copy(copies)
            self._plan.set_blocks(sequence.row, held, added)
            if kv.windows:
                ends = range(held, len(table.blocks))
                self.scheduler.prefilling.grow_windows(sequence, num_tokens - 1, table.num_slots, ends)
        return draft[: table.num_slots - num_tokens]

    def counts(self) -> dict[str, int]:
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
        }


def _pause(sequence: RequestSequence) -> None:
    """Let a sequence take tokens without drafts: twice as many as after its last wrong draft. One is in flight."""
    sequence.draft_pause = min(_LONGEST_PAUSE, 2 * sequence.draft_pause + 1)
    sequence.draft_after = sequence.num_tokens + 1 + sequence.draft_pause


def _num_free(sequence: RequestSequence) -> int:
    """How many of the next tokens no thinking budget can force."""
    thinking = sequence.thinking
    if thinking is None:
        return UNLIMITED
    thinking.extend(sequence.output_token_ids[thinking.num_tokens :])
    if thinking.over:
        sequence.thinking = None
    return thinking.num_free


def is_draftable(sequence: RequestSequence) -> bool:
    """Whether tokens of a sequence may be drafted.

    Not where sampling depends on earlier tokens other than through the model: with penalties, bad words of several
    tokens, a grammar, or stop tokens that ``min_tokens`` still forbids. And not where a step returns log-probabilities.
    """
    sampling = sequence.sampling
    return not (
        sampling.logprobs is not None
        or sampling.grammar
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or (sampling.constraints is not None and sampling.constraints.bad_words)
        or len(sequence.output_token_ids) < sampling.min_tokens
    )


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

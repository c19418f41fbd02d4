"""Beam searches: their outputs are chosen among several hypotheses at the end, and no token is sent before.

Hypotheses run one token at a time. When all hypotheses of a request have come back, each one that continues takes over
or forks the blocks of its parent, and the others free theirs.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from pagewise_shared.protocol import TokenLogprobs, unpack_float32s, unpack_int32s
from pagewise_shared.sampling import BeamParams

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.memory.block_table import BlockTable
from pagewise_scheduler.core.requests.request import FinishReason, Request, RequestSequence

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler
    from pagewise_scheduler.core.scheduling.step import StepOutput

_FORBIDDEN = float("-inf")
"""The log-probability of a token that the grammar does not allow."""


@dataclass(slots=True, frozen=True)
class Continuation:
    """A living hypothesis: the hypothesis ``parent`` of the step before, and ``token``. ``score``: log-probability."""

    parent: int
    token: int
    score: float


@dataclass(slots=True, frozen=True)
class Ended:
    """A hypothesis that has ended, with its final score."""

    tokens: Sequence[int]
    score: float


@dataclass(slots=True)
class BeamSearch:
    """The search of one request. ``scores``: of the living hypotheses, in their order.

    The scores and rules are the ones of transformers (``GenerationMixin._beam_search``), so that both find the same
    sequences.
    """

    params: BeamParams
    end_tokens: frozenset[int]
    max_tokens: int
    scores: list[float] = field(default_factory=lambda: [0.0])
    ended: list[Ended] = field(default_factory=list)

    def advance(
        self, histories: Sequence[Sequence[int]], candidates: Sequence[Iterable[tuple[int, float]]]
    ) -> list[Continuation] | None:
        """The hypotheses that continue, best first; None: the search is over and ``ended`` holds its results.

        ``histories``: output tokens of the living hypotheses. ``candidates``: for each the likeliest next tokens with
        their log-probabilities, best first. Tokens that the grammar forbids are never taken, so that there may be
        fewer hypotheses than ``width``.
        """
        params, width = self.params, self.params.width
        keep = params.num_candidates(len(self.end_tokens))
        # Merged, not sorted, so that few of all continuations are looked at. Of equal ones, the one of the earlier
        # hypothesis comes first.
        of_each = (self._continuations(parent, best_first) for parent, best_first in enumerate(candidates))
        ranked = list(islice(merge(*of_each, key=lambda one: -one.score), keep))
        length = len(histories[0]) + 1
        if len(self.ended) < width or params.early_stopping is not True:
            penalty = length**params.length_penalty
            ending = [one for one in ranked[:width] if self._ends(one, length)]
            self.ended += [Ended([*histories[one.parent], one.token], one.score / penalty) for one in ending]
            self.ended.sort(key=lambda ended: -ended.score)
            del self.ended[width:]
        living = [one for one in ranked if not self._ends(one, length)][:width]
        self.scores = [one.score for one in living]
        return living if living and self._can_improve(length) else None

    def _ends(self, one: Continuation, length: int) -> bool:
        return one.token in self.end_tokens or length >= self.max_tokens

    def _continuations(self, parent: int, best_first: Iterable[tuple[int, float]]) -> Iterator[Continuation]:
        score = self.scores[parent]
        allowed = takewhile(lambda one: one[1] > _FORBIDDEN, best_first)
        return (Continuation(parent, token, score + logprob) for token, logprob in allowed)

    def _can_improve(self, length: int) -> bool:
        if len(self.ended) < self.params.width:
            return True
        if self.params.early_stopping is True:
            return False
        hopeful = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best = self.scores[0] / (self.max_tokens if hopeful else length) ** self.params.length_penalty
        return bool(best > self.ended[-1].score)


@dataclass(slots=True)
class _Group:
    """A beam search. ``members``: its living hypotheses; ``candidates``: next tokens of members that have come back."""

    search: BeamSearch
    members: list[RequestSequence]
    candidates: dict[RequestSequence, TokenLogprobs] = field(default_factory=dict)


class BeamGroups(Feature):
    """The beam searches of one scheduler."""

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        self._kv = scheduler.kv
        self._plan = scheduler.plan
        self._groups: dict[Request, _Group] = {}

    def entered(self, request: Request) -> None:
        # If the request ran elsewhere before, all its living hypotheses compute their newest token again.
        assert request.params.beam is not None
        if request.search is None:
            ends = frozenset(request.params.sampling.stop_token_ids)
            request.search = BeamSearch(request.params.beam, ends, request.max_tokens)
        members = [sequence for sequence in request.sequences if not sequence.finished]
        self._groups[request] = _Group(request.search, members)

    def take_logprobs(self, sequence: RequestSequence, entry: TokenLogprobs, output: "StepOutput") -> bool:
        sequence.request.num_sampled_tokens += 1
        group = self._groups[sequence.request]
        group.candidates[sequence] = entry
        if len(group.candidates) < len(group.members):
            return True
        histories = [member.output_token_ids for member in group.members]
        entries = [group.candidates[member] for member in group.members]
        # Iterators, because few of all candidates are looked at.
        candidates = [
            zip(unpack_int32s(entry.top_ids), unpack_float32s(entry.top_logprobs), strict=True) for entry in entries
        ]
        continuations = group.search.advance(histories, candidates)
        group.candidates.clear()
        if continuations is None:
            results = group.search.ended[: sequence.request.params.n]
            self._conclude(sequence.request, [one.tokens for one in results], group.search.end_tokens, output)
        else:
            self._continue(group, continuations)
        return True

    def decodes(self, sequence: RequestSequence) -> bool:
        return False  # after each token the search decides which hypotheses continue

    def num_candidates(self, sequence: RequestSequence) -> int:
        beam = sequence.request.params.beam
        return beam.width if beam is not None else 0

    def unblock(self) -> bool:
        # Hypotheses that have come back, and wait for others, are computed again from their tokens.
        held = [member for group in self._groups.values() for member in group.candidates if member.table.blocks]
        for member in held:
            self._kv.free(member.table, None)
        return bool(held)

    def aborted(self, request: Request, ended: list[RequestSequence]) -> list[RequestSequence]:
        # The client knows no hypotheses. It gets as many outputs as it has requested, which were aborted.
        request.replace_sequences([request.aborted(index) for index in range(request.params.n)])
        return request.sequences

    def leave(self, request: Request, last_step: int) -> None:
        self._groups.pop(request, None)

    def clear(self) -> None:
        self._groups.clear()

    def _continue(self, group: _Group, continuations: list[Continuation]) -> None:
        parents = group.members
        living = {one.parent for one in continuations}
        taken: set[int] = set()
        spare = [parent for number, parent in enumerate(parents) if number not in living]
        for pruned in spare:
            self._kv.free(pruned.table, None)
        histories = [parent.output_token_ids for parent in parents]
        members: list[RequestSequence] = []
        for one in continuations:
            parent, history = parents[one.parent], histories[one.parent]
            if one.parent not in taken:  # the first one takes the parent's blocks over, the others fork them
                taken.add(one.parent)
                heir = parent
            else:
                heir = spare.pop() if spare else self._new_sequence(parent.request)
                heir.table = self._fork(parent.table, len(history) + parent.num_prompt_tokens)
            heir.output_token_ids = array("i", (*history, one.token))
            members.append(heir)
        for heir in members:  # after all forks, because it must not write shared blocks
            self._run(heir)
        group.members = members
        for unused in spare:
            unused.end(None)
        group.members[0].request.replace_sequences([*members])

    def _run(self, heir: RequestSequence) -> None:
        """Let a hypothesis run in the next step, or wait if there is no room for it."""
        if heir.table.blocks:
            if self.scheduler.prefilling.rejoin(heir):
                return
            self._plan.copies.give_up(heir.table.blocks)
            self._kv.free(heir.table, None)
        heir.path = []
        self.scheduler.waiting.push(heir)

    def _fork(self, table: BlockTable, num_computed: int) -> BlockTable:
        """A table that shares the blocks of ``table``; empty if there is no block for a copy of the last one."""
        fork = self._kv.new_table(table.cache_salt, table.owner)
        if table.blocks and self._kv.num_available > self._kv.num_for_next:
            prefix = self._kv.fork(table, num_computed)
            self._plan.copy(self._kv.take(fork, prefix))
            self._plan.copy(self._kv.begin_windows(fork, []))
        return fork

    def _new_sequence(self, request: Request) -> RequestSequence:
        first = request.sequences[0]
        return RequestSequence(request, 0, first.sampling, self._kv.new_table(request.params.cache_salt, request.ref))

    def _conclude(
        self, request: Request, outputs: Sequence[Sequence[int]], ends: frozenset[int], output: "StepOutput"
    ) -> None:
        """End a search: ``outputs``, which have finished, replace its hypotheses."""
        ending: int | None = request.ending(max(outputs, key=len, default=()))
        for sequence in request.sequences:
            if sequence.table.blocks:
                for feature in request.features:
                    feature.frees(sequence)
                self._kv.free(sequence.table, None, ending)
                ending = None  # all hypotheses together are one use of the prompt
        self._groups.pop(request, None)
        request.replace_sequences([])
        for index, tokens in enumerate(outputs):
            sequence = RequestSequence(
                request, index, request.params.sampling, self._kv.new_table(), array("i", tokens)
            )
            by_stop = tokens[-1:] and tokens[-1] in ends
            reason: FinishReason = "stop" if by_stop else "length"
            sequence.end(reason, tokens[-1] if by_stop else None)
            request.sequences.append(sequence)
            output.finished.append(sequence)
        for index in range(len(outputs), request.params.n):  # the grammar allows no more outputs
            request.sequences.append(request.aborted(index))
            output.finished.append(request.sequences[-1])
        self.scheduler.forget(request)

"""Beam searches: their outputs are chosen among several hypotheses at the end, and no token is sent before.

Hypotheses run one token at a time: when all of a request's have come back, those that go on take over or fork the
blocks of those they came from, and the others let go of theirs.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagewise_shared.protocol import TokenLogprobs, unpack_float32s, unpack_int32s

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.memory.block_table import BlockTable
from pagewise_scheduler.core.requests.beam_search import BeamSearch, Continuation
from pagewise_scheduler.core.requests.request import FinishReason, Request, RequestSequence

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler
    from pagewise_scheduler.core.scheduling.step import StepOutput


@dataclass(slots=True)
class _Group:
    """A beam search under way. ``members``: its living hypotheses; ``candidates``: of those that have come back."""

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
        """See ``Feature``. If the request was elsewhere before, what its hypotheses waited for is asked for again."""
        assert request.params.beam is not None
        if request.search is None:
            ends = frozenset(request.params.sampling.stop_token_ids)
            request.search = BeamSearch(request.params.beam, ends, request.max_tokens)
        members = [sequence for sequence in request.sequences if not sequence.finished]
        self._groups[request] = _Group(request.search, members)

    def take_logprobs(self, sequence: RequestSequence, entry: TokenLogprobs, output: "StepOutput") -> bool:
        """See ``Feature``: the candidates to go on with."""
        sequence.request.num_sampled_tokens += 1
        group = self._groups[sequence.request]
        group.candidates[sequence] = entry
        if len(group.candidates) < len(group.members):
            return True
        histories = [member.output_token_ids for member in group.members]
        entries = [group.candidates[member] for member in group.members]
        # Pairs are made as they are asked for, because few of all candidates are looked at.
        candidates = [
            zip(unpack_int32s(entry.top_ids), unpack_float32s(entry.top_logprobs), strict=True) for entry in entries
        ]
        continuations = group.search.advance(histories, candidates)
        group.candidates.clear()
        if continuations is None:
            results = group.search.results(sequence.request.params.n)
            ends = group.search.end_tokens
            self._conclude(sequence.request, [one.tokens for one in results], ends, output)
        else:
            self._go_on(group, continuations)
        return True

    def decodes(self, sequence: RequestSequence) -> bool:
        """See ``Feature``. After each token the search decides which hypotheses go on."""
        return False

    def num_candidates(self, sequence: RequestSequence) -> int:
        """See ``Feature``: as many as the search is wide."""
        beam = sequence.request.params.beam
        return beam.width if beam is not None else 0

    def unblock(self) -> bool:
        """See ``Feature``. Hypotheses that have come back, and wait for others, give up their blocks."""
        held = [member for group in self._groups.values() for member in group.candidates if member.table.blocks]
        for member in held:
            self._kv.free(member.table, None)
        return bool(held)

    def aborted(self, request: Request, ended: list[RequestSequence]) -> list[RequestSequence]:
        """See ``Feature``. Hypotheses are not shown; the outputs that were asked for end with them."""
        request.replace_sequences([request.aborted(index) for index in range(request.params.n)])
        return request.sequences

    def leave(self, request: Request, last_step: int) -> None:
        """See ``Feature``."""
        self._groups.pop(request, None)

    def clear(self) -> None:
        """See ``Feature``."""
        self._groups.clear()

    def _go_on(self, group: _Group, continuations: list[Continuation]) -> None:
        parents = group.members
        heirs: dict[int, RequestSequence] = {}
        living = {one.parent for one in continuations}
        spare = [parent for number, parent in enumerate(parents) if number not in living]
        for pruned in spare:
            self._kv.free(pruned.table, None)
        histories = [parent.output_token_ids for parent in parents]
        members: list[RequestSequence] = []
        for one in continuations:
            parent, history = parents[one.parent], histories[one.parent]
            if one.parent not in heirs:  # the first to go on takes the blocks over, the others fork them
                heir = heirs[one.parent] = parent
            else:
                heir = spare.pop() if spare else self._new_sequence(parent.request)
                heir.table = self._fork(parent.table, len(history) + parent.num_prompt_tokens)
            heir.output_token_ids = array("i", (*history, one.token))
            members.append(heir)
            self._run(heir)
        group.members = members
        # Those that are left over wait for a wider step; a request knows all sequences it has ever had.
        for unused in spare:
            unused.end(None)
        request = group.members[0].request
        request.replace_sequences([*members])

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
        """A table that begins as ``table`` does; empty if there is no block for what has to be copied."""
        fork = self._kv.new_table(table.cache_salt, table.owner)
        if table.blocks and self._kv.num_available > 1:
            prefix = self._kv.fork(table, num_computed)
            self._plan.copy(self._kv.take(fork, prefix))
        return fork

    def _new_sequence(self, request: Request) -> RequestSequence:
        first = request.sequences[0]
        return RequestSequence(request, 0, first.sampling, self._kv.new_table(request.params.cache_salt, request.ref))

    def _conclude(
        self, request: Request, outputs: Sequence[Sequence[int]], ends: frozenset[int], output: "StepOutput"
    ) -> None:
        """Put ``outputs`` in the place of what was tried for them: they have finished."""
        ending: int | None = request.ending(max(outputs, key=len, default=()))
        for sequence in request.sequences:
            if sequence.table.blocks:
                for feature in request.features:
                    feature.frees(sequence)
                self._kv.free(sequence.table, None, ending)
                ending = None  # all that was tried is one use of the prompt
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
        for index in range(len(outputs), request.params.n):  # the grammar allows no more than those
            request.sequences.append(request.aborted(index))
            output.finished.append(request.sequences[-1])
        self.scheduler.forget(request)

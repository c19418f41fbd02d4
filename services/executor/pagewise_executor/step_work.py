"""The work of a step: which rows decode, their drafts, and the chunks of prefills."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from pagewise_shared.config.speculative import MAX_PROPOSED_TOKENS, MAX_SPECULATIVE_TOKENS
from pagewise_shared.protocol import SegmentMove
from pagewise_shared.sampling import SamplingParams, num_accepted

from pagewise_executor.block_copies import CopyJob
from pagewise_executor.plan_checks import InvalidPlanError

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class SequenceState:
    """One sequence of the batch: the tokens that were known when it joined, and how it is sampled.

    ``root``: the hash at which its chain of block hashes begins; empty if its blocks are not to be hashed. ``sampled``:
    the tokens that were sampled since it joined, as far as they have reached the host. ``marked``: the tokens with the
    marks of segments. ``segments`` [n, 2]: start and stop of each stretch of tokens whose K and V are moved.
    """

    tokens: Int32s
    num_prompt_tokens: int
    sampling: SamplingParams
    marked: Int32s
    segments: Int64s
    root: bytes = b""
    sampled: "array[int]" = field(default_factory=lambda: array("i"))

    def known_tokens(self, start: int) -> bytes:
        """Return the tokens from ``start`` on, as int32 bytes."""
        known = len(self.tokens)
        return self.marked[start:].tobytes() + self.sampled[max(0, start - known) :].tobytes()


@dataclass(slots=True, frozen=True)
class Chunk:
    """A prefill chunk: compute ``size`` known tokens of ``row`` from position ``start`` on.

    A row has several in a step if segments come between them, in order. ``completes``: these are the last known tokens,
    so the step samples the next token of the sequence. ``drafted``: it is a draft behind the token that was sampled
    last, and the step samples a token behind each of them.
    """

    row: int
    start: int
    size: int
    completes: bool
    drafted: bool = False

    @property
    def num_sampled(self) -> int:
        """The number of its last tokens behind which the step samples a token."""
        return self.size if self.drafted else int(self.completes)


@dataclass(slots=True)
class Draft:
    """Tokens [n] that may follow in a row that decodes, at positions from ``start`` + 1 on.

    ``last``: the token before them, which the row sampled last. ``num_accepted``: how many of them the step accepted.
    """

    row: int
    start: int
    tokens: Int32s
    last: int = 0
    num_accepted: int = 0

    @property
    def computed_tokens(self) -> Int32s:
        """The tokens that verify it [1 + n]: the last sampled one, and its own."""
        return np.append(np.array([self.last], np.int32), self.tokens)

    def follow(self, held: SequenceState) -> None:
        """Take the token before the draft from its row.

        Raises:
            InvalidPlanError: the result of the step before is not back.
        """
        if not held.sampled or len(held.tokens) + len(held.sampled) != self.start + 1:
            raise InvalidPlanError(f"row {self.row} has a draft before its last token is known")
        self.last = held.sampled[-1]


@dataclass(slots=True)
class StepWork:
    """The work of one step.

    ``decoding`` [num_decodes]: the rows that compute one token each, in order, without the rows of ``drafts``, whose
    chunks come before the others. ``changed``: other rows decoded in the step before. ``copies``: copies of blocks
    between tiers, in order. ``changed_tables``: the stretches (row, start, stop) of block tables that are new in this
    step. ``moves``: of segments, before the step computes. ``reached``: by row with chunks the number of tokens that
    are computed, or moved, after the step. ``proposals``: rows whose tokens the drafter takes, each with the number of
    tokens that it proposes behind them.
    """

    decoding: Int64s
    changed: bool
    chunks: list[Chunk]
    joined: list[int]
    left: list[int]
    copies: list[CopyJob]
    changed_tables: list[tuple[int, int, int]]
    moves: tuple[SegmentMove, ...]
    reached: list[tuple[int, int]]
    drafts: list[Draft]
    proposals: list[tuple[int, int]] = field(default_factory=list)

    @property
    def sampled_rows(self) -> list[int]:
        """The row of each token that this step samples, in the order of ``StepResult.tokens``."""
        rows = [*self.decoding.tolist(), *(chunk.row for chunk in self.drafted for _ in range(chunk.size))]
        return rows + [chunk.row for chunk in self.chunks[len(self.drafts) :] if chunk.completes]

    @property
    def drafted(self) -> list[Chunk]:
        """The chunks of drafts, in their order."""
        return self.chunks[: len(self.drafts)]

    def chunk_offsets(self) -> Iterator[tuple[int, Chunk]]:
        """Return the chunks, each with its index in the flat batch, in which they lie behind the decodes."""
        offsets = accumulate((chunk.size for chunk in self.chunks), initial=len(self.decoding))
        return zip(offsets, self.chunks, strict=False)  # the last offset is the end of the flat batch

    @property
    def num_tokens(self) -> int:
        """The number of tokens that this step computes."""
        return len(self.decoding) + sum(chunk.size for chunk in self.chunks)


def checked_drafts(
    drafts: Sequence[Draft], rows: Mapping[int, SequenceState], slots: Sequence[int], vocab_size: int
) -> list[Draft]:
    """Return the drafts of a plan. ``slots``: the number of tokens for which each of their rows has room.

    Raises:
        InvalidPlanError: a row has two of them, no slots for one, or a last token that is not known yet, or a draft has
            no tokens, too many, or impossible ones.
    """
    for draft, room in zip(drafts, slots, strict=True):
        if len(draft.tokens) > MAX_SPECULATIVE_TOKENS:
            raise InvalidPlanError(f"row {draft.row}: a draft has at most {MAX_SPECULATIVE_TOKENS} tokens")
        if not len(draft.tokens) or draft.tokens.min() < 0 or draft.tokens.max() >= vocab_size:
            raise InvalidPlanError(f"row {draft.row}: a draft of no tokens, or with one outside the vocabulary")
        if draft.start + 1 + len(draft.tokens) > room:
            raise InvalidPlanError(f"row {draft.row} has no slots for a draft of {len(draft.tokens)} tokens")
        draft.follow(rows[draft.row])
    if len({draft.row for draft in drafts}) < len(drafts):
        raise InvalidPlanError("a row has two drafts in one step")
    return list(drafts)


def checked_proposals(pairs: Int32s, work: StepWork) -> list[tuple[int, int]]:
    """Return the proposals that a plan asks for: pairs of a row and a number of tokens, one behind the other.

    Raises:
        InvalidPlanError: they are no pairs, a row occurs twice or computes nothing, or a number is impossible.
    """
    if len(pairs) % 2:
        raise InvalidPlanError("proposals come in pairs of row and number of tokens")
    found: list[tuple[int, int]] = [(row, count) for row, count in pairs.reshape(-1, 2).tolist()]
    computing = {chunk.row: chunk.drafted or chunk.completes for chunk in work.chunks}
    computing |= dict.fromkeys(work.decoding.tolist(), True)
    for row, count in found:
        if row not in computing or not 0 <= count <= MAX_PROPOSED_TOKENS * computing[row]:
            raise InvalidPlanError(f"{count} tokens are to be proposed for row {row}, which does not get there")
    if len(dict(found)) < len(found):
        raise InvalidPlanError("a row has two proposals in one step")
    return found


def accept(drafts: Sequence[Draft], sampled: Sequence[int], num_decodes: int) -> list[int]:
    """Accept draft tokens that were ``sampled``: the tokens of a step, in the order of ``StepResult.tokens``.

    ``num_decodes``: the number of tokens before the drafts', one per row. Returns each row's last token by index.
    """
    last, offset = list(range(num_decodes)), num_decodes
    for draft in drafts:
        stop = offset + len(draft.tokens) + 1
        draft.num_accepted = num_accepted(draft.tokens.tolist(), sampled[offset:stop])
        last.append(offset + draft.num_accepted)
        offset = stop
    return [*last, *range(offset, len(sampled))]


def kept_tokens(drafts: Sequence[Draft], num_decodes: int, num_sampled: int) -> list[bool]:
    """Return whether rows keep each of the ``num_sampled`` tokens of a step: not behind one unlike its draft."""
    kept = [True] * num_decodes
    for draft in drafts:
        kept += [index <= draft.num_accepted for index in range(len(draft.tokens) + 1)]
    return kept + [True] * (num_sampled - len(kept))

"""The messages of a step: its plan from the scheduler, and the executor's answers."""

from typing import Annotated

from msgspec import Meta

from pagewise_shared.protocol.base import Message, Piece
from pagewise_shared.protocol.limits import MAX_ROWS
from pagewise_shared.protocol.tiers import DEVICE
from pagewise_shared.sampling import SamplingParams, TokenConstraints

# ---- scheduler -> executor ----------------------------------------------------------------------------


class NewSequence(Piece, frozen=True):
    """A sequence takes row ``row``: everything the executor has to know about it.

    Fields:
        row: 0 <= row < max_num_seqs; free until now, or freed by this plan's ``left``.
        tokens: all known tokens, prompt then output (int32 bytes), with marked segments (``segments.py``).
        num_prompt_tokens: tokens of the prompt.
        num_computed_tokens: first tokens whose K and V ``blocks`` hold already.
        blocks: the block table so far (int32 bytes).
        root: the parent hash of its first block.
        constraints: index in ``StepPlan.constraints``, which complete ``sampling``; -1: none.
        adapter: the slot of its adapter, which is loaded; -1: none.
        windows: its tables in the groups of windowed layers: index of the first block, and blocks (int32 bytes). In a
            group of states instead: a number of tokens, and either the block with the states behind them and the block
            to which later states are written, or one block for both. That one holds the states behind
            ``num_computed_tokens``, or nothing if they are 0.
    """

    row: int
    tokens: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    blocks: bytes
    sampling: SamplingParams
    root: bytes = b""
    constraints: int = -1
    adapter: int = -1
    windows: tuple[tuple[int, bytes], ...] = ()


class RemoteTier(Piece, frozen=True):
    """A tier of another executor, from which blocks are copied.

    Fields:
        endpoint: its block endpoint. epoch: its epoch; under another epoch it refuses.
        step: it answers once it has begun this step, because this step may write the blocks.
        key: its public key (Z85 text), empty where connections have none.
    """

    endpoint: str
    epoch: int
    step: int = 0
    key: str = ""


class BlockCopies(Piece, frozen=True):
    """Copies of blocks from one tier to another, or inside the device.

    Fields:
        source, target: numbers of tiers. pairs: source block and target block (int32 bytes). If a target below the
            device occurs more than once, its last source counts. Blocks of a tier without ids are indices in ``names``.
        peer: the other executor that the source belongs to; None: the executor itself.
        names: of copies from and to a tier without ids, the names of the blocks there (``pack_names``).
        group: the group of layers.
        salts: of copies to a tier without ids, for each first block of a prefix its index in ``names``, and the
            ``salt_tags`` that are stored with it.
    """

    source: int
    target: int
    pairs: bytes
    peer: RemoteTier | None = None
    names: bytes = b""
    group: int = 0
    salts: tuple[tuple[int, bytes], ...] = ()


class SegmentMove(Piece, frozen=True):
    """K and V of a part of a segment, moved to the segment's position in a sequence.

    Tokens ``start`` to ``stop`` of ``row`` get the K and V of tokens ``start - distance`` to ``stop - distance`` of the
    block table ``blocks``; K is rotated by ``distance`` positions.

    Fields:
        row: of the sequence. start, stop: the tokens there. distance: from the original to there, in tokens.
        first: the index of the first of ``blocks`` in the original's table. blocks: of the original, from there on
            (int32 bytes).
    """

    row: int
    start: int
    stop: int
    distance: int
    first: int
    blocks: bytes


class StepPlan(Message, frozen=True):
    """Everything about one step: changes to rows, block copies, forward, sampling.

    A plan carries changes, not state. The executor keeps an ordered *decode set*: each of its rows computes exactly one
    token, the one sampled for it by the step before, in every step until it leaves. A row whose chunk reaches the end
    of its known tokens samples in that step and joins the end of the decode set, in the order of ``chunks``, for the
    next step. Applied in this order:

    Fields:
        left: rows whose sequence is gone (finished, aborted, preempted); they leave the decode set too.
        copies: of blocks, begun in this order. The executor reads a source on the device before it begins the next
            list; the rest of such a copy takes its time. Inside the device it reads all sources, of all groups, before
            it writes any target, and finishes before it computes. Copies to the device may take longer than the step:
            nothing reads or writes their targets until ``Copied`` has confirmed them. A read of a block in another tier
            waits for the earlier copies that write it.
        joined: sequences that take a row.
        tables: changes to block tables, in order (int32 bytes, triples row, index, block): at the end of a row's table
            the block is added, before the end it replaces a block with the same content.
        computed: (row, n): the row's first n tokens have their K and V now, computed or copied.
        chunks: (row, n): advance the row by n known tokens, and compute the tokens that no segment moves there.
        constraints: of the sequences in ``joined``, each once.
        moves: of segments, after the copies and before the forward. Earlier steps have computed the K and V in their
            blocks.
        drafts: (row, tokens as int32 bytes), at most once for a row: a row of the decode set computes these tokens too,
            behind the one that was sampled for it, and samples one token behind each. It keeps them up to the first
            that differs from the draft, and discards the K and V of the rest. The results of all earlier steps have
            arrived.
    """

    epoch: int
    step: int
    left: tuple[int, ...] = ()
    copies: tuple[BlockCopies, ...] = ()
    joined: tuple[NewSequence, ...] = ()
    tables: bytes = b""
    computed: tuple[tuple[int, int], ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    constraints: tuple[TokenConstraints, ...] = ()
    moves: tuple[SegmentMove, ...] = ()
    drafts: tuple[tuple[int, bytes], ...] = ()

    @property
    def windows(self) -> bytes:
        """See ``GroupedStepPlan``."""
        return b""

    @property
    def unmapped(self) -> bytes:
        """See ``GroupedStepPlan``."""
        return b""

    @property
    def states(self) -> bytes:
        """See ``GroupedStepPlan``."""
        return b""

    @property
    def proposals(self) -> bytes:
        """See ``ProposingStepPlan``."""
        return b""


class GroupedStepPlan(StepPlan, frozen=True):
    """The plan of a step of an executor with several groups of layers.

    Fields:
        windows: blocks added at the ends of tables of windowed layers (int32 bytes: row, group, block). A row's
            blocks before the window of its next token may be other rows' from the next step on.
        unmapped: blocks whose pages go to other blocks in this step (int32 bytes: tier, group, block). An executor with
            several groups gives pages to a block when a plan names it first, and keeps them until the block is
            unmapped or, when the epoch ends, is not in an inventory that stays valid. Blocks without pages may be
            unmapped too. A source of the plan's copies still has its pages, unless an earlier list of the plan has
            written it; all else follows the new mapping.
        states: in groups of states, where rows write their states (int32 bytes: row, group, n, block): the states
            behind the row's first n tokens stay in their block, and later ones are written to ``block``. n is at least
            the number of tokens that the row has computed before the step, and less than the number after it. Of one
            row and group, n rises. If a row keeps fewer than n tokens of its draft, the step that reaches n writes to
            ``block``.
    """

    windows: bytes = b""
    unmapped: bytes = b""
    states: bytes = b""


class ProposingStepPlan(GroupedStepPlan, frozen=True):
    """The plan of a step behind which the executor's own drafter proposes drafts.

    Fields:
        proposals: (row, n) as int32 bytes, at most once for a row that computes in this step: the drafter takes the
            tokens that the step computes for the row and that the row keeps, and proposes up to n tokens behind the
            last one. With n = 0 it only takes them. n is 0 for a row whose known tokens the step does not complete.
    """

    proposals: bytes = b""


class CancelCopies(Message, frozen=True):
    """The scheduler does not need these copies of a step any more: confirm them now, and report missing blocks as bad.

    They are the copies from ``peer`` (a block endpoint), or, if that is empty, to and from the own tier ``tier``, one
    of ``HASH_TIERS``.
    """

    epoch: int
    step: int
    peer: str = ""
    tier: int = DEVICE


# ---- executor -> scheduler ----------------------------------------------------------------------------


class TokenLogprobs(Piece, frozen=True, gc=False):
    """Log-probabilities for one token of a row: log-softmax of the raw logits in float32, before penalties and
    temperature.

    Fields:
        index: of the token in ``StepResult.tokens``; for prompt tokens the absolute position.
        rank: of the token, from 1.
        top_ids, top_logprobs: the alternatives, best first (int32 and float32 bytes): packed, because a step may have
            tens of thousands.
    """

    index: int
    token_id: int
    logprob: float
    rank: int
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PromptLogprobs(Piece, frozen=True):
    """Log-probabilities of the prompt tokens that one chunk predicted: positions start + 1 to the end of the chunk.

    The prompt's token 0 has none. Positions past the prompt (of a resumed sequence) are not reported.
    """

    row: int
    entries: tuple[TokenLogprobs, ...]


class StepError(Piece, frozen=True):
    """Why a step failed. ``kind``: "out_of_memory", "invalid_plan" or "internal". ``message``: for people."""

    kind: str
    message: str


class RowFailure(Piece, frozen=True):
    """A sequence that cannot continue, because no token can make its output match its grammar.

    ``index``: of its token in ``StepResult.tokens``, which is to be ignored. ``message``: the reason, for the client.
    ``invalid``: the grammar cannot be used with the model's tokenizer.
    """

    index: int
    message: str
    invalid: bool = False


class StepResult(Message, frozen=True):
    """The result of one step.

    After a failed step (``error``), the executor answers every further plan of the epoch with the same error and waits
    for a Welcome with a new epoch, which empties all rows.

    Fields:
        tokens: sampled tokens (int32 bytes): one for every row of the decode set without a draft, in its order; then,
            for every draft of the plan, one more than the draft has tokens; then one for every chunk of the plan that
            completed its row's known tokens, in the plan's order.
        logprobs: of these tokens, for rows that ask for them. prompt_logprobs: of the chunks of such rows.
        elapsed_us: time of the step on the executor, microseconds.
        error: why the step failed; None: it succeeded.
        failures: sequences that fail alone, in ascending order.
        proposed: the drafts that the plan's ``proposals`` ask for (int32 bytes), n tokens for each row; -1 behind a
            draft that is shorter.
    """

    epoch: int
    step: int
    tokens: bytes = b""
    logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(max_length=MAX_ROWS)] = ()
    prompt_logprobs: Annotated[tuple[PromptLogprobs, ...], Meta(max_length=MAX_ROWS)] = ()
    elapsed_us: int = 0
    error: StepError | None = None
    failures: Annotated[tuple[RowFailure, ...], Meta(max_length=MAX_ROWS)] = ()
    proposed: bytes = b""


class Copied(Message, frozen=True):
    """The executor has made one list of a step's copies, which ``source``, ``target``, ``peer`` and ``group`` identify.

    Several such lists of a step are confirmed in the order of the plan.

    Fields:
        source, target: as in ``BlockCopies``. peer: the endpoint that the blocks came from; empty: an own tier.
        elapsed_us: from the beginning of the first copy to the end of the last one, without waiting for other lists,
            microseconds.
        bad: the targets in ``BlockCopies.pairs`` whose content is wrong (int32 bytes): the source was corrupt or did
            not arrive, or the target could not be written.
        error: the copies could not be made; the scheduler starts over under a new epoch, as after a failed step.
        group: the group of layers.
    """

    epoch: int
    step: int
    source: int
    target: int
    peer: str = ""
    elapsed_us: int = 0
    bad: bytes = b""
    error: StepError | None = None
    group: int = 0

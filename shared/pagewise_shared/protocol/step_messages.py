"""Steps as they travel: the plans that the scheduler sends, and the results that executors return."""

from typing import Annotated

from msgspec import Meta

from pagewise_shared.protocol.base import Message, Piece
from pagewise_shared.protocol.limits import MAX_ROWS
from pagewise_shared.sampling import SamplingParams, TokenConstraints

# ---- scheduler -> executor ----------------------------------------------------------------------------


class NewSequence(Piece, frozen=True):
    """A sequence takes row ``row``: everything the executor has to know about it.

    Fields:
        row: 0 <= row < max_num_seqs; free until now, or freed by this plan's ``left``.
        tokens: all known tokens, prompt then output (int32 bytes), in which segments are marked (``segments.py``).
        num_prompt_tokens: how many of them are the prompt's.
        num_computed_tokens: how many of them have their K and V in ``blocks`` already.
        blocks: the block table so far (int32 bytes).
        root: hash with which its chain of block hashes begins.
        constraints: index in ``StepPlan.constraints`` of what ``sampling`` leaves out; -1: it has none.
        adapter: the slot of its adapter, which has been loaded; -1: it has none.
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


class RemoteTier(Piece, frozen=True):
    """Another executor, from one of whose tiers blocks are copied.

    Fields:
        endpoint: its block endpoint. epoch: its epoch; under another one it refuses.
        step: it answers once it has begun this step, which may be what brings the blocks to the tier.
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
            device is named more than once, the last of its sources counts. Blocks of a tier without ids are indices in
            ``names``.
        peer: the other executor whose tier the source is; None: it is the executor's own.
        names: of copies from and to a tier without ids, the names of the blocks there (see ``pack_names``).
    """

    source: int
    target: int
    pairs: bytes
    peer: RemoteTier | None = None
    names: bytes = b""


class SegmentMove(Piece, frozen=True):
    """K and V of a part of a segment, moved to where the segment stands in a sequence.

    Tokens ``start`` to ``stop`` of ``row`` get the K and V that tokens ``start - distance`` to ``stop - distance`` have
    in the block table ``blocks``; K is rotated by ``distance`` positions.

    Fields:
        row: whose sequence it is. start, stop: the tokens there. distance: from the original to there, in tokens.
        first: the number of the first of ``blocks`` in the original. blocks: of the original, from there on (int32
            bytes).
    """

    row: int
    start: int
    stop: int
    distance: int
    first: int
    blocks: bytes


class StepPlan(Message, frozen=True):
    """Everything about one step, in order: changes to rows, block copies, forward, sampling.

    A plan carries changes, not state. The executor keeps an ordered *decode set*: each of its rows computes
    exactly one token, the one sampled for it by the step before, in every step until it leaves. A row whose
    chunk reaches the end of its known tokens samples in that step and joins the end of the decode set, in the
    order of ``chunks``, for the next step on. Applied in this order:

    Fields:
        left: rows whose sequence is gone (finished, aborted, preempted); they leave the decode set too.
        copies: of blocks, begun in this order. What leaves the device has been read when the next list is begun; the
            rest of such a copy takes its time. Inside the device all sources are read before any target is written,
            and all is done before anything is computed. What comes to the device may take longer than the step:
            nothing reads or writes the targets until ``Copied`` has confirmed them. Whatever reads a block of another
            tier waits for the copies asked for before that write it.
        joined: sequences that take a row.
        tables: changes to block tables, in order (int32 bytes, triples row, index, block): at the end of a row's table
            the block is added, before it takes the place of one with the same content.
        computed: (row, n): the row's first n tokens have their K and V now, computed or copied.
        chunks: (row, n): go on by n known tokens in the row: compute those that no segment moves there.
        constraints: of the sequences in ``joined``, each once.
        moves: of segments, after the copies and before anything is computed. Their blocks hold K and V that earlier
            steps have computed.
        drafts: (row, tokens as int32 bytes), at most once for a row: a row of the decode set computes these tokens too,
            behind the one that was sampled for it, and samples one token behind each. It keeps them up to the first
            that differs from the draft: what it has computed behind that one does not count. The results of all
            earlier steps are back.
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


# ---- executor -> scheduler ----------------------------------------------------------------------------


class TokenLogprobs(Piece, frozen=True, gc=False):
    """Log-probabilities for one token of a row.

    They are log-softmax of the raw logits in float32, before penalties and temperature.

    Fields:
        index: of the token in ``StepResult.tokens``, or for prompt tokens its absolute position.
        rank: of the token, from 1.
        top_ids, top_logprobs: the alternatives, best first (int32 and float32 bytes): packed, because a step may have
            tens of thousands of them.
    """

    index: int
    token_id: int
    logprob: float
    rank: int
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PromptLogprobs(Piece, frozen=True):
    """Log-probabilities of the prompt tokens that one chunk predicted: positions start + 1 to end of the chunk.

    The prompt's token 0 has none. Positions past the prompt (of a resumed sequence) are not reported.
    """

    row: int
    entries: tuple[TokenLogprobs, ...]


class StepError(Piece, frozen=True):
    """Why a step failed. ``kind``: "out_of_memory", "invalid_plan" or "internal". ``message``: for people."""

    kind: str
    message: str


class RowFailure(Piece, frozen=True):
    """A sequence that cannot go on, because its output can no longer be made to match its grammar.

    ``index``: of its token in ``StepResult.tokens``, which means nothing. ``message``: why, for the client.
    ``invalid``: the grammar makes no sense with the model's tokenizer.
    """

    index: int
    message: str
    invalid: bool = False


class StepResult(Message, frozen=True):
    """What one step produced.

    After a failed step (``error``), the executor answers every further plan of the epoch with the same error and waits
    for a Welcome with a new epoch, which empties all rows.

    Fields:
        tokens: one sampled token (int32 bytes) for every row of the decode set without a draft, in its order, then for
            every draft of the plan one more than it has tokens, then one for every chunk of the plan that completed its
            row's known tokens, in the plan's order.
        logprobs: of these tokens, for rows that ask for them. prompt_logprobs: of the chunks of such rows.
        elapsed_us: time the step took on the executor, microseconds.
        error: why the step failed; None: it did not.
        failures: sequences that fail alone, in ascending order.
    """

    epoch: int
    step: int
    tokens: bytes = b""
    logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(max_length=MAX_ROWS)] = ()
    prompt_logprobs: Annotated[tuple[PromptLogprobs, ...], Meta(max_length=MAX_ROWS)] = ()
    elapsed_us: int = 0
    error: StepError | None = None
    failures: Annotated[tuple[RowFailure, ...], Meta(max_length=MAX_ROWS)] = ()

"""The messages between scheduler and executor; ``docs/wire-protocol.md`` tells how they are used.

Every message is one msgpack frame: a tagged, frozen, array-like struct. Fields are only ever appended, with
defaults, so that minor versions understand each other; a change that cannot be made that way raises
``PROTOCOL_MAJOR``. Bulk integers travel as little-endian int32 bytes (``pack_int32s``).
"""

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from pagewise_shared.protocol.limits import MAX_ROWS, MAX_TIERS
from pagewise_shared.sampling import SamplingParams, TokenConstraints

PROTOCOL_MAJOR = 3
PROTOCOL_MINOR = 0

DEVICE, HOST = 0, 1
"""The tiers of KV memory by their numbers, the nearest to the computing first."""

TIER_NAMES = ("device", "host")
"""What the tiers are called, by number."""

Role = Literal["prefill", "decode", "both"]
"""What an executor is for: computing prompts, which go on elsewhere; decoding what was computed elsewhere; or both."""
ROLES: tuple[Role, ...] = get_args(Role)


class Message(Struct, frozen=True, array_like=True, tag=lambda name: name.lower(), omit_defaults=True):
    """Base of all messages: the class name in lower case is the tag."""


class Piece(Struct, frozen=True, array_like=True, omit_defaults=True):
    """Base of the parts that messages are made of."""


# ---- executor -> scheduler ----------------------------------------------------------------------------


class MeasuredCosts(Piece, frozen=True):
    """What steps took when the executor started, in microseconds; the scheduler learns from there.

    Fields:
        step: any step. token: each token of a prefill. attention: one token attending to one. context: each token
            before the end of a chunk, which the chunk reads once.
    """

    step: float
    token: float
    attention: float
    context: float = 0.0


class LowerTier(Piece, frozen=True):
    """A tier below the device that an executor has.

    Fields:
        number: see ``TIER_NAMES``. num_blocks: at least 1.
        load_setup, load_block: what a list of copies from it to the device took when the executor started, and each
            block in the list, in microseconds; store_setup, store_block: the same from the device to it. All of them
            are 0 if nothing was measured.
    """

    number: int
    num_blocks: int
    load_setup: float = 0.0
    load_block: float = 0.0
    store_setup: float = 0.0
    store_block: float = 0.0


class Hello(Message, frozen=True):
    """An executor offers itself. Sent again, with growing pauses, until Welcome or Refused arrives.

    Fields:
        executor_id: stable name of the executor, for people and metrics; the socket identity is another thing.
        model_fingerprint: equal fingerprints mean equal weights and configuration.
        max_model_len: most tokens a sequence may reach, by the model and the executor's options.
        block_size: tokens per block. num_blocks: blocks in the device pool. bytes_per_block: all layers, K and V.
        max_num_seqs, max_num_batched_tokens: what the executor has prepared room for; 0: as the Welcome says.
        device: for people, such as "cpu" or "cuda:0 (NVIDIA H200)".
        tiers: those that it has below the device, the nearest first. costs: what it has measured of its steps, if
            anything.
        block_endpoint: ZeroMQ endpoint where other executors fetch blocks; empty: it lends none. block_format: those
            with the same one can use each other's blocks. inventory: blocks it holds from before; None: nothing.
        number: of the inventory; one that is offered again has the same.
        kernels: what computes the model, for people, such as "triton". fallback: other kernels would have been chosen,
            but cannot compute this model, or have not been built for this processor.
        role: one of ``ROLES``: what the executor is for.
    """

    protocol_major: int
    protocol_minor: int
    executor_id: str
    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    bytes_per_block: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    device: str = ""
    dtype: str = ""
    tiers: Annotated[tuple[LowerTier, ...], Meta(max_length=MAX_TIERS)] = ()
    costs: MeasuredCosts | None = None
    block_endpoint: str = ""
    block_format: str = ""
    inventory: "Inventory | None" = None
    number: int = 0
    kernels: str = ""
    fallback: bool = False
    role: str = "both"


class NamedBlocks(Piece, frozen=True):
    """Full blocks of one tier.

    Fields:
        tier: its number. blocks: their ids (int32 bytes). hashes: their block hashes in the same order (32 bytes each,
            one after the other).
    """

    tier: int
    blocks: bytes
    hashes: bytes


class Inventory(Piece, frozen=True):
    """Full blocks whose content an executor knows, of each tier that has some."""

    tiers: Annotated[tuple[NamedBlocks, ...], Meta(max_length=MAX_TIERS)] = ()


class TokenLogprobs(Piece, frozen=True, gc=False):
    """Log-probabilities for one token of a row.

    They are log-softmax of the raw logits in float32, before penalties and temperature.
    ``index`` is the token's index in ``StepResult.tokens`` (or, for prompt tokens, its absolute position).
    ``rank`` counts from 1. ``top_ids`` (int32, see ``pack_int32s``) and ``top_logprobs`` (float32, see
    ``pack_float32s``) hold the alternatives, best first: packed, because a step may have tens of thousands of them.
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
    """Why a step failed: ``kind`` is "out_of_memory", "invalid_plan" or "internal"; ``message`` is for people."""

    kind: str
    message: str


class StepResult(Message, frozen=True):
    """What one step produced.

    ``tokens`` (int32 bytes) holds one sampled token for every row of the decode set, in its order, then one
    for every chunk of the plan that completed its row's known tokens, in the plan's order. After a failed
    step (``error``), the executor answers every further plan of the epoch with the same error and waits for
    a Welcome with a new epoch, which empties all rows.
    ``elapsed_us``: time the step took on the executor, microseconds.
    """

    epoch: int
    step: int
    tokens: bytes = b""
    logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(max_length=MAX_ROWS)] = ()
    prompt_logprobs: Annotated[tuple[PromptLogprobs, ...], Meta(max_length=MAX_ROWS)] = ()
    elapsed_us: int = 0
    error: StepError | None = None


class Copied(Message, frozen=True):
    """One list of a step's copies has been made: that between these tiers, and from this peer if it is one of those.

    If a step has several such lists, their confirmations come in the order of the plan.

    Fields:
        source, target: as in ``BlockCopies``. peer: the endpoint that the blocks came from; empty: it was an own tier.
        elapsed_us: from the first copy's beginning to the last one's end, without waiting for others, microseconds.
        bad: target blocks that do not hold what they should (int32 bytes): the source was spoiled, or did not arrive.
        error: the copies could not be made; the scheduler starts over under a new epoch, as after a failed step.
    """

    epoch: int
    step: int
    source: int
    target: int
    peer: str = ""
    elapsed_us: int = 0
    bad: bytes = b""
    error: StepError | None = None


class Heartbeat(Message, frozen=True):
    """Sent every ``Welcome.heartbeat_ms``, also while a step runs. Answered by HeartbeatAck or Rejoin.

    ``refused``: connections to its block socket that were refused because of their keys, a running total: all that the
    scheduler which let it in has not been told of in an earlier life. ``tasks``: of an executor's event loop.
    ``closed``: as ``refused``, those that were closed because too much of what they had brought was not read.
    """

    epoch: int
    refused: int = 0
    tasks: int = 0
    closed: int = 0


class Leaving(Message, frozen=True):
    """The executor was told to stop: it asks to be drained, and goes on until ``Drain`` lets it go, or for
    ``timeout_ms``."""

    epoch: int
    timeout_ms: int


class Goodbye(Message, frozen=True):
    """The executor stops and takes no more plans."""

    epoch: int
    reason: str = ""


# ---- scheduler -> executor ----------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The executor is in. Whatever it held under another epoch is void: all rows are emptied.

    Sent again with a higher epoch to reset an executor whose step failed.

    ``keeps_blocks``: what the inventory of the Hello with the number ``hello`` offered stays valid; else nothing in the
    pools is. One for another inventory than the last is not taken.
    """

    epoch: int
    max_num_seqs: int
    max_num_batched_tokens: int
    heartbeat_ms: int = 1000
    keeps_blocks: bool = False
    hello: int = 0


class Refused(Message, frozen=True):
    """The executor cannot join; it says so and exits."""

    reason: str


class HeartbeatAck(Message, frozen=True):
    """The scheduler is alive and knows this executor under this epoch."""

    epoch: int


class Rejoin(Message, frozen=True):
    """The scheduler does not know the sender (it was restarted, or it gave the executor up): say Hello again."""


class NewSequence(Piece, frozen=True):
    """A sequence takes row ``row``: everything the executor has to know about it.

    Fields:
        row: 0 <= row < max_num_seqs; free until now, or freed by this plan's ``left``.
        tokens: all known tokens, prompt then output (int32 bytes).
        num_prompt_tokens: how many of them are the prompt's.
        num_computed_tokens: how many of them have their K and V in ``blocks`` already.
        blocks: the block table so far (int32 bytes).
        root: hash with which its chain of block hashes begins.
        constraints: index in ``StepPlan.constraints`` of what ``sampling`` leaves out; -1: it has none.
    """

    row: int
    tokens: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    blocks: bytes
    sampling: SamplingParams
    root: bytes = b""
    constraints: int = -1


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
            device is named more than once, the last of its sources counts.
        peer: whose tier the source is; None: it is the executor's own.
    """

    source: int
    target: int
    pairs: bytes
    peer: RemoteTier | None = None


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
        chunks: (row, n): compute the row's next n known tokens.
        constraints: of the sequences in ``joined``, each once.
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


class CancelCopies(Message, frozen=True):
    """What a step copies from ``peer`` (a block endpoint) is not wanted any more, or will not come: confirm it now, and
    what is missing as bad."""

    epoch: int
    step: int
    peer: str


class Drain(Message, frozen=True):
    """No more work will come under this epoch; the executor says Goodbye once its last step is answered."""

    epoch: int


FromExecutor = Hello | StepResult | Copied | Heartbeat | Leaving | Goodbye
FromScheduler = Welcome | Refused | HeartbeatAck | Rejoin | StepPlan | CancelCopies | Drain

# ---- executor -> executor -----------------------------------------------------------------------------


class ReadBlocks(Message, frozen=True):
    """Send me the content of these blocks: answered by ``Blocks`` and, if there is no error, the bytes.

    ``number``: the asker's, repeated in the answer. ``epoch``, ``step``: as in ``RemoteTier``. ``blocks``: pairs tier,
    block (int32 bytes).
    """

    number: int
    epoch: int
    step: int
    blocks: bytes


class Blocks(Message, frozen=True):
    """What was asked for follows in further frames of 2 MiB and a rest: the blocks one after the other.

    ``checksum``: xxh3_64 of it.
    """

    number: int
    checksum: int = 0
    error: str = ""

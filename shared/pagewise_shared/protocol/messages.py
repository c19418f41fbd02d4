"""The messages between the scheduler and executors, and between executors; docs/wire-protocol.md describes their use.

``steps`` has the messages of steps, ``storage`` the messages about tiers whose blocks have no ids.

A frame is one message: a tagged, frozen, array-like msgpack struct. Fields are only appended, with defaults, so that
minor versions understand each other; any other change raises ``PROTOCOL_MAJOR``. Arrays of integers are little-endian
int32 bytes (``pack_int32s``).
"""

from typing import Annotated, Literal, get_args

from msgspec import Meta

from pagewise_shared.protocol.base import Message, Piece
from pagewise_shared.protocol.limits import MAX_ADAPTERS, MAX_GROUPS, MAX_TIERS
from pagewise_shared.protocol.memory import SetStoredBudgets
from pagewise_shared.protocol.steps import (
    CancelCopies,
    Copied,
    GroupedStepPlan,
    ProposingStepPlan,
    StepPlan,
    StepResult,
)
from pagewise_shared.protocol.storage import DropStored, Found, LookUp, StoredDropped, StoredGone
from pagewise_shared.sampling import MAX_GRAMMAR_BYTES

Role = Literal["prefill", "decode", "both"]
"""An executor's role in disaggregated serving: computing prompts, decoding prompts that others have computed, or
both."""
ROLES: tuple[Role, ...] = get_args(Role)


class Adapter(Piece, frozen=True):
    """An adapter in PEFT's format.

    Fields:
        name: which clients use. path: its folder on the executors, or a hub id.
        content: hash of its files (32 bytes), from ``read_adapter``; KV belongs to this hash, not to the name.
        num_bytes: size of its weights. rank: the largest of its modules. created: seconds since 1970.
    """

    name: str
    path: str
    content: bytes
    num_bytes: int = 0
    rank: int = 0
    created: int = 0


# ---- executor -> scheduler ----------------------------------------------------------------------------


class AdapterCapacity(Piece, frozen=True):
    """The adapters that an executor can serve.

    ``slots``: adapters on its device at a time; 0: it serves none. ``max_rank``: the largest rank.
    """

    slots: int = 0
    max_rank: int = 0


NO_ADAPTERS = AdapterCapacity()
"""The capacity of an executor that serves no adapters."""


class MeasuredCosts(Piece, frozen=True):
    """The times of steps that the executor measured when it started, in microseconds: the scheduler's first estimates.

    Fields:
        step: any step. token: each token of a prefill. attention: one token attending to one. context: each token
            before the end of a chunk, which the chunk reads once.
    """

    step: float
    token: float
    attention: float
    context: float = 0.0


class TierInfo(Piece, frozen=True):
    """A tier of an executor below the device.

    Fields:
        number: index in ``TIER_NAMES``. num_blocks: at least 1; 0 for ``HASH_TIERS``. An executor with several groups
            of layers counts and times pages instead of blocks.
        load_setup, load_block: time of a list of copies from the tier to the device, and of each block in the list, in
            microseconds; store_setup, store_block: the same from the device to the tier. All are 0 if nothing was
            measured.
        identity: executors with the same identity share the content of the tier; empty: the tier belongs to one
            executor.
        block_bytes: that a block takes there, which may have fewer bits than on the device; 0: as many as there.
        dtype: the type of the copies there, if they have fewer bits; empty: they are exact.
    """

    number: int
    num_blocks: int
    load_setup: float = 0.0
    load_block: float = 0.0
    store_setup: float = 0.0
    store_block: float = 0.0
    identity: str = ""
    block_bytes: int = 0
    dtype: str = ""


GroupKind = Literal["full", "latent", "window", "chunk", "state"]
"""The content of a group's blocks: K and V of all tokens, or their latents; K and V of a window; of a chunk; states."""


class LayerGroup(Piece, frozen=True):
    """Layers of a model whose blocks hold the same tokens. The first group has the layers that see all tokens.

    Fields:
        num_layers: with K and V of their own. pages_per_block: pages of the arena that a block of the group takes.
        window: tokens that a query sees, itself included; 0: all of them. chunked: contexts are cut into chunks of
            ``window`` tokens, and a query sees the tokens of its own chunk only.
        state: the layers are recurrent. A block has their states behind one token, and nothing of the tokens before it,
            so ``window`` is 2: to go on, a sequence needs the block with the token before.
        latent: blocks have a latent of each token, from which K and V are computed. For people alone.
    """

    num_layers: int
    pages_per_block: int
    window: int = 0
    chunked: bool = False
    state: bool = False
    latent: bool = False


class Hello(Message, frozen=True):
    """An executor asks to join. It repeats this, with growing pauses, until Welcome or Refused arrives.

    Fields:
        executor_id: stable name of the executor, for people and metrics; not the socket's identity.
        model_fingerprint: equal fingerprints mean equal weights and configuration.
        max_model_len: maximum tokens of a sequence, by the model and the executor's options.
        block_size: tokens per block. num_blocks: blocks in the device pool. bytes_per_block: all layers, K and V.
        max_num_seqs, max_num_batched_tokens: limits of a step that the executor has memory for; 0: the Welcome decides.
        device: for people, such as "cpu" or "cuda:0 (NVIDIA H200)".
        tiers: its tiers below the device, the fastest first. costs: measured times of its steps, if there are any.
        block_endpoint: ZeroMQ endpoint where other executors fetch blocks, or the endpoints of all ranks, separated by
            spaces; empty: others cannot fetch from it. block_format: executors with equal formats can use each other's
            blocks. inventory: blocks that it holds from an earlier session; None: none.
        number: of the inventory; it changes with the inventory only.
        kernels: the implementation that computes the model, for people, such as "triton". fallback: the preferred
            kernels cannot compute this model or were not built for this processor, or CUDA graphs could not be
            captured.
        no_segments: why requests cannot have segments; empty: they can.
        role: one of ``ROLES``.
        no_grammars: why outputs cannot be constrained by a grammar; empty: they can.
        adapters: the adapters that it can serve.
        max_grammars: grammars that it keeps compiled; 0: it compiles a grammar only when its sequence joins.
        short_rope_len: maximum tokens of a sequence that uses the short factors of LongRoPE. All KV of a longer
            sequence has the long factors, so a sequence that outgrows this limit leaves its row and joins again without
            KV. 0: the factors do not depend on the length.
        groups: the groups of layers, if there are several. They share ``num_pages`` pages of ``page_bytes`` bytes. A
            group has as many blocks as there are pages for; ``num_blocks`` and ``bytes_per_block`` are the first
            group's.
        max_proposed: most tokens of a draft that its own drafter proposes; 0: it has no drafter. max_proposing: with
            more running sequences the drafter is not to be used; 0: measured times alone decide.
        drafts_with_grammars: drafts of sequences with grammars are verified, too.
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
    tiers: Annotated[tuple[TierInfo, ...], Meta(max_length=MAX_TIERS)] = ()
    costs: MeasuredCosts | None = None
    block_endpoint: str = ""
    block_format: str = ""
    inventory: "Inventory | None" = None
    number: int = 0
    kernels: str = ""
    fallback: bool = False
    no_segments: str = ""
    role: str = "both"
    no_grammars: str = ""
    adapters: AdapterCapacity = NO_ADAPTERS
    max_grammars: int = 0
    short_rope_len: int = 0
    groups: Annotated[tuple[LayerGroup, ...], Meta(max_length=MAX_GROUPS)] = ()
    num_pages: int = 0
    page_bytes: int = 0
    max_proposed: int = 0
    max_proposing: int = 0
    drafts_with_grammars: bool = False


class NamedBlocks(Piece, frozen=True):
    """Full blocks of one tier and one group of layers.

    Fields:
        tier: its number. blocks: their ids (int32 bytes). hashes: their block hashes in the same order (32 bytes each):
            blocks of all groups that hold the same tokens behind the same prefix have the same hash. group: of layers.
    """

    tier: int
    blocks: bytes
    hashes: bytes
    group: int = 0


class Inventory(Piece, frozen=True):
    """Full blocks whose content an executor knows, of each tier and group of layers that has some.

    An executor with several groups offers a block if it holds all of the block's pages, and offers a hash only once for
    each tier and group.
    """

    tiers: Annotated[tuple[NamedBlocks, ...], Meta(max_length=MAX_TIERS)] = ()


class GrammarCompiled(Message, frozen=True):
    """Answers ``CompileGrammar``: steps do not wait for this grammar now, even if it could not be compiled."""

    epoch: int
    number: int


class Heartbeat(Message, frozen=True):
    """Sent every ``Welcome.heartbeat_ms``, also while a step runs. Answered by HeartbeatAck or Rejoin.

    The counters grow from the start of the executor. ``refused``: connections to its block socket that were refused
    because of their keys, except reports to this scheduler in an earlier session. ``tasks``: tasks of the
    executor's event loop. ``storage_errors``: failed reads and writes of storage. ``grammar_waits``: steps that waited
    for a grammar to be compiled. ``copied_small``, ``copied_exact``, ``copied_above_bound``: blocks that were copied to
    tiers below the device: in fewer bits, to tiers of exact copies, and exactly to tiers of fewer bits, because of the
    bound on the error.
    """

    epoch: int
    refused: int = 0
    tasks: int = 0
    storage_errors: int = 0
    grammar_waits: int = 0
    copied_small: int = 0
    copied_exact: int = 0
    copied_above_bound: int = 0


class Leaving(Message, frozen=True):
    """The executor received a signal to stop. It asks to be drained, and works on until ``Drain``, or for
    ``timeout_ms``."""

    epoch: int
    timeout_ms: int


class Goodbye(Message, frozen=True):
    """The executor stops and takes no more plans."""

    epoch: int
    reason: str = ""


class AdapterLoaded(Message, frozen=True):
    """An adapter was loaded, or could not be.

    Fields:
        elapsed_us: reading it, checking it and copying it to its slot, without waiting for others, microseconds.
        from_host: the host had it already. evicted: adapters that the host evicted for it (their contents).
        error: why it could not be loaded; then the slot is empty.
    """

    epoch: int
    number: int
    elapsed_us: int = 0
    from_host: bool = False
    evicted: Annotated[tuple[bytes, ...], Meta(max_length=MAX_ADAPTERS)] = ()
    error: str = ""


# ---- scheduler -> executor ----------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The executor has joined. Everything it held under another epoch is void: all rows are emptied.

    A further Welcome with a higher epoch resets an executor whose step failed.

    ``keeps_blocks``: the inventory of the Hello with the number ``hello`` stays valid; otherwise the pools are empty.
    The executor ignores a Welcome for an older inventory.
    """

    epoch: int
    max_num_seqs: int
    max_num_batched_tokens: int
    heartbeat_ms: int = 1000
    keeps_blocks: bool = False
    hello: int = 0


class Refused(Message, frozen=True):
    """The executor cannot join; it logs the reason and exits."""

    reason: str


class HeartbeatAck(Message, frozen=True):
    """The scheduler is alive and knows this executor under this epoch."""

    epoch: int


class Rejoin(Message, frozen=True):
    """The scheduler does not know the sender (the scheduler was restarted, or gave the executor up): say Hello
    again."""


class CompileGrammar(Message, frozen=True):
    """Compile the grammar of a sequence that will join, beside the steps; ``GrammarCompiled`` with the same ``number``
    answers.

    The executor keeps the ``Hello.max_grammars`` grammars that were requested or joined last, as far as they fit
    ``MAX_COMPILED_CHARACTERS`` together.
    """

    epoch: int
    number: int
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)]


class Drain(Message, frozen=True):
    """No more work will come under this epoch; the executor sends Goodbye once its last step is answered."""

    epoch: int


class LoadAdapter(Message, frozen=True):
    """Load an adapter into a slot of the device; ``AdapterLoaded`` with the same ``number`` answers.

    ``slot``: 0 <= slot < ``AdapterCapacity.slots``, not used by any row of a step in flight; -1: load it to the host
    only, to check it.
    """

    epoch: int
    number: int
    adapter: Adapter
    slot: int = -1


FromExecutor = (
    Hello
    | StepResult
    | Copied
    | Found
    | StoredDropped
    | StoredGone
    | AdapterLoaded
    | GrammarCompiled
    | Heartbeat
    | Leaving
    | Goodbye
)
FromScheduler = (
    Welcome | Refused | HeartbeatAck | Rejoin | StepPlan | GroupedStepPlan | ProposingStepPlan | CancelCopies | LookUp
    | DropStored | SetStoredBudgets | LoadAdapter | CompileGrammar | Drain
)  # fmt: skip

# ---- executor -> executor -----------------------------------------------------------------------------


class ReadBlocks(Message, frozen=True):
    """Ask another executor for the content of blocks: it answers with ``Blocks`` and, unless there is an error, the
    bytes.

    ``number``: repeated in the answer. ``epoch``, ``step``: as in ``RemoteTier``. ``blocks``: pairs tier, block (int32
    bytes). Of a model with several groups of layers, pages of ``group`` are asked for instead: the number of a page is
    block times pages per block, plus the index of the page in the block.
    """

    number: int
    epoch: int
    step: int
    blocks: bytes
    group: int = 0


class Blocks(Message, frozen=True):
    """Answers ``ReadBlocks``: further frames of 2 MiB and a rest contain the blocks, one after the other.

    ``checksum``: xxh3_64 of their content.
    """

    number: int
    checksum: int = 0
    error: str = ""

"""The messages between scheduler and executor; ``docs/wire-protocol.md`` tells how they are used.

Steps are in ``step_messages.py``; ``base.py`` has the rules that all messages follow.
"""

from typing import Annotated, Literal, get_args

from msgspec import Meta

from pagewise_shared.protocol.adapter_messages import NO_ADAPTERS, AdapterCapacity, AdapterLoaded, LoadAdapter
from pagewise_shared.protocol.base import Message, Piece
from pagewise_shared.protocol.limits import MAX_TIERS
from pagewise_shared.protocol.step_messages import StepError, StepPlan, StepResult
from pagewise_shared.sampling import MAX_GRAMMAR_BYTES

PROTOCOL_MAJOR = 5
PROTOCOL_MINOR = 0

DEVICE, HOST, DISK, REDIS = 0, 1, 2, 3
"""The tiers of KV memory by their numbers, the nearest to the computing first: blocks are demoted in this order."""
HASH_TIERS = (DISK, REDIS)
"""The tiers whose blocks have no ids, and are found by their block hashes."""

TIER_NAMES = ("device", "host", "disk", "redis")
"""The names of the tiers, by number."""
POOL_TIERS = tuple(name for number, name in enumerate(TIER_NAMES) if number not in HASH_TIERS)
"""The names of the tiers whose blocks have ids."""
SOURCES = (*TIER_NAMES, "peer")
"""The places that KV may come from: the own tiers, and those of other executors."""

Role = Literal["prefill", "decode", "both"]
"""What an executor is for: computing prompts, which go on elsewhere; decoding what was computed elsewhere; or both."""
ROLES: tuple[Role, ...] = get_args(Role)


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


class TierInfo(Piece, frozen=True):
    """A tier below the device that an executor has.

    Fields:
        number: see ``TIER_NAMES``. num_blocks: at least 1; 0 for ``HASH_TIERS``.
        load_setup, load_block: what a list of copies from it to the device took when the executor started, and each
            block in the list, in microseconds; store_setup, store_block: the same from the device to it. All of them
            are 0 if nothing was measured.
        identity: executors with the same one share the content of the tier; empty: the executor has it alone.
    """

    number: int
    num_blocks: int
    load_setup: float = 0.0
    load_block: float = 0.0
    store_setup: float = 0.0
    store_block: float = 0.0
    identity: str = ""


class Hello(Message, frozen=True):
    """An executor offers itself. Sent again, with growing pauses, until Welcome or Refused arrives.

    Fields:
        executor_id: stable name of the executor, for people and metrics; the socket identity is another thing.
        model_fingerprint: equal fingerprints mean equal weights and configuration.
        max_model_len: most tokens a sequence may reach, by the model and the executor's options.
        block_size: tokens per block. num_blocks: blocks in the device pool. bytes_per_block: all layers, K and V.
        max_num_seqs, max_num_batched_tokens: what the executor has prepared room for, by its options or its device; 0:
            as the Welcome says.
        device: for people, such as "cpu" or "cuda:0 (NVIDIA H200)".
        tiers: those that it has below the device, the nearest first. costs: what it has measured of its steps, if
            anything.
        block_endpoint: ZeroMQ endpoint where other executors fetch blocks, or those of its ranks with spaces between
            them; empty: it lends none. block_format: those with the same one can use each other's blocks. inventory:
            blocks it holds from before; None: nothing.
        number: of the inventory; one that is offered again has the same.
        kernels: what computes the model, for people, such as "triton". fallback: other kernels would have been chosen,
            but cannot compute this model, or have not been built for this processor; or CUDA graphs were to be used,
            but could not be captured.
        no_segments: why requests cannot have segments; empty: they can.
        role: one of ``ROLES``: what the executor is for.
        no_grammars: why outputs cannot be made to match a grammar; empty: they can.
        adapters: which adapters it can serve.
        max_grammars: those that it keeps compiled; 0: it compiles none before their sequences join.
        short_rope_len: most tokens of a sequence that it computes with the short factors of LongRoPE. All KV of a
            longer one has the long factors, so a sequence that outgrows this leaves its row and joins anew without
            KV. 0: the length of a sequence does not matter.
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


class Copied(Message, frozen=True):
    """One list of a step's copies has been made: that between these tiers, and from this peer if it is one of those.

    If a step has several such lists, their confirmations come in the order of the plan.

    Fields:
        source, target: as in ``BlockCopies``. peer: the endpoint that the blocks came from; empty: it was an own tier.
        elapsed_us: from the first copy's beginning to the last one's end, without waiting for others, microseconds.
        bad: the targets in ``BlockCopies.pairs`` that do not hold what they should (int32 bytes): the source was
            corrupt, or did not arrive, or could not be written.
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


class Found(Message, frozen=True):
    """Answers ``LookUp``: of the prefix's full blocks, the first ``num_blocks`` are there, as far as can be told."""

    epoch: int
    number: int
    num_blocks: int


class GrammarCompiled(Message, frozen=True):
    """Answers ``CompileGrammar``: steps do not wait for that grammar now, also if it turned out to make no sense."""

    epoch: int
    number: int


class Heartbeat(Message, frozen=True):
    """Sent every ``Welcome.heartbeat_ms``, also while a step runs. Answered by HeartbeatAck or Rejoin.

    ``refused``: connections to its block socket that were refused because of their keys, a running total: all that the
    scheduler which let it in has not been told of in an earlier life. ``tasks``: of an executor's event loop.
    ``storage_errors``: reads and writes of storage that have failed, since the executor started. ``grammar_waits``:
    steps that have waited for a grammar to be compiled, likewise.
    """

    epoch: int
    refused: int = 0
    tasks: int = 0
    storage_errors: int = 0
    grammar_waits: int = 0


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


class CancelCopies(Message, frozen=True):
    """Copies of a step are not wanted any more, or take too long: confirm them now, and what is missing as bad.

    They are those from ``peer`` (a block endpoint), or, if that is empty, those to and from the own tier ``tier``, one
    of ``HASH_TIERS``.
    """

    epoch: int
    step: int
    peer: str = ""
    tier: int = DEVICE


class LookUp(Message, frozen=True):
    """How much of a prefix is in one of ``HASH_TIERS``? Answered by ``Found`` with the same ``number``.

    ``tier``: its number. ``root``: where the prefix's block hashes begin. ``tokens``: of the prefix (int32 bytes).
    """

    epoch: int
    number: int
    tier: int
    root: bytes
    tokens: bytes


class CompileGrammar(Message, frozen=True):
    """Compile a grammar beside the steps, for a sequence that is to join: answered by ``GrammarCompiled`` with the same
    ``number``.

    The executor keeps the ``Hello.max_grammars`` that were asked for or joined last, and of them as many as have
    ``MAX_COMPILED_CHARACTERS`` together.
    """

    epoch: int
    number: int
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)]


class Drain(Message, frozen=True):
    """No more work will come under this epoch; the executor says Goodbye once its last step is answered."""

    epoch: int


FromExecutor = Hello | StepResult | Copied | Found | AdapterLoaded | GrammarCompiled | Heartbeat | Leaving | Goodbye
FromScheduler = (
    Welcome | Refused | HeartbeatAck | Rejoin | StepPlan | CancelCopies | LookUp | LoadAdapter | CompileGrammar | Drain
)

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

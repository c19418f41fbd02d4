"""A sequence's page tables: which block holds its tokens, and the cached prefix with which they begin."""

from dataclasses import dataclass, field

from pagewise_scheduler.core.memory.eviction_history import RequestRef
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock


@dataclass(slots=True)
class WindowTable:
    """The blocks of a sequence in a group of windowed layers: ``blocks``, the first of which is block ``first``.

    ``source``: the block from which the last one is to be copied when the sequence joins; negative: none. ``loading``:
    the window comes from another tier, and is not there yet.
    """

    first: int = 0
    blocks: list[int] = field(default_factory=list)
    source: int = -1
    loading: bool = False

    @property
    def end(self) -> int:
        """The number of blocks up to the last one that it holds."""
        return self.first + len(self.blocks)

    def take(self, other: "WindowTable") -> None:
        """Take the blocks of ``other``."""
        self.first, self.blocks = other.first, other.blocks

    def clear(self) -> None:
        """Hold nothing any more."""
        self.first, self.blocks, self.source, self.loading = 0, [], -1, False

    def joined(self) -> tuple[int, list[int]]:
        """How a sequence that joins describes it, as ``NewSequence.windows`` has it."""
        return self.first, self.blocks


@dataclass(slots=True)
class StateTable(WindowTable):
    """The blocks of a sequence in a group of states: the ones behind ``tokens`` tokens, which it keeps, and the one to
    which steps write, which is the last of ``blocks``. There is none of these until its first step is planned.

    ``declared``: numbers of tokens behind which it keeps states if ``StateGroup.most_blocks`` suffice.
    ``step``: the blocks between places inside of its prompt that may take snapshots; 0: no place does. ``since``: the
    last place so far, in blocks of the ``num_blocks`` of the prompt. ``inside``: the places inside that take a
    snapshot. ``skipped``: the places that take none because a snapshot is not worth its memory, with their kinds (see
    ``roles``). ``fork``: the number of tokens behind which further outputs of the request begin; 0: the request
    has no further outputs.
    ``entry``: the tokens behind which the sequence begins that joins next; None: some step has written. ``stop``: the
    number of tokens behind which the last block has the states when all planned steps are back; in decoding, the end of
    the block of tokens.
    """

    tokens: list[int] = field(default_factory=list)
    declared: list[int] = field(default_factory=list)
    stop: int = -1
    entry: int | None = None
    step: int = 0
    since: int = 0
    num_blocks: int = 0
    inside: list[int] = field(default_factory=list)
    skipped: dict[int, int] = field(default_factory=dict)
    fork: int = 0

    def take(self, other: WindowTable) -> None:
        """Take copies of the lists of blocks and tokens of ``other``."""
        assert isinstance(other, StateTable)
        self.blocks, self.tokens, self.entry, self.stop = [*other.blocks], [*other.tokens], None, -1
        self.declared = []

    def clear(self) -> None:
        """Hold nothing any more."""
        WindowTable.clear(self)
        self.tokens, self.entry, self.stop = [], None, -1
        self.step, self.inside, self.skipped, self.fork = 0, [], {}, 0

    def joined(self) -> tuple[int, list[int]]:
        """How a sequence that joins describes it, as ``NewSequence.windows`` has it."""
        entry, self.entry = self.entry, None
        if not entry:
            return 0, self.blocks[:1] if entry == 0 else self.blocks[-1:]
        at = self.tokens.index(entry)
        return entry, self.blocks[at : at + 2]


@dataclass(slots=True)
class CachedPrefix:
    """KV with which a sequence can begin: whole ``blocks``, then ``partial_tokens`` of the block ``partial_block``.

    ``num_tokens``: the tokens of both, which are on the device. Behind ``blocks`` come ``gap`` blocks that lie in no
    tier, and the blocks ``offloaded``, which lie in tiers below the device; if there are any, no block is partial.
    ``windows``: the blocks at the end in each group of windowed layers; the last one is partial too. ``junction``: the
    number of blocks on the device that the prompt has in common with others; behind some of them none can begin.
    ``resume``: the number of blocks at whose end ``windows`` are. With windows, ``offloaded`` has the blocks between
    ``blocks`` and the last one behind which a tier of the executor has the windows, also the ones on the device;
    ``path``: all blocks of the prompt in the prefix tree.
    """

    blocks: list[CachedBlock]
    partial_block: int
    partial_tokens: int
    num_tokens: int
    offloaded: list[CachedBlock] = field(default_factory=list)
    gap: int = 0
    windows: tuple[WindowTable, ...] = ()
    junction: int = 0
    resume: int = 0
    path: list[CachedBlock] = field(default_factory=list)


class BlockTable:
    """Blocks of one sequence in order: token ``i`` lives in block ``i // block_size`` at slot ``i % block_size``.

    ``cache_salt``: whose cache it shares. ``last_node``: the node of the last block whose content is in the prefix
    tree; the tree owns the blocks up to it, the sequence alone owns the blocks after it. ``owner``: the request
    of the sequence. ``windows``: its tables in the groups of windowed layers. ``due``: the depths at which its windows
    take snapshots while its prompt is computed, in order. ``tails``: of the snapshots near its end, the blocks from
    there to its end.
    """

    __slots__ = ("block_size", "blocks", "cache_salt", "due", "last_node", "owner", "tails", "windows")

    def __init__(
        self,
        block_size: int,
        cache_salt: str | None = None,
        owner: RequestRef | None = None,
        windows: tuple[WindowTable, ...] = (),
    ) -> None:
        self.block_size = block_size
        self.cache_salt = cache_salt
        self.owner = owner
        self.blocks: list[int] = []
        self.due: list[int] = []
        self.tails: dict[int, int] = {}
        self.last_node: CachedBlock | None = None
        self.windows = windows

    @property
    def num_slots(self) -> int:
        """Tokens the table has room for."""
        return len(self.blocks) * self.block_size

    @property
    def num_known(self) -> int:
        """Leading blocks whose content is in the prefix tree."""
        return 0 if self.last_node is None else self.last_node.depth

    def blocks_missing(self, num_tokens: int) -> int:
        """How many more blocks it takes to hold ``num_tokens`` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(self.blocks))
